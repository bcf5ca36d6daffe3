r"""One RL step beside TRL's GRPOTrainer and tunix's GRPOLearner or PPOLearner: CPU, float32.

    python benchmarks/step.py --model DIR --case 50+32 \
        --peer trl=/path/to/python --peer tunix=/path/to/python

DIR is a Hugging Face folder of a Llama model. Each peer runs in a Python environment of its own:

    python3.11 -m venv trl_env && trl_env/bin/pip install torch trl
    python3.12 -m venv tunix_env && tunix_env/bin/pip install google-tunix

A case is the tokens of prompts and, at most, of responses, which end by themselves: at the model's
own end, in 50+32 at a full stop. Every engine is a process that trains the same model on the same
prompts, with as many samples, the same learning rate and KL coefficient, and a reward that costs
nothing; all else is as its makers have it, but that TRL keeps its activations, which is quicker
here. "_whole" has all samples of a step in one micro-batch, "trl_checkpointed" computes activations
again, as is TRL's default; tunix has one micro-batch as it comes, and TRL 1.16 has no PPO. With
`--algorithm ppo` there is a critic, begun as the policy, and a KL is taken from the reward. With
`--algorithm dpo` a step takes pairs of answers with one prompt (of 0+64 a prompt is one token),
beside TRL's DPOTrainer, and nothing is generated. After
`--warm-up` steps each, which compile, the engines take turns, A B C A B C, a step each, and only
one works at a time. A JSON document is printed for each case: CPU seconds (user and system, all
threads, children too) and wall seconds of a step, response tokens, peak memory, and the ratio to
ours, taken turn by turn, as median, least and greatest. All cases take about two hours on two
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare import PEER_FOLDER, SETTLE_SECONDS, ask, cpu_name, receive, spread, start
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.models.files.source import open_source
from rlhf_jax.runtime.foreign import read_json

PEERS = ("trl", "tunix")


class Case(NamedTuple):
    """Sizes of a step, and the token that ends a response."""

    prompt: int  # tokens, at most
    new: int  # tokens, at most
    prompts: int
    stop: str  # as the vocabulary has it; '' for the model's own


CASES = {
    "50+32": Case(50, 32, 4, "."),
    "200+200": Case(200, 200, 4, ""),
    "1000+100": Case(1000, 100, 2, ""),
}
PAIRS = {"0+64": Case(1, 64, 4, ""), "128+64": Case(128, 64, 4, ""), "256+64": Case(256, 64, 4, "")}


class Engine(NamedTuple):
    """A way to run a system."""

    system: str
    whole: bool = False  # all samples of a step are one micro-batch
    checkpointed: bool = False  # activations are computed again


ENGINES = {
    "rlhf_jax": Engine("rlhf_jax"),
    "rlhf_jax_whole": Engine("rlhf_jax", whole=True),
    "trl": Engine("trl"),
    "trl_whole": Engine("trl", whole=True),
    "trl_checkpointed": Engine("trl", checkpointed=True),
    "tunix": Engine("tunix"),
}
WORDS = ("river", "winter", "garden", "letter", "bridge", "candle", "harbour", "market", "forest")
REWARD = (
    "def vowels(prompt, response, row):\n    return float(sum(c in 'aeiou' for c in response))\n"
)


def main() -> None:
    """Measure each requested case."""
    options = arguments()
    cases = PAIRS if options.algorithm == "dpo" else CASES
    for name in [options.case] if options.case else cases:
        print(json.dumps({"case": name} | measure(options, cases[name])), flush=True)


def measure(options: argparse.Namespace, case: Case) -> dict:
    """Start the workers, let each warm up, then let them take turns."""
    pythons = {"rlhf_jax": sys.executable} | dict(options.peer)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = write_inputs(options, case, folder)
        workers = []
        versions = {}
        for name, engine in ENGINES.items():
            if engine.system not in pythons or name not in options.engines:
                continue
            own = folder / name
            own.mkdir()
            file = own / "settings.json"
            file.write_text(json.dumps(settings | engine._asdict()))
            script = PEER_FOLDER / f"{engine.system}_step.py"
            line = [pythons[engine.system], str(script), str(file)]
            workers.append(stack.enter_context(start(name, line, environment)))
            versions[name] = receive(workers[-1])["versions"]
            for _ in range(options.warm_up):
                ask(workers[-1], {})
            print(f"{name} is warm.", file=sys.stderr)
        turns = []
        for _ in range(options.repeats):
            turns.append({})
            for worker in workers:
                time.sleep(SETTLE_SECONDS)
                turns[-1][worker.name] = ask(worker, {})
    return describe(options, case, turns, versions)


def arguments() -> argparse.Namespace:
    """The command line; ends in one sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a Llama model")
    parser.add_argument("--algorithm", choices=("grpo", "ppo", "dpo"), default="grpo")
    parser.add_argument("--case", choices=[*CASES, *PAIRS], help="one of them; all without it")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--kl", type=float, default=0.0, help="KL coefficient; 0 is TRL's default")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--engines",
        type=_engines,
        default=list(ENGINES),
        help="those that take turns, with commas, rlhf_jax among them; all need 30 GB of memory",
    )
    parser.add_argument("--peer", default=[], action="append", type=_peer, help="name=/its/python")
    options = parser.parse_args()
    if options.case and options.case not in (PAIRS if options.algorithm == "dpo" else CASES):
        parser.error(f"{options.case} is no case of {options.algorithm}.")
    if options.algorithm == "ppo" and "trl" in dict(options.peer):
        parser.error("TRL has no trainer for PPO; leave --peer trl out.")
    return options


def _engines(text: str) -> list[str]:
    names = text.split(",")
    if "rlhf_jax" not in names or not set(names) <= ENGINES.keys():
        raise argparse.ArgumentTypeError(f"{text!r} must name rlhf_jax and some of {list(ENGINES)}")
    return names


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or shutil.which(python) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PYTHON of {' or '.join(PEERS)} and a Python that has it"
        )
    return name, python


def write_inputs(options: argparse.Namespace, case: Case, folder: Path) -> dict:
    """Write prompts, a reward, and a copy of the model with the case's end token.

    Return the settings.
    """
    tokenizer = open_source(options.model).tokenizer
    spelled = case.stop or read_json(options.model / "tokenizer_config.json")["eos_token"]
    known = read_json(options.model / "tokenizer.json")
    vocabulary = known["model"]["vocab"] | {
        one["content"]: one["id"] for one in known["added_tokens"]
    }
    stop = vocabulary[spelled]
    model = folder / "model"
    model.mkdir()
    for file in options.model.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            changed = read_json(file) | {"eos_token_id": stop}
        elif file.name == "tokenizer_config.json":
            changed = read_json(file) | {"eos_token": spelled}
        else:
            (model / file.name).symlink_to(file.resolve())
            continue
        (model / file.name).write_text(json.dumps(changed))

    rows = []
    for number in range(64):
        if options.algorithm == "dpo":
            begins = {"rendered": number, "chosen": number + 3, "rejected": number + 5}
            lengths = {"rendered": case.prompt}
            texts = {
                side: words_of(begin, lengths.get(side, case.new - 1), tokenizer)
                for side, begin in begins.items()
            }
            rows.append({**texts, "prompt": texts["rendered"], "tokens": case.prompt})
            continue
        chat, ids = prompt_of(number, case.prompt, tokenizer)
        rows.append({"prompt": chat, "rendered": tokenizer.decode_whole(ids), "tokens": len(ids)})
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    longest = max(row["tokens"] for row in rows)
    return {
        "algorithm": options.algorithm,
        "model": str(model),
        "prompts": str(prompts),
        "reward": str(folder / "reward.py"),
        "stop": stop,
        "prompt_tokens": longest,
        "prompts_per_step": case.prompts,
        "samples": options.samples,
        "new_tokens": case.new,
        "learning_rate": options.learning_rate,
        "kl": options.kl,
    }


def prompt_of(number: int, most: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A prompt of words, as many as fit into the given tokens, and its tokens as a chat."""
    words: list[str] = []
    found = "", []
    while True:
        words.append(WORDS[(number + 3 * len(words)) % len(WORDS)])
        text = f"Tell me of a {' and a '.join(words)}."
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(ids) > most and words[1:]:
            return found
        found = text, ids


def words_of(number: int, tokens: int, tokenizer: Tokenizer) -> str:
    """A text of words, of so many tokens."""
    text = ""
    while len(tokenizer.encode(text)) < tokens:
        text += f" {WORDS[(number + len(text)) % len(WORDS)]}"
    return tokenizer.decode(tokenizer.encode(text)[:tokens])


def describe(options: argparse.Namespace, case: Case, turns: list[dict], versions: dict) -> dict:
    """The document of a case."""
    names = list(versions)
    sizes = ("algorithm", "samples", "kl", "learning_rate", "repeats")
    engines = {
        name: {
            "response_tokens": spread([turn[name]["tokens"] for turn in turns]),
            "cpu_seconds": spread([turn[name]["cpu"] for turn in turns]),
            "wall_seconds": spread([turn[name]["wall"] for turn in turns]),
            "peak_gigabytes": round(max(turn[name]["peak_bytes"] for turn in turns) / 1e9, 2),
            "versions": versions[name],
        }
        for name in names
    }
    for name in names:
        keys = [key for key in turns[0][name] if "/" in key]
        engines[name] |= {key: spread([turn[name][key] for turn in turns]) for key in keys}
    return (
        case._asdict()
        | {size: getattr(options, size) for size in sizes}
        | {
            "times_rlhf_jax": {
                clock: {
                    name: spread([turn[name][clock] / turn["rlhf_jax"][clock] for turn in turns])
                    for name in names[1:]
                }
                for clock in ("cpu", "wall")
            },
            "engines": engines,
            "device": f"cpu ({cpu_name()})",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    )


if __name__ == "__main__":
    main()
