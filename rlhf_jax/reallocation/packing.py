"""Samples that wait, by length: the longest together on light slices, short ones on full slices
with refill.

Samples in order of their length are cut into runs, one for each slice; from some cut on they may be
dealt out to the slices that are left: where many must wait, long ones beside short ones wait less.
Of all such ways the one is taken whose stage is expected to end soonest. So the less sure lengths
are, the more evenly samples stand.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.reallocation.drain_model import BINS, ROUNDING, DecodeRate, DrainForecast

GROUPS = 16  # of slices that are packed alike, at most
# of all samples, and the power by which the first are closer together
CUTS = 72
CLOSER = 1.7
STARTS = 5  # cuts between two from which the rest may be dealt out
SHARERS = 10  # numbers of slices to which it may
PIECES = 8  # of a slice's rows, that begin together
WIDE = 2 * BINS  # bins in which all samples of a slice end, one after the other
# deadlines at once, and times that they close in
TRIED = 4
ROUNDS = 5
SLACK = 1.03  # of a deadline, for what waits
# seconds later that a first plan may end for a second of all slices and their rows that it spares
IDLE = 1e-5


@dataclasses.dataclass(frozen=True)
class _Ways:
    """What a slice does for each way to give it samples."""

    cuts: np.ndarray  # [C] places, all samples after the last
    runs: DrainForecast  # [C (C + 1) / 2, WIDE], samples from one cut to another, by the latter
    starts: np.ndarray  # [S] of the cuts, the last among them
    sharers: np.ndarray  # [K] slices, from none to all
    dealt: DrainForecast  # [K, S, WIDE], all samples from a start on, dealt out to so many
    share: int  # slices that each one stands for
    inference: float  # seconds of it, were all slices to do it


def deadline(clock: DecodeRate, drain_model: np.ndarray, tokens: float) -> float:
    """Seconds by which slices with survivors [slices, B] could do so many tokens more, none of
    their rows later.

    Each slice is filled to the number of rows at which its longest ends in time.
    """
    longest = np.maximum((drain_model >= 0.5).sum(axis=1), 1)
    work = drain_model.sum(axis=1) * clock.width
    rows = np.arange(1, clock.rows + 1)
    best = (rows * clock.width / clock.paces[1:]).max()
    low = 0.0
    high = float((work.sum() + tokens) / best + longest.max() * clock.paces[-1])
    for _ in range(12):
        middle = (low + high) / 2
        level = np.searchsorted(clock.paces[1:], middle / longest, side="right")
        rate = np.where(level > 0, level * clock.width / clock.paces[level], 0.0)
        room = np.maximum(rate * middle - work, 0.0).sum()
        low, high = (low, middle) if room >= tokens else (middle, high)
    return high


def first(
    clock: DecodeRate, ends: np.ndarray, slices: int, inference: float
) -> tuple[list[np.ndarray], int]:
    """Samples of each of so many empty slices, as places in ends [n, Q] (`DecodeRate.bins`), which come
    the longest first; and how many slices, the last ones, are to decode nothing else.

    inference: slice seconds of it that idle slices may do until the last sample has ended, or all
    of them after. Nothing can be scored before something has ended, so slices that are spared for
    it decode the shortest ones first.
    """
    seconds, lists = _packed(clock, ends, slices, inference)
    spared = sum(not len(own) for own in lists) if inference else 0
    count = min(spared * clock.rows, len(ends) // 2)
    if not count:
        return lists, 0
    rest = ends[:-count]
    shortest = np.arange(len(ends) - count, len(ends))
    begins = float(clock.drain(clock.curves(ends[shortest]).sum(axis=0) / spared).seconds)
    _, lists = _packed(
        clock, rest, slices - spared, max(0.0, inference - spared * (seconds - begins))
    )
    return lists + [shortest[one::spared] for one in range(spared)], spared


def _packed(
    clock: DecodeRate, ends: np.ndarray, slices: int, inference: float
) -> tuple[float, list[np.ndarray]]:
    """(seconds of the stage, `first`'s lists) as if there were something to score at once."""
    share = -(-slices // GROUPS)  # slices of a group
    groups = -(-slices // share)
    ways = _ways(clock, ends, groups, share, inference / slices)
    prices = (0.0, 1 / slices) if inference else (0.0,)
    seconds, counts = min((_soonest(ways, price) for price in prices), key=lambda one: one[0])
    return seconds, _lists(counts, share, ends, slices)


def _ways(clock: DecodeRate, ends: np.ndarray, slices: int, share: int, inference: float) -> _Ways:
    """All ways for every share-th of samples with last bins ends [n, Q]."""
    ends = ends[::share]
    alike = np.linspace(0, 1, slices + 1)
    closer = np.linspace(0, 1, CUTS + 1) ** CLOSER
    cuts = np.unique(np.round(len(ends) * np.concatenate([alike, closer])).astype(int))
    parts = np.add.reduceat(clock.curves(ends), cuts[:-1], axis=0).astype(np.float32)
    starts = np.unique(np.append(np.arange(0, len(cuts), STARTS), len(cuts) - 1))
    sharers = np.unique(np.append(0, np.round(np.geomspace(1, slices, SHARERS)).astype(int)))
    runs = clock.drain(_runs(clock, parts))
    dealt = clock.drain(_dealt(clock, parts, starts, sharers))
    return _Ways(cuts, runs, starts, sharers, dealt, share, inference)


def _runs(clock: DecodeRate, parts: np.ndarray) -> np.ndarray:
    """[C (C + 1) / 2, WIDE] rows of a slice that takes the parts [C - 1, B] from one cut to
    another, in turn.
    """
    none = np.zeros((1, WIDE), np.float32)
    ending = [none]  # at each cut, from each cut up to it
    for part in parts:
        ending.append(np.concatenate([_begun(clock, ending[-1], part[None]), none]))
    return np.concatenate(ending)


def _dealt(
    clock: DecodeRate, parts: np.ndarray, starts: np.ndarray, sharers: np.ndarray
) -> np.ndarray:
    """[K, S, WIDE] rows of one of so many slices that take the parts [C - 1, B] from a start on, in
    turn.
    """
    live = np.zeros((len(sharers), len(starts), WIDE), np.float32)
    for at, part in enumerate(parts):
        begun = np.count_nonzero(starts <= at)
        curves = np.repeat(part / np.maximum(sharers, 1)[:, None], begun, axis=0)
        live[1:, :begun] = _begun(
            clock, live[1:, :begun].reshape(-1, WIDE), curves[begun:]
        ).reshape(-1, begun, WIDE)
    return live


def _begun(clock: DecodeRate, live: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """[m, WIDE] rows of slices with live [m, WIDE] after samples of curves [m or 1, B] have begun,
    a few at a time.
    """
    pieces = max(1, int(np.ceil(curves[:, 0].max() * PIECES / clock.rows)))
    live, curves, rows = live.copy(), curves / pieces, WIDE * np.arange(len(live))
    for _ in range(pieces):
        full = (live > clock.rows * (1 + ROUNDING) - curves[:, :1]).sum(axis=1)
        begins = rows + np.minimum(full, WIDE - BINS)
        live.reshape(-1)[begins[:, None] + np.arange(BINS)] += curves
    return live


def _soonest(ways: _Ways, price: float) -> tuple[float, list[int]]:
    """`_cut` by ever better deadlines."""
    low = 0.0
    high = float(ways.dealt.over[-1, 0][ways.dealt.live[-1, 0] > ROUNDING].max())
    found = []
    for _ in range(ROUNDS):
        tried = np.linspace(low, high, TRIED + 2)[1:-1]
        found += [_cut(ways, float(deadline), price) for deadline in tried]
        best = tried[np.argmin([seconds for seconds, _ in found[-TRIED:]])]
        low = best - (tried[1] - tried[0])
        high = best + (tried[1] - tried[0])
    return min(found, key=lambda one: one[0])


def _cut(ways: _Ways, deadline: float, price: float) -> tuple[float, list[int]]:
    """(seconds of a stage, samples of each slice of the first runs) for a deadline and the row
    seconds after it.

    price: seconds that a busy slice second is held to cost; those of IDLE stay in the figure, to
    choose among equals.
    """
    slices = int(ways.sharers[-1])
    sharers = ways.sharers
    triangle = np.tril_indices(len(ways.cuts))
    cost = np.full((len(ways.cuts), len(ways.cuts)), np.inf)  # of a run from one cut to another
    cost.T[triangle] = (
        ways.runs.late(deadline) + price * ways.runs.seconds + IDLE / slices * ways.runs.spent
    )
    least, paths = _paths(cost, slices)
    rest = ways.dealt.late(deadline) + price * ways.dealt.seconds + IDLE / slices * ways.dealt.spent
    rest *= sharers[:, None]
    rest[0, :-1] = np.inf  # nobody takes what is left
    total = least[slices - sharers][:, ways.starts] + rest
    few, start = np.unravel_index(total.argmin(), total.shape)
    path = paths[slices - sharers[few]][ways.starts[start]]
    busy = ways.runs.seconds[path[1:] * (path[1:] + 1) // 2 + path[:-1]].sum()
    busy += sharers[few] * ways.dealt.seconds[few, start]
    late = ways.share * float(total[few, start] - price * busy)
    idle = deadline - busy / slices
    return deadline + late + max(0.0, ways.inference - idle), np.diff(ways.cuts[path]).tolist()


def _paths(cost: np.ndarray, slices: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """([slices + 1, C] least cost of so many runs up to each cut, [C, runs + 1] for each number of
    them their cuts).

    cost [C, C] of a run from one cut to another.
    """
    cuts = np.arange(len(cost))
    least = [np.where(cuts > 0, np.inf, 0.0)]
    paths = [cuts[:, None]]
    for _ in range(slices):
        through = least[-1][:, None] + cost
        least.append(through.min(axis=0))
        paths.append(np.column_stack([paths[-1][through.argmin(axis=0)], cuts]))
    return np.array(least), paths


def _lists(counts: list[int], share: int, ends: np.ndarray, slices: int) -> list[np.ndarray]:
    """Every share-th sample was packed: each group, and all that are left, deal out the run around
    their own.

    Samples that look alike stay in order, as a slice prefills a prompt once.
    """
    lists = []
    at = 0
    for own, count in [*((share, count * share) for count in counts), (slices, len(ends))]:
        own = min(own, slices - len(lists))
        run = np.arange(at, min(at + count, len(ends)))
        alike = (ends[run] == ends[run[:1]]).all()
        lists += (
            np.array_split(run, own) if alike and own else [run[one::own] for one in range(own)]
        )
        at += len(run)
    return lists
