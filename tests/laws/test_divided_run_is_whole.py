"""A run whose calls have processes of their own is the run on one mesh: texts, numbers, resume."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from processes import PPO, check_steps, launched, one, ranks_of, two
from safetensors.numpy import load_file
from tiny_run import lines

LAGGED = PPO | {"steps": 4, "plan": "disaggregated", "training__lag": 1, "deterministic": True}
CALLS = ("reference_inference", "critic_inference", "policy_training", "critic_training")


def write_plan(path: Path, apart: tuple[str, ...]) -> str:
    """Place generation on the last four of eight devices, and so what stands in `apart`."""

    def placed(first: int, **axes: int) -> dict[str, int]:
        return {"first": first, "count": 4, "slices": 1, "data": 1, "fsdp": 1, "tensor": 1} | axes

    calls = {call: placed(4 if call in apart else 0, fsdp=4) for call in CALLS}
    calls["generation"] = placed(4, slices=2, data=2)
    path.write_text(json.dumps({"devices": 8, "calls": calls}))
    return str(path)


@pytest.fixture(scope="module")
def one_mesh(place) -> Callable[[int], Path]:
    """Some steps of PPO on one mesh of one process."""

    @functools.cache
    def done(steps: int) -> Path:
        one(place, f"one-mesh-{steps}", **PPO | {"steps": steps})
        return place / f"one-mesh-{steps}"

    return done


@pytest.mark.slow
def test_weights_go_between_processes_of_unequal_numbers():
    codes, errors = ranks_of("weight_ranks.py", ranks=4, devices=2)
    assert codes == [0] * 4, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("disaggregated", 3),
        pytest.param("disaggregated", 10, marks=pytest.mark.long),
        pytest.param("colocated", 10, marks=pytest.mark.long),
    ],
)
def test_two_processes_under_a_plan_take_the_steps_of_one_mesh(place, one_mesh, plan, steps):
    """Each call has devices of both, or generation those of one and all else the other's."""
    run = place / f"{plan}-{steps}"
    code, _, errors = two(place, run.name, plan=plan, **PPO | {"steps": steps})
    assert code == 0, errors
    check_steps(one_mesh(steps), run)
    trace = json.loads((run / "timeline" / f"step-{steps - 1:06}.json").read_text())
    told = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert "lookup-chain-2" in told and told.count("critic_training") >= 2


@pytest.mark.long
@pytest.mark.parametrize("apart", [(), ("critic_training",)], ids=["swapped", "policy and critic"])
def test_any_process_may_have_any_call(place, apart):
    changes = PPO | {"steps": 6, "evaluation__every": 2, "checkpoint__every": 2}
    plan = write_plan(place / "plan.json", apart)
    name = f"with-{len(apart)}"
    one(place, f"{name}-alone", **changes)
    code, _, errors = two(place, name, plan=plan, **changes)
    assert code == 0, errors
    check_steps(place / f"{name}-alone", place / name)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kill_while_samples_are_drawn_ahead_elsewhere_changes_nothing(place, ranks):
    """With four processes generation and training have two each."""
    whole = place / f"whole-{ranks}"
    code, _, errors = two(place, whole.name, ranks, **LAGGED)
    assert code == 0, errors
    killed = place / f"killed-{ranks}"
    with launched(place, killed.name, ranks, checkpoint__every=1, **LAGGED) as process:
        ended = time.monotonic() + 300
        while not (killed / "checkpoints" / "2").exists() and time.monotonic() < ended:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    code, out, errors = two(place, killed.name, ranks, checkpoint__every=1, **LAGGED)
    assert code == 0 and "Resuming from step" in out, errors
    assert lines(whole / "samples.jsonl") == lines(killed / "samples.jsonl")
    weights = [load_file(run / "policy" / "model.safetensors") for run in (whole, killed)]
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weights[1][name], weight)


@pytest.mark.slow
def test_a_plan_that_cuts_a_process_is_refused(place):
    plan = place / "cut.json"
    write_plan(plan, ())
    document = json.loads(plan.read_text())
    document["calls"]["generation"] |= {"first": 2}
    plan.write_text(json.dumps(document))
    code, out, errors = two(place, "refused", plan=str(plan), **PPO, steps=1)
    assert code == 2 and (out + errors).count("error:") == 1 and "Traceback" not in out + errors
    assert "gives generation devices 2 to 5, and a process has 4: give it all devices" in errors
