"""Predict the live rows of a slice by tokens to come, and the seconds they take."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rlhf_jax.generation.reallocation.length_model import CHANCES, SHARES

BINS = 64  # The number of bins of tokens to come, of equal width, up to the horizon.
ROUNDING = 1e-6  # Expected rows below this count as none.

# How far ahead a drain is predicted.

# Chance of the outcome that the horizon reaches for every sample; by hand.
_LIKELY = 0.75
# Expected rows of all slices beyond the horizon, at most; by hand.
_ROWS_BEYOND = 0.1
# Samples from which the horizon is estimated; by hand, limits the time.
_HORIZON_SAMPLES = 512
# Share of a deadline by which a row must end later to count e times as much; by hand, checked by
# benchmarks/makespan.py.
_SOFTNESS = 0.01
# Iterations of a deadline's scale; the error shrinks a hundredfold each time.
_DEADLINE_ROUNDS = 3
# Minimum seconds of a deadline.
_TINY = 1e-9
# Largest exponent of one row's weight, so that all sums are finite.
_MOST_LATE = 60.0


@dataclasses.dataclass(frozen=True)
class DrainForecast:
    """Hold the forecast of slices in each bin of tokens to come, [..., B] or more bins."""

    live: np.ndarray  # expected rows
    pace: np.ndarray  # seconds of a bin

    @functools.cached_property
    def over(self) -> np.ndarray:
        """Return [..., B] seconds until the end of each bin."""
        return self.pace.cumsum(axis=-1)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """Return [...] seconds until the last row ends.

        A bin in which one row may live counts by that chance.
        """
        return np.einsum("...b,...b->...", np.minimum(self.live, 1), self.pace)

    @functools.cached_property
    def spent(self) -> np.ndarray:
        """Return [...] busy seconds of the slices, and those of all their rows, summed."""
        return self.seconds + np.einsum("...b,...b->...", self.live, self.pace)

    @functools.cached_property
    def ended(self) -> np.ndarray:
        """Return [..., B] rows expected to end in each bin."""
        return -np.diff(self.live, axis=-1, append=self.live.dtype.type(0))

    def late(self, deadline: np.ndarray | float) -> np.ndarray:
        """Return [...] seconds by which rows delay the end of a stage with a given deadline.

        A row that ends at the deadline [...] counts 1 % of it, and e times as much for each 1 %
        later: a row that surely ends in time weighs as much as one in a hundred that ends 5 %
        later. It is the derivative of `deadline`.
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
    """Return the end of slices whose rows are late by these seconds, as in `DrainForecast.late`."""
    scale = _SOFTNESS * deadline
    return deadline + scale * float(np.log(late / scale))


@dataclasses.dataclass(frozen=True)
class DecodeRate:
    """Hold bins of tokens to come, and the seconds of a row per bin."""

    width: float  # tokens of a bin
    paces: np.ndarray  # [rows + 1] seconds of a bin by live rows; paces[0] = paces[1]

    @property
    def rows(self) -> int:
        """Return the row slots of a slice."""
        return len(self.paces) - 1

    def bins(self, left: np.ndarray) -> np.ndarray:
        """Return the last bin in which a sample lives, for tokens to come of any shape.

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
        """Return the seconds of a bin by the number of rows, of any shape.

        Whole numbers are exact, others are interpolated; more rows than fit take turns.
        """
        low = np.minimum(live.astype(np.int32), self.rows - 1)
        part = np.minimum(live, self.rows) - low
        pace = self.paces.take(low) + np.diff(self.paces).take(low) * part
        return pace * np.maximum(live * (1 / self.rows), 1)

    def drain(self, live: np.ndarray) -> DrainForecast:
        """Return the forecast of slices with expected live rows [..., B]."""
        return DrainForecast(live, self.pace(live).astype(live.dtype))


def decode_rate_of(left: np.ndarray, speed: np.ndarray) -> DecodeRate:
    """Return the bins and their seconds, for samples with [n, Q] tokens left.

    speed [rows + 1]: tokens per second of one row, by live rows. The horizon is the length that
    hardly any row is expected to exceed, however far the limit is.
    """
    seen = left[:: -(-len(left) // _HORIZON_SAMPLES)]
    order = np.argsort(-seen, axis=None)
    beyond = np.tile(SHARES, len(seen))[order].cumsum() * (len(left) / len(seen))
    expected = seen.ravel()[order[np.argmax(beyond >= _ROWS_BEYOND)]]
    likely = left[:, np.searchsorted(CHANCES, _LIKELY)].max()
    horizon = float(max(expected, likely))

    width = max(horizon, 1.0) * (1 + 1e-9) / BINS
    # More rows are never faster.
    slowest = np.minimum.accumulate(np.concatenate([speed[1:2], speed[1:]]))
    return DecodeRate(width, width / slowest)
