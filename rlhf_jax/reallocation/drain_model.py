"""How many rows of a slice live after so many tokens more, and for how long after a deadline."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rlhf_jax.reallocation.length_model import CHANCES, SHARES

BINS = 64  # of equal width, up to the horizon
LIKELY = int(np.searchsorted(CHANCES, 0.75))  # outcome: the horizon is no nearer than any sample's,
HARDLY = 0.1  # nor than the tokens that so many rows are expected to have
SEEN = 512  # samples from which that is estimated
TICKS = 256  # of the time in which all slices end
ROUNDING = 1e-6  # rows


@dataclasses.dataclass(frozen=True)
class DrainForecast:
    """Slices as they drain: what they do in each bin of tokens to come, [..., B] or more bins."""

    live: np.ndarray  # rows expected
    pace: np.ndarray  # seconds of a bin

    @functools.cached_property
    def over(self) -> np.ndarray:
        """Seconds until a bin is over."""
        return self.pace.cumsum(axis=-1)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """[...] until the last row ends; a bin in which one may live counts by that chance."""
        return np.einsum("...b,...b->...", np.minimum(self.live, 1), self.pace)

    @functools.cached_property
    def spent(self) -> np.ndarray:
        """[...] seconds of the slices, and those of all their rows."""
        return self.seconds + np.einsum("...b,...b->...", self.live, self.pace)

    def late(self, deadline: np.ndarray | float) -> np.ndarray:
        """[...] row seconds expected after a deadline [...]."""
        after = self.over - np.asarray(deadline, self.over.dtype)[..., None]
        return np.einsum("...b,...b->...", self.live, np.minimum(np.maximum(after, 0), self.pace))

    def deadline(self) -> float:
        """Seconds after which one row of all slices is expected to live.

        All slices end, in expectation, at most by a deadline and the row seconds after it,
        whichever the deadline: this is the one for which that is least.
        """
        ended = -np.diff(self.live, axis=1, append=0.0)
        tick = float(self.over.max()) / (TICKS - 1)
        counts = np.bincount((self.over / tick).astype(np.int32).ravel(), ended.ravel(), TICKS)
        living = counts[::-1].cumsum()[::-1]
        return tick * max(0, np.count_nonzero(living >= 1 - ROUNDING) - 1)


@dataclasses.dataclass(frozen=True)
class DecodeRate:
    """Bins of tokens to come, and the seconds that a row takes for one of them."""

    width: float  # tokens of a bin
    paces: np.ndarray  # [rows + 1] seconds of a bin with so many live rows; paces[0] = paces[1]

    @property
    def rows(self) -> int:
        """Row slots of a slice."""
        return len(self.paces) - 1

    def bins(self, left: np.ndarray) -> np.ndarray:
        """The last bin in which a sample lives, of tokens to come in the same shape; the last for
        all beyond.
        """
        last = left * (1 / self.width)
        return np.minimum(last, BINS - 1, out=last).astype(np.int8)

    def curves(self, ends: np.ndarray) -> np.ndarray:
        """[m, B] chance that a sample lives in a bin, from the last bins [m, Q] of its outcomes."""
        return SHARES @ (ends[:, :, None] >= np.arange(BINS, dtype=ends.dtype))

    def drain_model(self, ends: np.ndarray, place: np.ndarray, slices: int) -> np.ndarray:
        """[slices, B] rows expected to live in each bin, from last bins [n, Q] of samples on slices
        place [n].

        Those of place -1 stand on none.
        """
        base = BINS * (place + 1)
        counts = np.zeros((slices + 1) * BINS)
        for share, bins in zip(SHARES, ends.T, strict=True):
            counts += share * np.bincount(base + bins, minlength=len(counts))
        return counts.reshape(slices + 1, BINS)[1:, ::-1].cumsum(axis=1)[:, ::-1]

    def pace(self, live: np.ndarray) -> np.ndarray:
        """Seconds of a bin with so many rows, of any shape; whole numbers are exact, more than fit
        take turns.
        """
        low = np.minimum(live.astype(np.int32), self.rows - 1)
        pace = self.paces.take(low) + np.diff(self.paces).take(low) * (
            np.minimum(live, self.rows) - low
        )
        return pace * np.maximum(live * (1 / self.rows), 1)

    def drain(self, live: np.ndarray) -> DrainForecast:
        """What slices do that have live [..., B] rows."""
        return DrainForecast(live, self.pace(live).astype(live.dtype))


def decode_rate_of(left: np.ndarray, speed: np.ndarray) -> DecodeRate:
    """The clock of samples that have left [n, Q] tokens to come, at speed [rows + 1] tokens a
    second of a row.
    """
    width = max(_horizon(left), 1.0) * (1 + 1e-9) / BINS
    # more rows are never quicker
    slowest = np.minimum.accumulate(np.concatenate([speed[1:2], speed[1:]]))
    return DecodeRate(width, width / slowest)


def _horizon(left: np.ndarray) -> float:
    """Tokens to come that matter: hardly a row of all is expected to have more, however far the
    limit is.
    """
    seen = left[:: -(-len(left) // SEEN)]
    order = np.argsort(-seen, axis=None)
    beyond = np.tile(SHARES, len(seen))[order].cumsum() * (len(left) / len(seen))
    expected = seen.ravel()[order[np.argmax(beyond >= HARDLY)]]
    return float(max(expected, left[:, LIKELY].max()))
