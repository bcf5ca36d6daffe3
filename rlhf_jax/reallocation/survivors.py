"""How many rows of a slice live after so many tokens more, and when the last of them ends."""

from __future__ import annotations

import dataclasses

import numpy as np

BINS = 64  # of equal width, up to the most tokens that any sample may have to come


@dataclasses.dataclass(frozen=True)
class Clock:
    """Bins of tokens to come, and the seconds that a row takes for one of them."""

    width: float  # tokens of a bin
    paces: np.ndarray  # [rows + 1] seconds of a bin with so many live rows; paces[0] = paces[1]

    @property
    def rows(self) -> int:
        """Row slots of a slice."""
        return len(self.paces) - 1

    def bins(self, left: np.ndarray) -> np.ndarray:
        """The last bin in which a sample lives, of tokens to come in the same shape."""
        return (left * (1 / self.width)).astype(np.intp)

    def curves(self, ends: np.ndarray) -> np.ndarray:
        """[m, B] chance that a sample lives in a bin, from the last bins [m, Q] of its quantiles."""
        return (ends[:, :, None] >= np.arange(BINS)).mean(axis=1)

    def survivors(self, ends: np.ndarray, place: np.ndarray, slices: int) -> np.ndarray:
        """[slices, B] rows expected to live in each bin, from last bins [n, Q] of samples on slices place [n]."""
        counts = np.bincount((ends + place[:, None] * BINS).ravel(), minlength=slices * BINS)
        return counts.reshape(slices, BINS)[:, ::-1].cumsum(axis=1)[:, ::-1] / max(ends.shape[1], 1)

    def pace(self, live: np.ndarray) -> np.ndarray:
        """Seconds of a bin with so many rows, of any shape; whole numbers are exact, more than fit take turns."""
        low = np.minimum(live.astype(np.intp), self.rows - 1)
        fitting = np.minimum(live, self.rows)
        pace = self.paces[low] + (self.paces[low + 1] - self.paces[low]) * (fitting - low)
        return pace * (np.maximum(live, self.rows) / self.rows)

    def seconds(self, survivors: np.ndarray) -> np.ndarray:
        """[...] until the last row ends, from survivors [..., B]; a bin in which one may live counts by that chance."""
        return np.einsum("...b,...b->...", np.clip(survivors, 0, 1), self.pace(survivors))

    def refilled(self, layers: list[np.ndarray]) -> np.ndarray:
        """[K] seconds for layers [K, B] of samples, as many as fit in each, that follow one another as rows end."""
        count = len(layers[0])
        live, rows = np.zeros((count, 2 * BINS)), np.arange(count)[:, None]
        for layer in layers:
            begins = (live > self.rows - np.maximum(layer[:, :1], 1) / 2).sum(axis=1)
            live[rows, np.minimum(begins, BINS)[:, None] + np.arange(BINS)] += layer
        return self.seconds(live)


def clock_of(left: np.ndarray, speed: np.ndarray) -> Clock:
    """The clock of samples that have left [n, Q] tokens to come, at speed [rows + 1] tokens a second of a row."""
    width = max(float(left.max()), 1.0) * (1 + 1e-9) / BINS
    slowest = np.minimum.accumulate(np.concatenate([speed[1:2], speed[1:]]))  # more rows are never quicker
    return Clock(width, width / slowest)
