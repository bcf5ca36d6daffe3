"""Nothing is lost: a run that is killed or stopped and goes on leaves what an uninterrupted one
does, bit for bit.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from resuming import check_equal, kill_and_resume, left_by, run
from tiny_run import lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(place):
    """What an uninterrupted run leaves, and how often each event happened in it."""
    done = run(place, "whole", "none", -1)
    assert done.returncode == 0, done.stderr
    return left_by(place / "whole"), json.loads(done.stdout.splitlines()[-1])


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
