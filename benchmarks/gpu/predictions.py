"""Part g: the chip's figures, and the predicted against the measured seconds of calls."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.chip import measure, placed_calls
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import Sizes, compute_dtype
from benchmarks.placement_costs import call_seconds
from rlhf_jax.planner.chips import GPUS, read_chip
from rlhf_jax.planner.search.costs import predict_call
from rlhf_jax.runtime.files import write_atomically
from rlhf_jax.types import ModelConfig


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield the chip's figures, then the calls of PPO with each model that is trained."""
    path = ledger.path.with_name("chip.json")
    yield Case("chip", functools.partial(measure_chip, path, sizes.chip_model))
    for name in sizes.trained:
        yield Case(f"{name}: calls", functools.partial(compare_calls, sizes, name, path))


def measure_chip(path: Path, model: ModelConfig) -> dict[str, Any]:
    """Measure the chip, and write the file that `rlhf-jax plan --chip` reads.

    model: the one whose calls give the reached shares of the chip's figures.
    """
    document = measure(jax.devices()[:1], model)
    write_atomically(path, json.dumps(document, indent=1).encode())
    return document


def compare_calls(sizes: Sizes, name: str, path: Path) -> dict[str, Any]:
    """Return the predicted and the measured seconds of each call of PPO, by the chip's figures."""
    device = jax.devices()[0]
    kind = device.device_kind.lower()
    known = next((chip for model, chip in GPUS.items() if model in kind), None)
    batch = {"rows": sizes.microbatch_rows, "tokens": sizes.step.slots}
    calls = placed_calls(
        sizes.models[name],
        [device],
        **batch,
        dtype=compute_dtype().name,
        chip=read_chip(path, known),
    )
    found = {}
    for call, measured in call_seconds(calls, time.perf_counter).items():
        predicted = predict_call(calls.placed(call), call).seconds
        found[call] = {
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "ratio": measured / predicted,
        }
    return batch | {"calls": found}
