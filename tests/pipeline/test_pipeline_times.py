"""How long pipelines take: stages that only sleep, so that all devices may be busy at once on few
cores.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Case, case_of, layouts_of, models_of

from rlhf_jax.mesh import pin_rows
from rlhf_jax.models.shardings import pin_weights
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.training import pipelined
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.training.schedules import FusedSchedule, schedule_of

QUANTUM = 0.02  # seconds of a stage's forward

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def sleeper(tmp_path_factory):
    """The call of tests/pipeline/sleep.cc, for programs of a CPU."""
    library = tmp_path_factory.mktemp("sleep") / "sleep.so"
    source = Path(__file__).parent / "sleep.cc"
    words = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*words, str(source), "-o", str(library)], check=True)
    handler = ctypes.CDLL(str(library)).SleepFor
    jax.ffi.register_ffi_target("sleep", jax.ffi.pycapsule(handler), platform="cpu")


def sleep(array, quanta: int):
    """The array, later; with a product besides, as who dispatches does at once what is cheap."""
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    micros = np.int64(round(quanta * QUANTUM * 1e6))
    product = jnp.einsum("scm,sdm->scd", array, array).max()
    return jax.ffi.ffi_call("sleep", shape)(array + 0 * product, micros=micros)


@functools.partial(jax.jit, static_argnames="stage")
def forward(part, given, batch, *, stage):
    """In place of a stage's own: as long as a quantum."""
    hidden = given
    if hidden is None:
        hidden = jnp.zeros((*batch.tokens.shape, part.embed.shape[1]))
    return pin_rows(sleep(hidden, 1), stage.settings.layout)


@functools.partial(jax.jit, static_argnames="stage")
def backward(total, part, given, batch, pulled, *, stage):
    """Three quanta, after all that a backward waits for."""
    passed = sleep(sum(one for one in (given, pulled) if one is not None), 3)
    metrics = {} if stage.loss is None else {"loss": passed[0, 0, 0]}
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), part)
    gradient = pin_weights(Gradient(weights, metrics), stage.settings.layout)
    return gradient, None if given is None else pin_rows(passed, stage.settings.layout)


def timed(case: Case, fused: FusedSchedule) -> float:
    """Seconds until all gradients are there."""
    began = time.perf_counter()
    jax.block_until_ready(pipelined.sum_pipelined(*case, fused.schedule))
    return time.perf_counter() - began


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(4, 8), pytest.param(8, 32, marks=pytest.mark.long)]
)
def test_stages_that_sleep_take_as_long_as_planned(tiny, monkeypatch, stages, micro_batches):
    deep = dataclasses.replace(tiny, num_layers=8, vocab_size=64)
    case = case_of(*models_of(deep), layouts_of(stages))
    batches = [(own * micro_batches)[:micro_batches] for own in case.batches]
    case = Case(case.learners, case.models, batches)
    times = StageTimes(
        1, forward=(*[QUANTUM] * (stages - 1), 0.0), backward=(3 * QUANTUM,) * stages, kept=1.0
    )
    fused = schedule_of(*case, dict.fromkeys(("policy_training", "critic_training"), times))
    monkeypatch.setattr(pipelined, "forward", forward)
    monkeypatch.setattr(pipelined, "backward", backward)
    timed(case, fused)
    took = min(timed(case, fused) for _ in range(3)) / fused.schedule.makespan
    serial = fused.serial / fused.schedule.makespan
    said = {"over the makespan": took, "serial": serial, "load": os.getloadavg()[0]}
    print(json.dumps(said))
    # a CPU may begin the next program of a device before the last one has ended
    assert 0.9 < took < 1.03
