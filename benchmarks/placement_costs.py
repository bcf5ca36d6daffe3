"""Compare the predicted seconds of calls with the CPU seconds that they take on virtual devices.

    python -m benchmarks.placement_costs > benchmarks/results/placement_costs.json

The calls of PPO, of models and texts of several sizes, over eight virtual devices of this CPU, by
the figures that `benchmarks/chip.py` measures first. It ranks calls, not shardings: what a sharding
costs on real links cannot be measured here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from benchmarks.chip import measure, placed_calls, run_seconds
from rlhf_jax.planner.chips import Chip, Efficiency
from rlhf_jax.planner.placed_calls import PlacedCalls
from rlhf_jax.planner.programs import programs as programs_of
from rlhf_jax.planner.search.costs import predict_call
from rlhf_jax.types import ModelConfig

SAYS = "ranks calls, not shardings: what a sharding costs on real links is not measured here"


class Shape(NamedTuple):
    """The size of a model and of a batch."""

    layers: int
    width: int
    rows: int
    tokens: int  # of a sample

    @property
    def model(self) -> ModelConfig:
        """A model of this size, with heads of 32."""
        heads = self.width // 32
        return ModelConfig(
            "llama", 4096, self.width, 4 * self.width, self.layers, heads, 8, 32, self.tokens
        )


SHAPES = (
    Shape(2, 256, 8, 64),
    Shape(4, 256, 8, 128),
    Shape(2, 512, 16, 64),
    Shape(4, 512, 16, 128),
)


def main() -> None:
    """Print one document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    devices = jax.devices()
    document = measure(devices)
    pairs = list(measured_pairs(devices, chip_of(document), SHAPES))
    found = {"pairs": pairs, "rank_correlation": round(rank_correlation(pairs), 3), "says": SAYS}
    print(json.dumps(found | document | {"date": datetime.date.today().isoformat()}, indent=1))


def chip_of(document: dict[str, Any]) -> Chip:
    """The chip of a measured document."""
    figures: dict[str, Any] = dict(document["chip"])
    efficiency = Efficiency(**figures.pop("efficiency"))
    return Chip(**figures, efficiency=efficiency)


def measured_pairs(
    devices: Sequence[Any], chip: Chip, shapes: Sequence[Shape]
) -> Iterator[dict[str, Any]]:
    """Each call of each shape: predicted seconds, and the CPU seconds of its programs."""
    for shape in shapes:
        calls = placed_calls(shape.model, devices, shape.rows, tokens=shape.tokens, chip=chip)
        for call, seconds in call_seconds(calls, time.process_time).items():
            predicted = predict_call(calls.placed(call), call).seconds
            yield {
                "call": call,
                **shape._asdict(),
                "predicted_seconds": round(predicted, 4),
                "cpu_seconds": round(seconds, 4),
            }


def call_seconds(calls: PlacedCalls, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds that the programs of each call take by a clock, those of generation in all rounds."""
    rounds, _ = calls.placed("generation").rounds()
    took: dict[str, float] = {}
    for program in programs_of(calls):
        if program.name == "a layer comes":
            continue
        times = rounds if program.call == "generation" else 1
        took[program.call] = took.get(program.call, 0.0) + times * run_seconds(program, clock)
    return took


def rank_correlation(pairs: Sequence[dict[str, Any]]) -> float:
    """Spearman's, of predicted seconds and CPU seconds."""

    def ranks(name: str) -> np.ndarray:
        """The mean place of each among all, so that equal ones are equal."""
        values = np.array([pair[name] for pair in pairs])
        ordered = np.sort(values)
        return np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")

    return float(np.corrcoef(ranks("predicted_seconds"), ranks("cpu_seconds"))[0, 1])


if __name__ == "__main__":
    main()
