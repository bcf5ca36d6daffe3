"""Talk with a model: a run's trained policy, or any that a run may begin with.

    rlhf-jax chat runs/quickstart [--system "Be brief."] [--say "A question"]

Without --say it reads one message after the other; an empty line ends it. The conversation may be
as long as the model's context.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data.rendering import Message
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.speculative.tree import PLAIN
from rlhf_jax.mesh import ONE_DEVICE
from rlhf_jax.models.files.source import Source, open_source

MOST_CONTEXT = 2048  # tokens of a conversation


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog=argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="workdir of a run, a Hugging Face folder, .gguf, or org/name")
    parser.add_argument("--system", default="", help="system prompt; a policy expects its run's")
    parser.add_argument("--say", action="append", default=[], help="a message; again for the next")
    by_default = " (default: %(default)s)"
    likeliest = f"0 takes the likeliest token{by_default}"
    parser.add_argument("--temperature", type=float, default=0.0, help=likeliest)
    parser.add_argument("--tokens", type=int, default=256, help=f"of an answer at most{by_default}")
    parser.add_argument("--seed", type=int, default=0, help=f"of the draws{by_default}")
    options = parser.parse_args(argv[1:])
    if options.tokens < 1:
        raise ValueError(f"--tokens is {options.tokens}; an answer needs 1 or more.")
    place = Path(options.model).expanduser()
    has_policy = (place / "policy").is_dir()
    if place.is_dir() and not has_policy and not any(place.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{place} holds neither policy/, as a run's workdir does once the run has ended, nor"
            " *.safetensors, as a model's folder does; rlhf-jax export gives the policy of a"
            " checkpoint."
        )
    print("loading the model ...", file=sys.stderr, flush=True)
    source = open_source(str(place / "policy") if has_policy else options.model)
    chat: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    texts = iter(options.say) if options.say else _typed_lines()
    for answer in answers(source, texts, chat, options.temperature, options.tokens, options.seed):
        print(answer, flush=True)
    return 0


def answers(
    source: Source,
    texts: Iterator[str],
    chat: list[Message],
    temperature: float,
    most_tokens: int,
    seed: int,
) -> Iterator[str]:
    """Yield the answer to each message; `chat` holds the conversation so far and grows.

    temperature: 0 takes the likeliest token. most_tokens: of an answer. Raises ValueError, in one
    sentence, if the context has no room for the conversation.
    """
    context = min(MOST_CONTEXT, source.config.max_context)
    on_cpu = jax.devices()[0].platform == "cpu"
    layout = dataclasses.replace(ONE_DEVICE, dtype=jnp.dtype("float32" if on_cpu else "bfloat16"))
    weights = decoding_weights(source.load(layout.dtype), layout)
    decoding = GenerationConfig(
        Sampling(temperature), (PLAIN,), source.stop_tokens, 1, max_length=context, seed=seed
    )
    for number, text in enumerate(texts):
        chat.append({"role": "user", "content": text})
        prompt = np.array(source.tokenizer.encode_chat(chat), np.int32)
        room = min(most_tokens, context - len(prompt))
        if room < 1:
            raise ValueError(
                f"The conversation has {len(prompt)} tokens, and there is room for {context};"
                " begin a new one."
            )
        if number == 0:
            print("compiling the first answer ...", file=sys.stderr, flush=True)
        wanted = [Request(prompt, (number,), room)]
        (sample,) = generate(weights, None, wanted, decoding, layout)
        answer = source.tokenizer.decode(sample.tokens)
        chat.append({"role": "assistant", "content": answer})
        yield answer


def _typed_lines() -> Iterator[str]:
    """Yield lines from the terminal or a pipe, up to an empty line or the end of the input."""
    while True:
        # to stderr, as stdout has the answers alone
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
