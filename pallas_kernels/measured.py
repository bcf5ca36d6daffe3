"""The measured speeds of kernels, in measured.json in this folder; "auto" chooses by them.

The file is a list of maps, one for each kernel and kind of device. `python -m benchmarks.on_gpu`
writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("measured.json")
# With fewer cases a quartile is meaningless.
LEAST_CASES = 8


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Hold the speed of a kernel over the reference on a kind of device."""

    kernel: str
    device_kind: str  # as in `jax.Device`
    # Reached in three cases of four: the lower quartile. A median above 1 would select a kernel
    # that is slower in nearly half of the cases.
    ratio: float
    median: float
    least: float
    cases: int  # rows, nodes and shapes
    jax: str  # its version
    date: str  # YYYY-MM-DD


def summarise(
    kernel: str, device_kind: str, ratios: Sequence[float], *, jax: str, date: str
) -> Measurement | None:
    """Summarise the ratios of a kernel's cases; None if they are fewer than `LEAST_CASES`."""
    if len(ratios) < LEAST_CASES:
        return None
    quartile, median, _ = statistics.quantiles(ratios, n=4, method="inclusive")
    figures = [round(figure, 3) for figure in (quartile, median, min(ratios))]
    return Measurement(kernel, device_kind, *figures, cases=len(ratios), jax=jax, date=date)


@functools.cache
def table() -> Mapping[tuple[str, str], Measurement]:
    """Read the package's own measurements, by kernel and device kind, once per process."""
    return read(PATH)


def read(path: Path) -> dict[tuple[str, str], Measurement]:
    """Read the measurements of a file, by kernel and device kind.

    Raises ValueError, in one sentence, if the file holds anything else.
    """
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); write it with benchmarks.on_gpu."
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a list of measurements; write it with benchmarks.on_gpu.")
    measurements = {}
    for row in rows:
        _check(row, path)
        measurement = Measurement(**row)
        measurements[measurement.kernel, measurement.device_kind] = measurement
    if len(measurements) < len(rows):
        raise ValueError(f"{path} has two measurements of one kernel and device; leave one.")
    return measurements


def as_text(measurements: Mapping[tuple[str, str], Measurement]) -> str:
    """Return the content of a file with these measurements, in the order of their keys."""
    rows = [dataclasses.asdict(measurements[key]) for key in sorted(measurements)]
    return json.dumps(rows, indent=1) + "\n"


def _check(row: Any, path: Path) -> None:
    """Raise ValueError unless a row has the fields of `Measurement`, and its ratios are above 0."""
    types = {"ratio": float, "median": float, "least": float, "cases": int}
    fields = {field.name: types.get(field.name, str) for field in dataclasses.fields(Measurement)}
    if not isinstance(row, dict) or row.keys() != fields.keys():
        raise ValueError(f"{path} has a row {row!r:.80}; its keys are {', '.join(fields)}.")
    for name, kind in fields.items():
        value = row[name]
        accepted = (int, float) if kind is float else kind
        number = kind is str or (not isinstance(value, bool) and value == value)
        if not (isinstance(value, accepted) and number):
            raise ValueError(f"{path} has {name} = {value!r:.40}, which is no {kind.__name__}.")
        if kind is not str and not 0 < value < math.inf:
            raise ValueError(f"{path} has {name} = {value!r:.40}; it is above 0 and finite.")
