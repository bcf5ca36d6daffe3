"""Place waiting samples by length: the longest together on light slices, short ones on full slices.

Samples in order of length are cut into runs, one per slice; from some cut on they may be dealt out
to the remaining slices: if many must wait, long ones next to short ones wait less. Of all such
placements, the one with the earliest expected end of the stage is chosen. The less certain lengths
are, the more evenly samples are spread.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.generation.reallocation.drain_model import (
    BINS,
    ROUNDING,
    DecodeRate,
    DrainForecast,
    put_off,
)

# Bins that cover all samples of a slice, one after the other.
_WIDE = 2 * BINS

# Which placements are compared. Each constant is by hand and limits the host's time;
# benchmarks/makespan.py checks them together.

# Most groups of equally packed slices.
_GROUPS = 16
# Cuts of the samples in order of length, and the power by which the first are closer together.
_CUTS = 56
_CUT_POWER = 1.8
# Cuts from one start to the next, from which the rest may be dealt out.
_START_EVERY = 5
# Numbers of slices that the rest may be dealt out to.
_SHARERS = 10
# Parts of a slice's rows that begin one after the other.
_PIECES = 4
# Deadlines that are tried if slices may be spared for inference.
_DEADLINES = 8
# Bisection steps for the deadline of a refill.
_HALVINGS = 12
# Seconds of delay of a first placement per second that all slices and rows save.
_IDLE_PRICE = 1e-5


@dataclasses.dataclass(frozen=True)
class _Ways:
    """Hold the forecast of a slice for each way to give it samples."""

    cuts: np.ndarray  # [C] positions, the last after all samples
    runs: DrainForecast  # [C (C + 1) / 2, _WIDE], samples from one cut to another, by the latter
    starts: np.ndarray  # [S] of the cuts, the last among them
    sharers: np.ndarray  # [K] slices, from none to all
    dealt: DrainForecast  # [K, S, _WIDE], all samples from a start on, dealt out to K slices
    share: int  # slices per group
    inference: float  # its seconds if all slices share it


def deadline(decode_rate: DecodeRate, expected_live: np.ndarray, tokens: float) -> float:
    """Return the seconds by which slices could decode `tokens` more without delaying their rows.

    expected_live [slices, B]: their current rows. Each slice is filled to the number of rows at
    which its longest ends in time; the deadline is found by bisection.
    """
    width = decode_rate.width
    paces = decode_rate.paces
    longest = np.maximum((expected_live >= 0.5).sum(axis=1), 1)
    work = expected_live.sum(axis=1) * width
    best = (np.arange(1, decode_rate.rows + 1) * width / paces[1:]).max()

    low = 0.0
    high = float((work.sum() + tokens) / best + longest.max() * paces[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        level = np.searchsorted(paces[1:], middle / longest, side="right")
        speed = np.where(level > 0, level * width / paces[level], 0.0)
        room = np.maximum(speed * middle - work, 0.0).sum()
        if room >= tokens:
            high = middle
        else:
            low = middle
    return high


def place_first(
    decode_rate: DecodeRate, ends: np.ndarray, slices: int, inference: float
) -> tuple[list[np.ndarray], int]:
    """Return the samples of each of some empty slices, and the slices that do inference first.

    Samples are positions in ends [n, Q] (`DecodeRate.bins`), sorted longest first. inference: slice
    seconds of it that idle slices may do until the last sample has ended, or all of them after. The
    slices spared for it are the last ones. Nothing can be scored before something has ended, so
    they first decode the shortest samples, and nothing else.
    """
    seconds, lists = _pack(decode_rate, ends, slices, inference)
    spared = sum(not len(own) for own in lists) if inference else 0
    count = min(spared * decode_rate.rows, len(ends) // 2)
    if not count:
        return lists, 0
    shortest = np.arange(len(ends) - count, len(ends))
    live = decode_rate.curves(ends[shortest]).sum(axis=0) / spared
    begins = float(decode_rate.drain(live).seconds)
    left = max(0.0, inference - spared * (seconds - begins))
    _, lists = _pack(decode_rate, ends[:-count], slices - spared, inference=left)
    return lists + [shortest[one::spared] for one in range(spared)], spared


def _pack(
    decode_rate: DecodeRate, ends: np.ndarray, slices: int, inference: float
) -> tuple[float, list[np.ndarray]]:
    """Return the seconds of the stage, and the samples of each slice.

    It assumes that scoring can start at once. Slices are packed in groups, of which only every n-th
    sample is looked at.
    """
    share = -(-slices // _GROUPS)  # slices per group
    groups = -(-slices // share)
    ways = _find_ways(decode_rate, ends[::share], groups, share=share, inference=inference / slices)
    # A first pass finds how soon all can end; the second one weighs the rows that are late by that.
    everywhere = DrainForecast(ways.dealt.live[-1:, 0], ways.dealt.pace[-1:, 0])
    _, deadline, _ = _cut(ways, everywhere.deadline(), price=0.0)
    cuts = [_cut(ways, deadline, price=0.0)]
    if inference:
        # With spared slices all end later, but not by more than idle slices then do.
        later = np.linspace(0, 1, _DEADLINES) ** 3 * ways.inference
        cuts += [_cut(ways, deadline + float(more), price=1 / slices) for more in later]
    seconds, _, counts = min(cuts, key=lambda cut: cut[0])

    # Each group, and all remaining ones, deal out the run around their own samples. Samples with
    # equal forecasts stay in order, as a slice prefills a prompt once.
    lists = []
    at = 0
    for own, count in [*((share, count * share) for count in counts), (slices, len(ends))]:
        own = min(own, slices - len(lists))
        run = np.arange(at, min(at + count, len(ends)))
        if own and (ends[run] == ends[run[:1]]).all():
            lists += np.array_split(run, own)
        else:
            lists += [run[one::own] for one in range(own)]
        at += len(run)
    return seconds, lists


def _find_ways(
    decode_rate: DecodeRate, ends: np.ndarray, slices: int, share: int, inference: float
) -> _Ways:
    """Find all ways to give samples with last bins ends [n, Q] to slices."""
    alike = np.linspace(0, 1, slices + 1)
    closer = np.linspace(0, 1, _CUTS + 1) ** _CUT_POWER
    cuts = np.unique(np.round(len(ends) * np.concatenate([alike, closer])).astype(int))
    parts = np.add.reduceat(decode_rate.curves(ends), cuts[:-1], axis=0).astype(np.float32)
    starts = np.unique(np.append(np.arange(0, len(cuts), _START_EVERY), len(cuts) - 1))
    spread = np.round(np.geomspace(1, slices, _SHARERS)).astype(int)
    sharers = np.unique(np.append(0, spread))

    # Runs: at each cut, from each cut up to it.
    none = np.zeros((1, _WIDE), np.float32)
    runs = [none]
    for part in parts:
        runs.append(np.concatenate([_begin(decode_rate, runs[-1], part[None]), none]))

    # Dealt: for one of K numbers of slices, by the start of the shared samples, the rows [K, S,
    # _WIDE]. They take the parts [C - 1, B] from that start on, in turn.
    live = np.zeros((len(sharers), len(starts), _WIDE), np.float32)
    for at, part in enumerate(parts):
        begun = np.count_nonzero(starts <= at)
        curves = np.repeat(part / np.maximum(sharers, 1)[:, None], begun, axis=0)
        before = live[1:, :begun].reshape(-1, _WIDE)
        after = _begin(decode_rate, before, curves[begun:])
        live[1:, :begun] = after.reshape(-1, begun, _WIDE)

    return _Ways(
        cuts,
        runs=decode_rate.drain(np.concatenate(runs)),
        starts=starts,
        sharers=sharers,
        dealt=decode_rate.drain(live),
        share=share,
        inference=inference,
    )


def _begin(decode_rate: DecodeRate, live: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """Return the rows [m, _WIDE] of slices after more samples have begun, a few at a time.

    live [m, _WIDE]: rows before; curves [m or 1, B]: rows of the samples. They begin as soon as the
    slice has room.
    """
    rows = decode_rate.rows
    pieces = max(1, int(np.ceil(curves[:, 0].max() * _PIECES / rows)))
    live = live.copy()
    curves = curves / pieces
    lines = _WIDE * np.arange(len(live))
    for _ in range(pieces):
        full = (live > rows * (1 + ROUNDING) - curves[:, :1]).sum(axis=1)
        begins = lines + np.minimum(full, _WIDE - BINS)
        live.reshape(-1)[begins[:, None] + np.arange(BINS)] += curves
    return live


def _cut(ways: _Ways, deadline: float, price: float) -> tuple[float, float, list[int]]:
    """Return the seconds of a stage, of its decoding, and the samples of each of the first runs.

    It minimises the delay of the end by rows past a deadline. price: the cost in seconds of a busy
    slice second; `_IDLE_PRICE` breaks ties.
    """
    slices = int(ways.sharers[-1])
    sharers = ways.sharers

    def price_of(drains: DrainForecast) -> np.ndarray:
        return price * drains.seconds + _IDLE_PRICE / slices * drains.spent

    # The cost of a run from one cut to another, and of dealing out the rest from a start.
    run_late = ways.runs.late(deadline)
    cost = np.full((len(ways.cuts), len(ways.cuts)), np.inf)
    cost.T[np.tril_indices(len(ways.cuts))] = run_late + price_of(ways.runs)
    least, paths = _cheapest_paths(cost, slices)
    rest_late = ways.dealt.late(deadline) * sharers[:, None]
    rest = rest_late + price_of(ways.dealt) * sharers[:, None]
    rest[0, :-1] = np.inf  # no slice takes the rest
    total = least[slices - sharers][:, ways.starts] + rest
    few, start = np.unravel_index(total.argmin(), total.shape)

    path = paths[slices - sharers[few]][ways.starts[start]]
    runs = path[1:] * (path[1:] + 1) // 2 + path[:-1]
    busy = ways.runs.seconds[runs].sum() + sharers[few] * ways.dealt.seconds[few, start]
    late = ways.share * float(run_late[runs].sum() + rest_late[few, start])
    decoding = put_off(deadline, late)
    idle = decoding - busy / slices
    seconds = decoding + max(0.0, ways.inference - idle)
    return seconds, decoding, np.diff(ways.cuts[path]).tolist()


def _cheapest_paths(cost: np.ndarray, slices: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Find the cheapest runs up to each cut, by dynamic programming over the number of runs.

    cost [C, C] of a run from one cut to another. Returns [slices + 1, C] least costs by number of
    runs, and for each number of runs their cuts, [C, runs + 1].
    """
    cuts = np.arange(len(cost))
    least = [np.where(cuts > 0, np.inf, 0.0)]
    paths = [cuts[:, None]]
    for _ in range(slices):
        through = least[-1][:, None] + cost
        least.append(through.min(axis=0))
        paths.append(np.column_stack([paths[-1][through.argmin(axis=0)], cuts]))
    return np.array(least), paths
