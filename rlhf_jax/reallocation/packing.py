"""Samples that wait, by length: the longest together on light slices, short ones on full slices with refill.

How far to go is a matter of how sure the lengths are: placements from packed tightly to dealt out evenly are tried on
drawn lengths, and the one whose stage ends soonest is taken.
"""

from __future__ import annotations

import itertools

import numpy as np

from rlhf_jax.reallocation.survivors import BINS, Clock

GROUPS = 16  # of slices that are packed alike, at most
TRIED = 8  # deadlines at once
ROUNDS = 3  # of ever closer deadlines
DRAWS = 6  # of lengths, on which placements are tried
SLACK = 1.03  # of a deadline, for what waits


def deadline(clock: Clock, survivors: np.ndarray, tokens: float) -> float:
    """Seconds by which slices with survivors [slices, B] could do so many tokens more, none of their rows later.

    Each slice is filled to the number of rows at which its longest ends in time.
    """
    longest = np.maximum((survivors >= 0.5).sum(axis=1), 1)
    work = survivors.sum(axis=1) * clock.width
    rows = np.arange(1, clock.rows + 1)
    best = (rows * clock.width / clock.paces[1:]).max()
    low, high = 0.0, float((work.sum() + tokens) / best + longest.max() * clock.paces[-1])
    for _ in range(12):
        middle = (low + high) / 2
        level = np.searchsorted(clock.paces[1:], middle / longest, side="right")
        rate = np.where(level > 0, level * clock.width / clock.paces[level], 0.0)
        room = np.maximum(rate * middle - work, 0.0).sum()
        low, high = (low, middle) if room >= tokens else (middle, high)
    return high


def first(clock: Clock, ends: np.ndarray, slices: int, inference: float) -> list[np.ndarray]:
    """Samples of each of so many empty slices, as places in ends [n, Q] (`Clock.bins`), which come the longest first.

    inference: slice seconds of it that idle slices may do until the last sample has ended, or all of them after.
    """
    tried = [pack(clock, ends, slices, spread=True), [np.arange(len(ends))[one::slices] for one in range(slices)]]
    tried += [pack(clock, ends, slices, spread=False)] if inference else []
    return min(tried, key=lambda lists: _stage(clock, ends, lists, inference))


def _stage(clock: Clock, ends: np.ndarray, lists: list[np.ndarray], inference: float) -> float:
    """Mean seconds of a stage, inference included, over drawn lengths."""
    samples, counts = np.concatenate(lists), np.array([len(own) for own in lists])
    place = np.repeat(np.arange(len(lists)), counts)
    layer = (np.arange(len(samples)) - np.repeat(counts.cumsum() - counts, counts)) // clock.rows
    total = 0.0
    for draw in range(DRAWS):
        # Every sample draws its own quantile, and all draws together draw each quantile about as often.
        drawn = ends[samples, (samples * 5 + samples // 7 + draw * 3) % ends.shape[1]][:, None]
        layers = [
            clock.survivors(drawn[layer == one], place[layer == one], len(lists)) for one in range(layer.max() + 1)
        ]
        seconds = clock.refilled(layers)
        total += seconds.max() + max(0.0, inference - (seconds.max() - seconds).sum()) / len(lists)
    return total / DRAWS


def pack(clock: Clock, ends: np.ndarray, slices: int, spread: bool) -> list[np.ndarray]:
    """Samples of each slice, as places in ends [n, Q] (`Clock.bins`), which come the longest first.

    The earliest deadline that all can keep rules; with `spread` only the first slices, and what is left is packed
    again by a deadline of its own, so that no slice does more than it must.
    """
    share = -(-slices // GROUPS)  # slices of a group
    groups = -(-slices // share)
    total = np.concatenate([np.zeros((1, BINS)), clock.curves(ends[::share]).cumsum(axis=0)])
    counts, at, fixed = [], 0, 1
    while len(counts) < groups and at < len(total) - 1:
        found = _earliest(clock, total[at:] - total[at], groups - len(counts))
        kept = found[:fixed] if spread else found
        counts, at, fixed = counts + kept, at + sum(kept), 2 * fixed
    return _dealt(counts, share, len(ends), slices)


def _dealt(counts: list[int], share: int, samples: int, slices: int) -> list[np.ndarray]:
    """Every share-th sample was packed: each group takes the run around its own, dealt out to its slices."""
    lists, at = [], 0
    for count in counts:
        run = np.arange(at, min(at + count * share, samples))
        own = min(share, slices - len(lists))
        lists += [run[one::own] for one in range(own)]
        at += count * share
    return lists + [np.arange(0)] * (slices - len(lists))


def _earliest(clock: Clock, total: np.ndarray, slices: int) -> list[int]:
    """Samples of each slice for the earliest deadline; total [n + 1, B] summed curves, the longest first."""
    low = float(clock.seconds(total[1]))
    high = 1.5 * low + 1.5 * float(clock.seconds(total[-1] / slices))
    found = [len(total) - 1] + [0] * (slices - 1)
    for _ in range(ROUNDS):
        tried = np.linspace(low, high, TRIED + 1)[1:]
        counts = _filled(clock, total, slices, tried)
        kept = np.flatnonzero(counts.sum(axis=1) == len(total) - 1)
        if len(kept):
            found = counts[kept[0]].tolist()
            high = float(tried[kept[0]])
        low = high - (tried[1] - tried[0])
    return found


def _filled(clock: Clock, total: np.ndarray, slices: int, deadlines: np.ndarray) -> np.ndarray:
    """[K, slices] samples when each slice takes as many as end by the deadline, for K deadlines."""
    most, at = len(total) - 1, np.zeros(len(deadlines), int)
    counts = np.zeros((len(deadlines), slices), int)
    widest = most
    for one in range(slices):
        low, high = at.copy(), np.minimum(at + widest, most)
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = clock.refilled(_layers(clock, total, at, middle)) <= deadlines
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        counts[:, one], at = low - at, low
        widest = 2 * int(counts[:, one].max()) + 2
    return counts


def _layers(clock: Clock, total: np.ndarray, begin: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """[K, B] summed curves of samples begin to end [K], as many at once as a slice has rows."""
    most = max(1, -(-int((end - begin).max()) // clock.rows))
    cuts = [np.minimum(begin + layer * clock.rows, end) for layer in range(most + 1)]
    return [total[after] - total[before] for before, after in itertools.pairwise(cuts)]
