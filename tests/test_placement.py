"""Calls on devices of their own: the same texts and losses under every plan."""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path

import pytest
import tiny_run
from test_run import PPO
from tiny_run import ROOT, lines

launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")

# PPO, with the critic and the reference in use, on all eight devices.
CHANGES = PPO | {
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
    "generation__max_rows": 16,
    "generation__min_rows": 8,
    "training__max_grad_norm": 1e6,
    "evaluation__every": 0,
}
# Each call on devices of its own, in three sizes; the last one of the eight stands idle.
APART = {
    "generation": {"first": 0, "count": 4, "data": 2, "tensor": 2},
    "policy_inference": {"first": 4, "count": 2, "fsdp": 2},
    "reference_inference": {"first": 4, "count": 1},
    "critic_inference": {"first": 5, "count": 1},
    "policy_training": {"first": 4, "count": 2, "tensor": 2},
    "critic_training": {"first": 6, "count": 1},
}
TRAINED = ("loss/policy", "loss/value", "kl/mean", "gradient/norm", "critic/gradient_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_run.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(folder, tmp_path):
    """Run the command with changes; its metrics and samples."""
    tiny_run.make_files(tmp_path)

    def start(name: str, **changes) -> tuple[list[dict], list[dict]]:
        words = tiny_run.arguments(
            tmp_path, folder, **(CHANGES | {"workdir": tmp_path / name} | changes)
        )
        assert launch["main"](words) == 0
        return lines(tmp_path / name / "metrics.jsonl"), lines(tmp_path / name / "samples.jsonl")

    return start


def write_plan(path: Path, **changes) -> Path:
    document = {"devices": 8, "calls": APART} | changes
    path.write_text(json.dumps(document))
    return path


@pytest.mark.slow
def test_every_plan_gives_the_text_and_losses_of_one_mesh(run, tmp_path):
    plans = {
        "mesh": "",
        "colocated": "colocated",
        "interleaved": "interleaved",
        "disaggregated": "disaggregated",
        "apart": write_plan(tmp_path / "apart.json"),
    }
    found = {name: run(name, plan=plan, steps=10) for name, plan in plans.items()}
    metrics, samples = found.pop("mesh")
    worst = {}
    for name, (own, texts) in found.items():
        assert [row["response"] for row in texts] == [row["response"] for row in samples], name
        differences = [
            abs(a[key] - b[key]) / max(1.0, abs(a[key]))
            for a, b in zip(metrics, own, strict=True)
            for key in TRAINED
        ]
        worst[name] = max(differences)
    print(json.dumps(worst))
    assert max(worst.values()) <= 1e-4
