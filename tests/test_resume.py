"""Nothing is lost: a run that is killed or stopped and goes on leaves what an uninterrupted one
does, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import soon
import tiny_run
from tiny_run import ROOT, lines

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
pytestmark = pytest.mark.slow
# what the wall clock says is no part of the promise
MEASURED = ("seconds", "per_second", "idle_share", "memory/host")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tiny_run.make_model(folder / "tiny")
    tiny_run.make_files(folder)
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """What an uninterrupted run leaves, and how often each event happened in it."""
    done = run(place, "whole", "none", -1)
    assert done.returncode == 0, done.stderr
    return left_by(place / "whole"), json.loads(done.stdout.splitlines()[-1])


def command(place: Path, name: str) -> list[str]:
    """Of the run in the workdir `name`; one whose name says so does without `deterministic`."""
    options = CHANGES | {"workdir": place / name, "compilation_cache": place / "programs"}
    options["deterministic"] = not name.startswith("rounding")
    return tiny_run.arguments(place, place / "tiny", **options)[1:]


def run(
    place: Path, name: str, event: str, number: int, seconds: float = 0.0
) -> subprocess.CompletedProcess:
    words = [sys.executable, str(ROOT / "tests" / "killed.py"), event, str(number), str(seconds)]
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


def test_the_run_is_one_to_be_interrupted(whole):
    """It has what the promise speaks of: all phases, several checkpoints, a moving KL coefficient,
    prompts redrawn.
    """
    left, events = whole
    assert set(events) >= {
        "compiling",
        "evaluation",
        "generation",
        "inference",
        "training",
        "saving",
        "samples",
    }
    assert events["saving"] >= 4 and events["generation"] > 20
    assert len({line["kl/coefficient"] for line in left["metrics"]}) > 3
    assert any(line["generation/attempts"] == 2 for line in left["metrics"])
    assert all(line["training/minibatches_done"] == 4 for line in left["metrics"])


def moments(events: dict[str, int], count: int, seed: int) -> list[tuple[str, int, float]]:
    """Random moments, of every kind of event in turn; half come a little later than the event."""
    draw = random.Random(seed)
    kinds = [
        "unfinished",
        "generation",
        "training",
        "saving",
        "inference",
        "evaluation",
        "samples",
        "export",
    ]
    chosen = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        happened = 4 if kind == "unfinished" else events[kind]
        chosen.append((kind, draw.randrange(happened), draw.choice([0.0, draw.uniform(0.0, 0.1)])))
    return chosen


def kill_and_resume(place: Path, name: str, moment: tuple[str, int, float], whole: dict) -> None:
    killed = run(place, name, *moment)
    assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
    done = run(place, name, "none", 0)
    assert done.returncode == 0, (moment, done.stderr)
    check_equal(place / name, whole)


def test_killed_and_resumed_is_uninterrupted(place, whole):
    left, events = whole
    kill_and_resume(place, "killed", moments(events, 1, seed=0)[0], left)


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[pytest.mark.long] * (i > 0)) for i in range(20)]
)
def test_killed_at_twenty_moments(index, place, whole):
    left, events = whole
    kill_and_resume(place, f"moment-{index}", moments(events, 20, seed=1)[index], left)


def check_close(workdir: Path, whole: dict) -> None:
    """The promise without `deterministic`: the same text, and numbers within rounding."""
    found = left_by(workdir)
    assert found["samples"] == whole["samples"]
    for line, other in zip(found["metrics"], whole["metrics"], strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "number, name",
    [(signal.SIGHUP, "stopped"), pytest.param(signal.SIGINT, "rounding", marks=pytest.mark.long)],
)
def test_stopped_and_resumed_is_uninterrupted(number, name, place, whole):
    """A signal after the third step: saved, an exit code of its own, no traceback."""
    stopped = run(place, name, f"writing:{number.name}", 2)
    assert stopped.returncode == 128 + number, stopped.stderr
    assert "Traceback" not in stopped.stderr and "the same command resumes" in stopped.stderr
    assert len(lines(place / name / "metrics.jsonl")) == 3
    done = run(place, name, "none", 0)
    assert done.returncode == 0 and "Resuming from step" in done.stdout, done.stderr
    (check_close if name == "rounding" else check_equal)(place / name, whole[0])
