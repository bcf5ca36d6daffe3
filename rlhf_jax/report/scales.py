"""Compute the numbers behind charts: ticks, domains, smoothing, downsampling, number formats."""

from __future__ import annotations

import itertools
import math

import numpy as np

from rlhf_jax.runtime.watchdog import format_duration

# Values farther from the others than this many spans are cut off at the chart's edge.
SPIKE = 3.0


def tick_step(low: float, high: float, wanted: int) -> float:
    """Return the least round step that cuts low..high into at most `wanted` parts.

    Round steps are 1, 2 and 5 times a power of ten.
    """
    least = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def ticks(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of a step within low..high."""
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def domain(
    values: np.ndarray, wanted: int = 4, from_zero: bool = False
) -> tuple[float, float, float]:
    """Return the round ends of an axis for values [n], and the step of its ticks.

    There are about `wanted` ticks. A lone spike may be outside; zero is inside if wanted or near.
    """
    low, high = _core(np.sort(values))
    low = 0.0 if from_zero or 0 <= low < high / 2 else low
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 10 or 1.0
        low -= room
        high += room
    step = tick_step(low, high, wanted)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def _core(ordered: np.ndarray) -> tuple[float, float]:
    """Return the ends of sorted values without spikes.

    Spikes are at most one in a hundred values at each end, and only among ten or more.
    """
    low = float(ordered[0])
    high = float(ordered[-1])
    if len(ordered) < 10:
        return low, high
    cut = max(1, len(ordered) // 100)
    inner_low = float(ordered[cut])
    inner_high = float(ordered[-1 - cut])
    reach = SPIKE * (inner_high - inner_low)
    if low < inner_low - reach:
        low = inner_low
    if high > inner_high + reach:
        high = inner_high
    return low, high


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the moving mean of values [n] without spikes.

    It is weighted by a triangle that reaches a fifteenth of the values to either side.
    """
    reach = len(values) // 15 + 1
    if len(values) < 6:
        return values
    values = np.clip(values, *_core(np.sort(values)))
    weights = 1.0 - np.abs(np.arange(-reach, reach + 1)) / (reach + 1)
    total = np.convolve(np.ones_like(values), weights)[reach:-reach]
    return np.convolve(values, weights)[reach:-reach] / total


def groups(count: int, most: int) -> list[slice]:
    """Split `count` points into at most `most` runs of almost equal size."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(edges)]


def axis_number(value: float, step: float) -> str:
    """Format a tick's label, with the digits of its step: 0.25, 1,500, 20k, 3M, −2e−5."""
    if abs(value) < step / 2:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size and step >= size / 100:
            unit = 1e3 if letter == "k" else size
            return signed(f"{value / unit:g}{letter}")
    if step < 1e-4:
        return signed(f"{value:.0e}")
    return signed(f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}")


def reading(value: float) -> str:
    """Format a number with three digits: 0.972, 19.8, 1,234, 1.2e−5."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return signed(f"{value / 1e6:,.3g}M" if abs(value) < 1e9 else f"{value / 1e9:,.3g}G")
    if abs(value) >= 100:
        return signed(f"{value:,.0f}")
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1
    return signed(f"{value:.{digits}f}" if abs(value) >= 1e-3 else f"{value:.1e}")


def duration(seconds: float) -> str:
    """Format a duration: 8.5 s, 4 min 20 s, 3 h 05 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 48 * 3600:
        return format_duration(seconds)
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def share(part: float, whole: float) -> str:
    """Format a share: 25%; <1% if small but not 0."""
    per_cent = 100 * part / whole if whole else 0.0
    return "<1%" if 0 < per_cent < 0.5 else f"{per_cent:.0f}%"


def volume(amount: float) -> str:
    """Format a number of bytes: 1.23 GB, 45.6 MB, 789 kB, 12 bytes."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= size:
            return f"{reading(amount / size)} {unit}"
    return f"{amount:.0f} bytes"


def signed(text: str) -> str:
    """Format a number's text with a true minus sign, and exponents without leading zeros."""
    return text.replace("e-0", "e-").replace("-", "−")


def strategy_label(name: str) -> str:
    """Format a strategy's name; the parents of a tree are counted instead of listed."""
    return f"{name.split('-')[0]}-tree of {name.count(',') + 1}" if ":" in name else name
