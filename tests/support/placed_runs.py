"""Runs whose calls have devices of their own, and the plans that place them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import resuming
import tiny_run
from places import ROOT
from tiny_run import PPO, lines

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
# Generation has a quarter, all else the rest or three quarters of its half.
QUARTERS = {
    "generation": {"first": 0, "count": 2, "tensor": 2},
    "policy_inference": {"first": 2, "count": 6, "data": 3, "fsdp": 2},
    "reference_inference": {"first": 2, "count": 6, "data": 3, "tensor": 2},
    "critic_inference": {"first": 2, "count": 6, "data": 6},
    "policy_training": {"first": 2, "count": 6, "data": 3, "fsdp": 2},
    "critic_training": {"first": 4, "count": 3, "data": 3},
}
# A run that may be killed, on four devices.
RESUMED = resuming.CHANGES | {
    "steps": 4,
    "plan": "disaggregated",
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "generation__prompts_per_step": 4,
    "generation__max_rows": 8,
    "generation__min_rows": 4,
    "training__microbatch_rows": 4,
}
TRAINED = ("loss/policy", "loss/value", "kl/mean", "gradient/norm", "critic/gradient_norm")


class Runner:
    """Runs of the command in a folder, by the names of their workdirs."""

    def __init__(self, place: Path, model: Path):
        self.place = place
        self.model = model

    def command(self, name: str, **changes) -> list[str]:
        options = CHANGES | {"workdir": self.place / name} | changes
        return tiny_run.arguments(self.place, self.model, **options)

    def __call__(self, name: str, **changes) -> tuple[list[dict], list[dict]]:
        """Metrics and samples of a run."""
        assert launch["main"](self.command(name, **changes)) == 0
        workdir = self.place / name
        return lines(workdir / "metrics.jsonl"), lines(workdir / "samples.jsonl")


def write_plan(path: Path, **changes) -> Path:
    document = {"devices": 8, "calls": APART} | changes
    path.write_text(json.dumps(document))
    return path
