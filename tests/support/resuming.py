"""A deterministic run that is killed at a moment and goes on, and all that it promises to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import soon
import tiny_run
from places import ROOT, SUPPORT
from tiny_run import lines

# PPO with several epochs, an adaptive KL coefficient, drafts from history, and batches across a
# data epoch's boundary.
CHANGES = {
    "steps": 7,
    "deterministic": True,
    "checkpoint__every": 2,
    "algorithm__name": "ppo",
    "kl__place": "reward",
    "kl__estimator": "k1",
    "kl__target": 0.05,
    "kl__horizon": 100,
    "critic__learning_rate": 1e-3,
    "training__epochs": 2,
    "training__minibatches": 2,
    "generation__prompts_per_step": 6,
    "generation__samples_per_prompt": 2,
    "generation__max_rows": 6,
    "generation__min_rows": 3,
    "generation__resample": 1,
    "generation__strategy": "adaptive",
    "training__microbatch_rows": 3,
    "evaluation__every": 3,
}
ENVIRONMENT = os.environ | soon.environment() | {"PYTHONPATH": str(ROOT)}
# what the wall clock says is no part of the promise
MEASURED = ("seconds", "per_second", "idle_share", "memory/host")


def command(place: Path, name: str) -> list[str]:
    """Of the run in the workdir `name`; one whose name says so does without `deterministic`."""
    options = CHANGES | {"workdir": place / name, "compilation_cache": place / "programs"}
    options["deterministic"] = not name.startswith("rounding")
    return tiny_run.arguments(place, place / "tiny", **options)[1:]


def run(
    place: Path, name: str, event: str, number: int, seconds: float = 0.0
) -> subprocess.CompletedProcess:
    words = [sys.executable, str(SUPPORT / "killed.py"), event, str(number), str(seconds)]
    return subprocess.run(
        words + command(place, name),
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=300,
    )


def left_by(workdir: Path) -> dict:
    """All that a run promises to be equal: its lines, its weights, and the fingerprints of its last
    checkpoint.
    """
    steps = [
        {key: value for key, value in line.items() if not key.endswith(MEASURED)}
        for line in lines(workdir / "metrics.jsonl")
    ]
    last = max(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    )
    (document,) = (workdir / "checkpoints" / str(last)).rglob("document.json")
    checkpoint = json.loads(document.read_text())
    return {
        "metrics": steps,
        "samples": (workdir / "samples.jsonl").read_bytes(),
        "evaluations": (workdir / "evaluations.jsonl").read_bytes(),
        "policy": (workdir / "policy" / "model.safetensors").read_bytes(),
        "checkpoint": (last, checkpoint["leaves"], checkpoint["host"]),
    }


def check_equal(workdir: Path, whole: dict) -> None:
    found = left_by(workdir)
    assert [line["step"] for line in found["metrics"]] == list(range(CHANGES["steps"]))
    for name, value in whole.items():
        assert found[name] == value, name


def check_killed_and_resumed(place: Path, monkeypatch, changes: dict, moment: tuple[str, int]):
    """A run on four devices that is killed at a moment and goes on leaves what a whole one does."""
    monkeypatch.setitem(globals(), "CHANGES", changes)
    monkeypatch.setitem(ENVIRONMENT, "XLA_FLAGS", soon.environment(4)["XLA_FLAGS"])
    tiny_run.make_model(place / "tiny")
    tiny_run.make_files(place)
    done = run(place, "whole", "none", -1)
    assert done.returncode == 0, done.stderr
    whole_run = left_by(place / "whole")
    event, number = moment
    assert run(place, event, event, number).returncode == -9
    done = run(place, event, "none", -1)
    assert "Resuming from step 2" in done.stdout, done.stderr
    check_equal(place / event, whole_run)


def kill_and_resume(place: Path, name: str, moment: tuple[str, int, float], whole: dict) -> None:
    killed = run(place, name, *moment)
    assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
    done = run(place, name, "none", 0)
    assert done.returncode == 0, (moment, done.stderr)
    check_equal(place / name, whole)
