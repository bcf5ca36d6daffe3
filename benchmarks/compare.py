r"""Plain decoding beside transformers' generate and tunix's vanilla sampler: CPU, float32,
temperature 1.

    python benchmarks/compare.py --model DIR --batch 1,8,32 --prompt-tokens 32 --new-tokens 64 \
        --repeats 5 --peer transformers=/path/to/python --peer tunix=/path/to/python

DIR is a Hugging Face folder of a Llama model. Each peer runs in a Python environment of its own:

    python3.11 -m venv torch_env && torch_env/bin/pip install torch transformers
    python3.12 -m venv tunix_env && tunix_env/bin/pip install google-tunix

Every engine is a process that loads the model once and runs each batch size once before it is
timed. Then the engines take turns, A B C A B C, so that all share the machine's drift, and only one
works at a time. All get the same random prompts, one a row, all cores, no truncation of the law and
no stop token. A time is from prompt ids to new ids, prefill included. One JSON line is printed a
batch size: tokens/s of each engine and the ratio to each peer, taken turn by turn, as median, least
and greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

PEERS = ("transformers", "tunix")
PEER_FOLDER = Path(__file__).parent / "peers"
SETTLE_SECONDS = 0.5  # thread pools of the engine before spin on after their last task


class Worker(NamedTuple):
    """An engine in a separate process, and the two ends of its pipe."""

    name: str
    commands: IO[str]
    answers: IO[str]


class Case(NamedTuple):
    """What one line of the comparison measures."""

    batch: int
    prompt_tokens: int
    new_tokens: int


def main() -> None:
    """Start the workers, warm them up one after the other, time them in turns."""
    arguments = read_arguments()
    vocabulary = read_vocabulary(arguments.model)
    cases = [
        Case(batch, arguments.prompt_tokens, arguments.new_tokens) for batch in arguments.batch
    ]
    pythons = {"rlhf_jax": sys.executable} | dict(arguments.peer)
    with contextlib.ExitStack() as stack:
        workers = []
        facts = {}
        for name, python in pythons.items():
            script = PEER_FOLDER / f"{name}_worker.py"
            line = [python, str(script), str(arguments.model)]
            workers.append(stack.enter_context(start(name, line)))
            facts[name] = warm_up(workers[-1], cases, vocabulary)
        for case in cases:
            turns = [
                turn(workers, command(case, vocabulary, 1 + i)) for i in range(arguments.repeats)
            ]
            print(json.dumps(describe(case, turns, facts)), flush=True)


def read_arguments() -> argparse.Namespace:
    """The command line; ends in one sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Plain decoding of rlhf_jax beside that of its peers."
    )
    parser.add_argument(
        "--model", required=True, type=Path, help="Hugging Face folder of a Llama model"
    )
    parser.add_argument(
        "--batch", default=[1, 8, 32], type=_counts, help="batch sizes, such as 1,8,32"
    )
    parser.add_argument("--prompt-tokens", default=32, type=_count)
    parser.add_argument("--new-tokens", default=64, type=_count)
    parser.add_argument("--repeats", default=5, type=_count)
    parser.add_argument(
        "--peer", default=[], action="append", type=_peer, help="transformers=/its/python"
    )
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither transformers=PYTHON nor tunix=PYTHON"
        )
    if shutil.which(python) is None:
        raise argparse.ArgumentTypeError(
            f"{python!r} is no program; give the Python that has {name}"
        )
    return name, python


def read_vocabulary(folder: Path) -> int:
    """Vocabulary size in the folder's config.json; ends in one sentence for what is no Llama
    folder.
    """
    file = folder / "config.json"
    if not file.exists():
        raise SystemExit(f"{file} is missing; give --model a Hugging Face folder.")
    raw = json.loads(file.read_text(encoding="utf-8"))
    if raw.get("model_type") != "llama":
        raise SystemExit(
            f"{file} is of type {raw.get('model_type')!r}; every engine here runs 'llama' only."
        )
    return raw["vocab_size"]


def command(case: Case, vocabulary: int, seed: int) -> dict:
    """The command for a worker: different random prompts, so that no engine can share their
    prefill."""
    ids = random.Random(seed)
    prompts = [
        [ids.randrange(vocabulary) for _ in range(case.prompt_tokens)] for _ in range(case.batch)
    ]
    return {"prompts": prompts, "new_tokens": case.new_tokens, "seed": seed}


@contextlib.contextmanager
def start(name: str, line: list[str], env: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """The worker of an engine by its command line, ended on exit. env: this process's if None."""
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin and process.stdout
        try:
            yield Worker(name, process.stdin, process.stdout)
        finally:
            process.kill()


def warm_up(worker: Worker, cases: list[Case], vocabulary: int) -> dict:
    """Wait until the worker is loaded and has compiled every case; return its description."""
    facts = receive(worker)
    first = {case.batch: ask(worker, command(case, vocabulary, 0))["seconds"] for case in cases}
    return facts | {
        "first_call_seconds": {batch: round(seconds, 2) for batch, seconds in first.items()}
    }


def ask(worker: Worker, content: dict) -> dict:
    """Send a command and wait for its answer."""
    worker.commands.write(json.dumps(content) + "\n")
    worker.commands.flush()
    return receive(worker)


def receive(worker: Worker) -> dict:
    """The next answer of a worker; ends in one sentence if it has died."""
    line = worker.answers.readline()
    if not line:
        raise SystemExit(
            f"The worker of {worker.name} ended without an answer; its last words stand above."
        )
    return json.loads(line)


def turn(workers: list[Worker], content: dict) -> dict[str, float]:
    """Tokens/s of every engine on the same command, one after the other."""
    rates = {}
    for worker in workers:
        time.sleep(SETTLE_SECONDS)
        answer = ask(worker, content)
        rates[worker.name] = answer["tokens"] / answer["seconds"]
    return rates


def describe(case: Case, turns: list[dict[str, float]], facts: dict[str, dict]) -> dict:
    """The JSON line of one batch size."""
    peers = [name for name in facts if name != "rlhf_jax"]
    return case._asdict() | {
        "repeats": len(turns),
        "tokens_per_second": {name: spread([rates[name] for rates in turns]) for name in facts},
        "ratio": {
            peer: spread([rates["rlhf_jax"] / rates[peer] for rates in turns]) for peer in peers
        },
        "engines": facts,
        **circumstances(),
    }


def circumstances() -> dict[str, str]:
    """The device, the version of jax and the time of a figure."""
    return {
        "device": f"cpu ({cpu_name()})",
        "jax": importlib.metadata.version("jax"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest, to three decimals."""
    summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in summary.items()}


def cpu_name() -> str:
    """The processor as Linux names it, or as Python does elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
