"""Predict how many rows of a slice live after so many tokens more, and for how many seconds."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rlhf_jax.generation.reallocation.length_model import CHANCES, SHARES

BINS = 64  # The bins of tokens to come, of equal width, up to the horizon.
ROUNDING = 1e-6  # The rows below which an expected number is none.

# How far a drain is looked ahead.

# Chance of the outcome that the horizon reaches for every sample; by hand.
_LIKELY = 0.75
# Rows of all slices that may be expected to have more tokens than the horizon; by hand.
_ROWS_BEYOND = 0.1
# Samples from which the horizon is estimated; by hand, for the time that it takes.
_HORIZON_SAMPLES = 512
# Share of a deadline by which a row must end later to count e times as much; by hand, checked by
# benchmarks/makespan.py.
_SOFTNESS = 0.01
# Times that the scale of a deadline is taken from itself; it closes in a hundredfold each time.
_DEADLINE_ROUNDS = 3
# Seconds that every deadline has at least.
_TINY = 1e-9
# Times as much that one row counts at most, as an exponent, so that all sums are finite.
_MOST_LATE = 60.0


@dataclasses.dataclass(frozen=True)
class DrainForecast:
    """Hold what slices do in each bin of tokens to come, [..., B] or more bins."""

    live: np.ndarray  # rows expected
    pace: np.ndarray  # seconds of a bin

    @functools.cached_property
    def over(self) -> np.ndarray:
        """Return [..., B] seconds until each bin is over."""
        return self.pace.cumsum(axis=-1)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """Return [...] seconds until the last row ends.

        A bin in which one row may live counts by that chance.
        """
        return np.einsum("...b,...b->...", np.minimum(self.live, 1), self.pace)

    @functools.cached_property
    def spent(self) -> np.ndarray:
        """Return [...] seconds of the slices, and those of all their rows, summed."""
        return self.seconds + np.einsum("...b,...b->...", self.live, self.pace)

    @functools.cached_property
    def ended(self) -> np.ndarray:
        """Return [..., B] rows expected to end in each bin."""
        return -np.diff(self.live, axis=-1, append=self.live.dtype.type(0))

    def late(self, deadline: np.ndarray | float) -> np.ndarray:
        """Return [...] seconds by which rows put off the end of a stage that is due at a deadline.

        A row that ends at the deadline [...] counts 1 % of it, and e times as much for each 1 %
        that it ends later: so a row that surely ends in time weighs as one in a hundred that ends
        5 % later does. It is the derivative of `deadline`.
        """
        scale = _SOFTNESS * np.asarray(deadline, self.over.dtype)[..., None]
        later = np.exp(np.minimum(self.over / scale - 1 / _SOFTNESS, _MOST_LATE))
        return np.einsum("...b,...b->...", self.ended, later) * scale[..., 0]

    def deadline(self) -> float:
        """Return the seconds in which all slices are expected to end: a smooth maximum.

        It is the logarithm of the sum over rows of exponentials of the seconds in which they end.
        """
        ends = self.over[self.ended > ROUNDING]
        rows = self.ended[self.ended > ROUNDING]
        deadline = last = float(ends.max(initial=0.0))
        for _ in range(_DEADLINE_ROUNDS):
            scale = _SOFTNESS * max(deadline, _TINY)
            deadline = last + scale * float(np.log(np.exp((ends - last) / scale) @ rows))
        return max(deadline, _TINY)


def put_off(deadline: float, late: float) -> float:
    """Return when slices end whose rows are late by so many seconds, as `DrainForecast.late`."""
    scale = _SOFTNESS * deadline
    return deadline + scale * float(np.log(late / scale))


@dataclasses.dataclass(frozen=True)
class DecodeRate:
    """Hold bins of tokens to come, and the seconds that a row takes for one of them."""

    width: float  # tokens of a bin
    paces: np.ndarray  # [rows + 1] seconds of a bin with so many live rows; paces[0] = paces[1]

    @property
    def rows(self) -> int:
        """Return the row slots of a slice."""
        return len(self.paces) - 1

    def bins(self, left: np.ndarray) -> np.ndarray:
        """Return the last bin in which a sample lives, of tokens to come in the same shape.

        It is int8, and the last bin for all beyond the horizon.
        """
        last = left * (1 / self.width)
        return np.minimum(last, BINS - 1, out=last).astype(np.int8)

    def curves(self, ends: np.ndarray) -> np.ndarray:
        """Return [m, B] chances that a sample lives in a bin, from outcomes' last bins [m, Q]."""
        return SHARES @ (ends[:, :, None] >= np.arange(BINS, dtype=ends.dtype))

    def expected_live(self, ends: np.ndarray, place: np.ndarray, slices: int) -> np.ndarray:
        """Return [slices, B] rows expected to live in each bin.

        ends [n, Q]: last bins of the outcomes of samples on slices place [n], -1 for none.
        """
        base = BINS * (place + 1)
        counts = np.zeros((slices + 1) * BINS)
        for share, bins in zip(SHARES, ends.T, strict=True):
            counts += share * np.bincount(base + bins, minlength=len(counts))
        return counts.reshape(slices + 1, BINS)[1:, ::-1].cumsum(axis=1)[:, ::-1]

    def pace(self, live: np.ndarray) -> np.ndarray:
        """Return the seconds of a bin with so many rows, of any shape.

        Whole numbers are exact, others are interpolated; more rows than fit take turns.
        """
        low = np.minimum(live.astype(np.int32), self.rows - 1)
        part = np.minimum(live, self.rows) - low
        pace = self.paces.take(low) + np.diff(self.paces).take(low) * part
        return pace * np.maximum(live * (1 / self.rows), 1)

    def drain(self, live: np.ndarray) -> DrainForecast:
        """Return what slices do that are expected to have live [..., B] rows."""
        return DrainForecast(live, self.pace(live).astype(live.dtype))


def decode_rate_of(left: np.ndarray, speed: np.ndarray) -> DecodeRate:
    """Return the bins, and their seconds, for samples that have left [n, Q] tokens to come.

    speed [rows + 1]: tokens a second of one row, by live rows. The horizon is where hardly a row of
    all is expected to have more, however far the limit is.
    """
    seen = left[:: -(-len(left) // _HORIZON_SAMPLES)]
    order = np.argsort(-seen, axis=None)
    beyond = np.tile(SHARES, len(seen))[order].cumsum() * (len(left) / len(seen))
    expected = seen.ravel()[order[np.argmax(beyond >= _ROWS_BEYOND)]]
    likely = left[:, np.searchsorted(CHANCES, _LIKELY)].max()
    horizon = float(max(expected, likely))

    width = max(horizon, 1.0) * (1 + 1e-9) / BINS
    # More rows are never quicker.
    slowest = np.minimum.accumulate(np.concatenate([speed[1:2], speed[1:]]))
    return DecodeRate(width, width / slowest)
