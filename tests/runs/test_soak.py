"""A run that is killed again and again, for half an hour: no step is lost, and nothing grows.

`pytest -m long tests/runs/test_soak.py --soak-results benchmarks/results/soak.json` writes its figures.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_run
from places import ROOT
from resuming import CHANGES, ENVIRONMENT, left_by

from rlhf_jax.runtime.checkpoint.folder import steps

POINT = 3  # steps of a process's life after which it is compared with others
EARLY = 4  # every so many kills one comes while the run starts, restores or compiles
REWARD = """
import os, time
def vowels(prompt, response, row):
    time.sleep(float(os.environ["REWARD_SECONDS"]))  # so that a minute has few steps
    return sum(c in "aeiou" for c in response)
"""


class Use(NamedTuple):
    """What a process takes."""

    megabytes: float  # in memory
    files: int
    threads: int


class Life(NamedTuple):
    """A process of the run: what it took after each of its steps, and how it ended."""

    uses: list[Use]
    code: int


class Form(NamedTuple):
    """How long a soak is, and how often it is killed."""

    minutes: float  # of kills; 0 where they are counted
    kills: int  # at least
    delays: tuple[float, float]  # seconds between the step at POINT and the kill
    reward_seconds: float
    growth: float  # of memory that is noise: at a step's end a process is not always equally far


FORMS = {
    "short": Form(0, 5, (0.0, 3.0), 0.01, 1.25),
    "half an hour": Form(30, 20, (15.0, 75.0), 0.05, 1.1),
}


def use_of(process: int) -> Use:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    files = len(os.listdir(f"/proc/{process}/fd"))
    return Use(int(fields["VmRSS"].split()[0]) / 1000, files, int(fields["Threads"]))


def mark_of(file: Path) -> tuple[int, int]:
    """Which file it is, and its size."""
    return (file.stat().st_ino, file.stat().st_size) if file.exists() else (0, 0)


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def live(
    place: Path,
    name: str,
    last: int,
    form: Form,
    seconds: float,
    draw: random.Random | None = None,
    early: bool = False,
) -> Life:
    """Start the run in the workdir `name`, and kill it at a moment that is drawn, if any is."""
    workdir = place / name
    options = CHANGES | {"workdir": workdir, "steps": last, "compilation_cache": place / "programs"}
    words = tiny_run.arguments(place, place / "tiny", **options)[1:]
    (place / "temporary").mkdir(exist_ok=True)
    own = {"REWARD_SECONDS": str(seconds), "TMPDIR": str(place / "temporary")}
    done = max(steps(workdir / "checkpoints"), default=0)
    metrics = workdir / "metrics.jsonl"
    before = seen = mark_of(metrics)
    uses: list[Use] = []
    with (place / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch" / "train.py"), *words],
            env=ENVIRONMENT | own,
            stdout=log,
            stderr=log,
        )
    end = time.monotonic() + draw.uniform(0.0, 8.0) if draw and early else None
    while process.poll() is None:
        found = mark_of(metrics)
        changed = found != seen and found[0] != before[0]  # a process writes the file anew
        seen = found
        if changed and count_lines(metrics) - done > len(uses):
            uses.append(use_of(process.pid))
            if draw and end is None and len(uses) >= POINT:
                end = time.monotonic() + draw.uniform(*form.delays)
        if end is not None and time.monotonic() > end:
            process.kill()
            process.wait()
        time.sleep(0.05)
    return Life(uses, process.returncode)


def soak(place: Path, form: Form) -> Iterator[Life]:
    """Every life of a run that is killed, and then of the one that ends by itself."""
    draw = random.Random(0)
    end = time.monotonic() + 60 * form.minutes
    kills = 0
    while kills < form.kills or time.monotonic() < end:
        early = kills % EARLY == EARLY - 1
        life = live(place, "killed", 10**6, form, form.reward_seconds, draw=draw, early=early)
        assert life.code == -9, (place / "killed.log").read_text()[-3000:]
        kills += 1
        yield life
    last = count_lines(place / "killed" / "metrics.jsonl") + POINT + 1
    yield live(place, "killed", last, form, form.reward_seconds)


def names(workdir: Path) -> set[str]:
    """Every file, but for the names that are drawn: of a checkpoint's data, and TensorBoard's."""
    found = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
    return {name for name in found if "/d/" not in name and "events." not in name}


def processes_of(place: Path) -> list[str]:
    """The commands of living processes that name a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended
            continue
    return [command for command in found if str(place) in command]


def check_no_growth(early: list[Use], late: list[Use], growth: float) -> None:
    """Compare memory's median, and the lowest counts: a save that is running has 6 files open."""
    median = statistics.median
    for field, typical, factor, more in (
        ("megabytes", median, growth, 0),
        ("files", min, 1, 8),
        ("threads", min, 1, 8),
    ):
        first, last = (typical(getattr(one, field) for one in uses) for uses in (early, late))
        assert last <= factor * first + more, (field, early, late)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short", pytest.param("half an hour", marks=pytest.mark.long)])
def test_nothing_is_lost_and_nothing_grows_under_kills(name, tmp_path, request):
    form = FORMS[name]
    tiny_run.make_model(tmp_path / "tiny")
    tiny_run.make_files(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    began = time.monotonic()
    *killed, ended = soak(tmp_path, form)
    minutes = (time.monotonic() - began) / 60
    assert ended.code == 0, (tmp_path / "killed.log").read_text()[-3000:]
    last = count_lines(tmp_path / "killed" / "metrics.jsonl")
    whole = live(tmp_path, "whole", last, form, seconds=0.0)
    assert whole.code == 0

    # No step is lost or doubled, and every number is the one of the run that was never killed.
    found = left_by(tmp_path / "killed")
    assert [line["step"] for line in found["metrics"]] == list(range(last))
    assert found == left_by(tmp_path / "whole")

    # From life to life, and within one that is long.
    lives = [life.uses[POINT - 1] for life in [*killed[1:], ended] if len(life.uses) >= POINT]
    third = max(1, len(lives) // 3)
    check_no_growth(lives[:third], lives[-third:], form.growth)
    quarter = len(whole.uses) // 4
    check_no_growth(whole.uses[quarter : 2 * quarter], whole.uses[-quarter:], form.growth)
    assert names(tmp_path / "killed") == names(tmp_path / "whole")
    assert list((tmp_path / "temporary").iterdir()) == []
    deadline = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []

    figures = {
        "minutes": round(minutes, 1),
        "kills": len(killed),
        "kills before a step was done": sum(not life.uses for life in killed),
        "steps": last,
        "steps taken again": sum(len(life.uses) for life in [*killed, ended]) - last,
        "after step 3 of a life, first to last": {
            field: [getattr(lives[0], field), getattr(lives[-1], field)] for field in Use._fields
        },
        "in a life of all steps, half and end": {
            field: [getattr(whole.uses[at], field) for at in (2 * quarter, -1)]
            for field in Use._fields
        },
    }
    print(json.dumps(figures, indent=1))
    if results := request.config.getoption("--soak-results"):
        Path(results).write_text(json.dumps(figures, indent=1) + "\n")
