"""A run as several processes is the run of one: its text, its numbers, its files, and its end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import listening
import numpy as np
import pytest
from places import ROOT
from processes import (
    MEASURED,
    TWO_SLICES,
    arguments,
    environment,
    launched,
    left_by,
    one,
    ranks_of,
    two,
)
from safetensors.numpy import load_file
from tiny_run import lines

ONE_STEP = TWO_SLICES | {"steps": 1, "evaluation__every": 0, "generation__prompts_per_step": 2}
FOUR = {"mesh__slices": 4, "mesh__fsdp": 2, "evaluation__every": 1}
# One slice over all processes: rank 0 chooses its drafts, by the clock.
SHARED = {"mesh__slices": 1, "mesh__fsdp": 8, "generation__strategy": "adaptive"}
# PPO, drafts that are chosen, prompts redrawn, evaluations and checkpoints between.
WHOLE = TWO_SLICES | {
    "steps": 4,
    "deterministic": True,
    "checkpoint__every": 2,
    "algorithm__name": "ppo",
    "kl__place": "reward",
    "kl__estimator": "k1",
    "kl__target": 0.05,
    "kl__horizon": 100,
    "critic__learning_rate": 1e-3,
    "training__minibatches": 2,
    "generation__resample": 1,
    "generation__strategy": "adaptive",
    "generation__max_rows": 4,
    "generation__min_rows": 4,
    "evaluation__every": 3,
}


@pytest.fixture(scope="module")
def alone(place) -> Callable[..., Path]:
    """The step that one process takes, once for all that compare with it: its folder."""

    @functools.cache
    def alone(**changes) -> Path:
        name = f"alone-{len(changes)}"
        one(place, name, **ONE_STEP | changes)
        return place / name

    return alone


def rank_of(launcher: int, rank: int) -> int:
    """The process that is this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
            if (
                parent == launcher
                and "--process" in words
                and words[words.index("--process") + 1] == str(rank)
            ):
                return int(folder.name)
    raise AssertionError(f"There is no rank {rank}.")


def check_alike(one: Path, other: Path) -> None:
    """Equal text; rewards, log-probs and weights within 1e-4."""
    assert lines(one / "samples.jsonl") == lines(other / "samples.jsonl")
    for a, b in zip(
        lines(one / "evaluations.jsonl"), lines(other / "evaluations.jsonl"), strict=True
    ):
        assert a["samples"] == b["samples"] and a["eval/reward"] == b["eval/reward"]
    for a, b in zip(lines(one / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True):
        # Who drafted what, and which slice stood idle, is the clock's.
        kept = [
            {key for key in line if not key.startswith(("strategy/", "generation/"))}
            for line in (a, b)
        ]
        assert kept[0] == kept[1]
        for key in kept[0]:
            # How much is padding depends on how samples are shared out.
            if not key.endswith((*MEASURED, "/padding", "/padding_flops")):
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-4), key
    weights = [load_file(run / "policy" / "model.safetensors") for run in (one, other)]
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="a slice each"),
        pytest.param(FOUR, id="two slices each"),
        pytest.param(SHARED, id="one slice of both"),
    ],
)
def test_two_processes_take_the_step_of_one(changes, place, alone, kernels_are_interpreted):
    name = f"step-{len(changes)}"
    code, out, errors = two(place, name, **ONE_STEP | changes)
    assert code == 0, errors
    assert out.count("The trained policy is in") == 1 and re.search("processes +2", out)
    assert ("kernels     interpret: set in the config" in out) == kernels_are_interpreted
    assert len(lines(place / name / "samples.jsonl")) == 8
    check_alike(alone(**changes), place / name)


@pytest.mark.long
def test_slices_of_two_processes_score_beside_generation_and_leave_the_step_of_one(place, alone):
    code, _, errors = two(
        place,
        "fused",
        4,
        **ONE_STEP | {"generation__fuse_inference": True, "generation__max_rows": 4},
    )
    assert code == 0, errors
    check_alike(alone(), place / "fused")
    events = json.loads((place / "fused" / "timeline" / "step-000000.json").read_text())[
        "traceEvents"
    ]
    # So called where a slice does it by itself; all together, each call has its own name. One has
    # ended half of all.
    assert sum(event["args"]["rows"] for event in events if event["name"] == "inference") >= 4


@pytest.mark.slow
def test_a_slice_of_two_processes_scores_what_it_ended_while_others_decode(kernels_are_interpreted):
    """And a stop meanwhile ends all in step, an error of one ends all."""
    words = "4", "interpret" if kernels_are_interpreted else "reference"
    codes, errors = ranks_of("fused_ranks.py", *words, ranks=4, devices=1)
    assert codes[0] == 2 and "error: this rank alone." in errors[0], errors
    assert 0 not in codes, errors


@pytest.mark.slow
def test_what_processes_cannot_do_together_is_refused_once(place):
    fused = {"mesh__fsdp": -1, "generation__fuse_inference": True, "compilation_cache": ""}
    code, out, errors = two(place, "refused", **fused)
    assert code == 2 and (out + errors).count("error:") == 1 and "Traceback" not in out + errors
    assert "mesh.slices is 1; raise it" in errors and not (place / "refused").exists()


def test_a_mistake_is_found_before_processes_meet(place):
    began = time.monotonic()
    code, out, errors = two(place, "mistaken", nowhere=1)
    assert code == 2 and (out + errors).count("There is no config key 'nowhere'") == 1
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, slices, devices",
    [
        pytest.param(2, 4, 2, marks=pytest.mark.long, id="two slices each"),
        pytest.param(4, 2, 1, id="half a slice each"),
    ],
)
def test_samples_that_move_between_processes_are_those_that_stayed(
    ranks, slices, devices, kernels_are_interpreted
):
    words = str(ranks), str(slices), "interpret" if kernels_are_interpreted else "reference"
    codes, errors = ranks_of("moving_ranks.py", *words, ranks=ranks, devices=devices)
    assert codes == [0] * ranks, errors


@pytest.mark.long
def test_two_processes_compile_nothing_after_their_second_step(place):
    """Of six, whatever the lengths of samples, but jax's own copy of results in a further shape.

    The first sample that moves would compile its move.
    """
    stays = {"steps": 6, "evaluation__every": 0, "generation__reallocate": False}
    words = arguments(place, "counted", **TWO_SLICES | stays)
    codes, errors = ranks_of("counted_ranks.py", "2", *words, devices=4)
    assert codes == [0, 0], errors
    for told in errors:
        compiled = [json.loads(names) for names in re.findall(r"compiled (.*)", told)]
        later = [name for names in compiled[2:] for name in names]
        assert len(compiled) == 6 and len(compiled[0]) > 5, compiled
        assert set(later) <= {"jit(_identity_fn)"} and len(later) <= 1, compiled[1:]


@pytest.fixture(scope="module")
def whole(place):
    """What two uninterrupted processes leave."""
    code, _, errors = two(place, "whole", **WHOLE)
    assert code == 0, errors
    return left_by(place / "whole")


@pytest.mark.slow
def test_what_listens_of_a_local_run_does_so_on_the_loopback(place):
    found = set()
    with launched(place, "listening", plan="disaggregated", **ONE_STEP) as process:
        while process.poll() is None:
            found |= listening.sockets(listening.session(process.pid))
            time.sleep(0.05)
        assert process.communicate() and process.returncode == 0
    assert len(found) >= 3, "the coordination service, and what sends arrays of each rank"
    assert {host for host, _ in found} <= set(listening.LOOPBACK), found


@pytest.mark.slow
def test_two_processes_are_one(place, whole):
    one(place, "one", **WHOLE)
    check_alike(place / "one", place / "whole")


def until(workdir: Path, steps: int, process: subprocess.Popen) -> None:
    """Waits for so many lines of metrics."""
    metrics = workdir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()


def check_resumed(place: Path, name: str, whole: dict) -> None:
    code, out, errors = two(place, name, **WHOLE)
    assert code == 0 and out.count("Resuming from step") == 1, errors
    for part, value in left_by(place / name).items():
        assert value == whole[part], part


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_others_and_loses_nothing(rank, place, whole):
    name = f"killed-{rank}"
    with launched(place, name, **WHOLE) as process:
        until(place / name, 3, process)
        other = rank_of(process.pid, 1 - rank)
        os.kill(rank_of(process.pid, rank), signal.SIGKILL)
        began = time.monotonic()
        out, errors = process.communicate(timeout=100)
    assert time.monotonic() - began < 60 and not Path(f"/proc/{other}").exists()
    assert process.returncode == 137 and f"Rank {rank} died" in errors, (out, errors)
    assert "the same command resumes from the last checkpoint" in errors
    check_resumed(place, name, whole)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1])
def test_a_rank_that_is_asked_to_stop_stops_all(rank, place, whole):
    name = f"stopped-{rank}"
    with launched(place, name, **WHOLE) as process:
        until(place / name, 3, process)
        os.kill(rank_of(process.pid, rank), signal.SIGTERM)
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 143 and "died" not in errors and "Traceback" not in out + errors, (
        out,
        errors,
    )
    assert errors.count("Stopped by SIGTERM: the same command resumes from there.") == 1
    assert len(lines(place / name / "metrics.jsonl")) == 3
    check_resumed(place, name, whole)


@pytest.mark.long
def test_one_that_shares_a_slice_is_asked_to_stop_and_both_do_between_two_rounds(place):
    with launched(
        place, "shared", **TWO_SLICES | SHARED | {"steps": 100, "checkpoint__every": 2}
    ) as process:
        until(place / "shared", 2, process)
        os.kill(rank_of(process.pid, 1), signal.SIGTERM)
        out, errors = process.communicate(timeout=100)
    assert errors.count("mesh.slices=1: each slice spans 2 processes") == 1, errors
    assert process.returncode == 143 and "died" not in errors and "Traceback" not in out + errors, (
        out,
        errors,
    )
    assert errors.count("Stopped by SIGTERM: the same command resumes from there.") == 1


@pytest.mark.slow
def test_ranks_with_other_configs_are_refused(place):
    """Each by hand, as on a cluster where the files differ."""
    port = 52_999
    processes_ = []
    words = [sys.executable, str(ROOT / "launch" / "train.py")]
    for rank in range(2):
        own = arguments(place, "unlike", **(ONE_STEP | {"seed": rank}))
        where = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process", str(rank)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes_.append(subprocess.Popen([*words, *where, *own], env=environment(4), **pipes))
    errors = [process.communicate(timeout=100)[1] for process in processes_]
    assert [process.returncode for process in processes_] == [2, 2], errors
    assert "error: seed is 1 on rank 1 and 0 on rank 0" in errors[0] and "error" not in errors[1]
