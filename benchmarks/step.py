r"""One RL step beside TRL's GRPOTrainer and tunix's GRPOLearner or PPOLearner: CPU, float32.

    python benchmarks/step.py --model DIR --repeats 5 \
        --peer trl=/path/to/python --peer tunix=/path/to/python

DIR is a Hugging Face folder of a Llama model. Each peer runs in a Python environment of its own:

    python3.11 -m venv trl_env && trl_env/bin/pip install torch trl
    python3.12 -m venv tunix_env && tunix_env/bin/pip install google-tunix

Every engine is a process that trains the same model on the same prompts, with as many samples, as
long responses (no token ends one), the same learning rate and KL coefficient, all samples of a step
in one micro-batch, and a reward that costs nothing. "trl" has TRL's default settings, "trl_kept"
the same without gradient checkpointing; TRL 1.16 has no PPO. With `--algorithm ppo` there is a
critic, begun as the policy, and a KL is taken from the reward. After `--warm-up` steps each, which
compile, the engines take turns, A B C A B C, a step each, and only one works at a time. One JSON
document is printed: CPU seconds (user and system, all threads, children too) and wall seconds of a
step, peak memory, and the ratio to each peer, taken turn by turn, as median, least and greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare import SETTLE_SECONDS, Worker, ask, cpu_name, receive, spread
from rlhf_jax.model.weights.source import open_source
from rlhf_jax.runtime.foreign import read_json

PEERS = ("trl", "tunix")
# Settings of TRL beside its defaults, by engine.
TRL = {"trl": {}, "trl_kept": {"gradient_checkpointing": False}}
WORDS = ("river", "winter", "garden", "letter", "bridge", "candle", "harbour", "market", "forest")
REWARD = (
    "def vowels(prompt, response, row):\n    return float(sum(c in 'aeiou' for c in response))\n"
)


def main() -> None:
    """Start the workers, let each warm up, then let them take turns."""
    asked = arguments()
    pythons = {"rlhf_jax": sys.executable} | dict(asked.peer)
    if "trl" in pythons:
        pythons["trl_kept"] = pythons["trl"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = write_inputs(asked, folder)
        workers = []
        versions = {}
        for name, python in pythons.items():
            workers.append(stack.enter_context(start(name, python, folder, settings)))
            versions[name] = receive(workers[-1])["versions"]
            for _ in range(asked.warm_up):
                ask(workers[-1], {})
            print(f"{name} is warm.", file=sys.stderr)
        turns = []
        for _ in range(asked.repeats):
            turns.append({})
            for worker in workers:
                time.sleep(SETTLE_SECONDS)
                turns[-1][worker.name] = ask(worker, {})
    print(json.dumps(describe(asked, turns, versions), indent=1))


def arguments() -> argparse.Namespace:
    """The command line; ends in one sentence where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a Llama model")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--kl", type=float, default=0.0, help="KL coefficient; 0 is TRL's default")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", default=[], action="append", type=_peer, help="name=/its/python")
    asked = parser.parse_args()
    if asked.algorithm == "ppo" and "trl" in dict(asked.peer):
        parser.error("TRL has no trainer for PPO; leave --peer trl out.")
    return asked


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or shutil.which(python) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PYTHON of {' or '.join(PEERS)} and a Python that has it"
        )
    return name, python


def write_inputs(asked: argparse.Namespace, folder: Path) -> dict:
    """Write prompts, a reward, and a copy of the model that no token ends; return the settings."""
    tokenizer = open_source(asked.model).tokenizer
    vocabulary = read_json(asked.model / "tokenizer.json")["model"]["vocab"]
    stop = max(vocabulary.values())
    spelled = next(token for token, number in vocabulary.items() if number == stop)
    model = folder / "model"
    model.mkdir()
    for file in asked.model.iterdir():
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
        words = [WORDS[(number + 3 * i) % len(WORDS)] for i in range(6)]
        chat = [{"role": "user", "content": f"Tell me of a {' and a '.join(words)}."}]
        ids = tokenizer.encode_chat(chat)
        rows.append(
            {"prompt": chat[0]["content"], "rendered": tokenizer.decode(ids), "tokens": len(ids)}
        )
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    longest = max(row["tokens"] for row in rows)
    return {
        "algorithm": asked.algorithm,
        "model": str(model),
        "prompts": str(prompts),
        "reward": str(folder / "reward.py"),
        "stop": stop,
        "prompt_tokens": longest,
        "prompts_per_step": asked.prompts,
        "samples": asked.samples,
        "new_tokens": asked.new_tokens,
        "learning_rate": asked.learning_rate,
        "kl": asked.kl,
    }


@contextlib.contextmanager
def start(name: str, python: str, folder: Path, settings: dict) -> Iterator[Worker]:
    """The worker of an engine, ended on leaving."""
    own = folder / name
    own.mkdir()
    file = own / "settings.json"
    file.write_text(json.dumps(settings | {"trl": TRL.get(name, {})}))
    script = Path(__file__).parent / "peers" / f"{name.partition('_kept')[0]}_step.py"
    process = subprocess.Popen(
        [python, str(script), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdin and process.stdout
    try:
        yield Worker(name, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def describe(asked: argparse.Namespace, turns: list[dict], versions: dict) -> dict:
    """The document."""
    names = list(versions)
    sizes = ("algorithm", "prompts", "samples", "new_tokens", "kl", "learning_rate", "repeats")
    engines = {
        name: {
            "cpu_seconds": spread([turn[name]["cpu"] for turn in turns]),
            "wall_seconds": spread([turn[name]["wall"] for turn in turns]),
            "peak_gigabytes": round(max(turn[name]["peak_bytes"] for turn in turns) / 1e9, 2),
            "versions": versions[name],
        }
        for name in names
    }
    stages = [key for key in turns[0]["rlhf_jax"] if key.endswith("/seconds")]
    engines["rlhf_jax"]["stages"] = {
        key: spread([turn["rlhf_jax"][key] for turn in turns]) for key in stages
    }
    return {size: getattr(asked, size) for size in sizes} | {
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


if __name__ == "__main__":
    main()
