"""Which samples are admitted where, which move, and which slices are given away: to end a stage soonest.

A slice is known by its survivors: how many of its rows are expected to live after so many tokens more. Its end follows,
as rows gain at the speed of their number. The longest samples rule the end of the stage, so these stand on light
slices and short ones on full ones (`packing.py`); afterwards single moves correct what turns out otherwise.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.reallocation import packing
from rlhf_jax.reallocation.survivors import Clock, clock_of

WAITS = -1
MOST_MOVES = 4  # a decision
MOST_STUCK = 4  # late slices that nothing helps, after which a decision looks no further
MOST_GATHERED = 8  # rows of a slice that is emptied to be given away
MOST_ROUNDS = 4  # of admissions, one sample a slice each
ROWS_TRIED, SLICES_TRIED = 8, 12  # of the late slice, and of those that might take one of them
WORTH = 8.0  # times what a move costs that it must gain
LEAST = 0.001  # of the end, that it must gain besides
NEAR = 0.95  # of the last end: earlier slices are left as they are


@dataclasses.dataclass(frozen=True)
class View:
    """What is known of the unfinished samples and of the slices; n samples, Q equally likely quantiles."""

    place: np.ndarray  # [n] int, slice of each sample, WAITS where it has none
    left: np.ndarray  # [n, Q] tokens to come, at least a little
    context: np.ndarray  # [n] tokens known, which a move carries
    rows: int  # row slots of a slice
    slices: int
    speed: np.ndarray  # [rows + 1] tokens a second of one row when so many of its slice are live; speed[0] is unused
    move_seconds: float  # that a move stops its two slices for ...
    token_seconds: float  # ... and more for each token of context
    freed: np.ndarray  # [slices] bool, given to inference already
    unscored: float = 0.0  # tokens of finished samples that wait for inference
    scoring: float = 0.0  # seconds of inference a token on one slice; 0 where the stages are not fused


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do now."""

    admissions: list[tuple[int, int]]  # (sample, slice)
    moves: list[tuple[int, int]]  # (sample, to slice)
    freed: np.ndarray  # [slices] bool, that from now on decode nothing


@dataclasses.dataclass
class _Draft:
    """A plan in the making: where samples are, and when slices end."""

    view: View
    clock: Clock
    steps: np.ndarray  # [n, Q] bin of the clock in which each quantile ends
    place: np.ndarray  # [n]
    live: np.ndarray  # [slices] rows
    held: np.ndarray  # [slices] rows for which there must be memory: those that leave still hold theirs
    survivors: np.ndarray  # [slices, B]
    ends: np.ndarray  # [slices] seconds

    def curve(self, samples: np.ndarray) -> np.ndarray:
        """[m, B] survivors of each of m samples alone."""
        return self.clock.curves(self.steps[samples])

    def put(self, samples: np.ndarray, there: int) -> None:
        """Let samples stand on a slice; all were on one other, or on none."""
        curve, here = self.curve(samples).sum(axis=0), int(self.place[samples[0]])
        for one, sign in ((here, -1), (there, 1)):
            if one != WAITS:
                self.survivors[one] += sign * curve
                self.live[one] += sign * len(samples)
                self.ends[one] = self.clock.seconds(self.survivors[one])
        self.held[there] += len(samples)
        self.place[samples] = there

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """[m] seconds for which a move of each stops two slices."""
        return self.view.move_seconds + self.view.context[samples] * self.view.token_seconds


_CHANGING = ("place", "live", "held", "survivors", "ends")


def decide(view: View) -> Plan:
    """The plan for a view; the same view gives the same plan."""
    if not len(view.place):
        return Plan([], [], view.freed | (view.scoring > 0))
    draft = _drafted(view)
    admissions = _admissions(draft)
    for there, samples in admissions:
        draft.put(samples, there)
    waits = bool((draft.place == WAITS).any())
    moves = _moves(draft)
    if view.scoring and not waits:
        moves += _gathered(draft, {sample for sample, _ in moves})
    admitted = [(sample, there) for there, samples in admissions for sample in samples.tolist()]
    given = view.freed | ((draft.live == 0) & (view.scoring > 0) & (not waits))
    return Plan(admitted, moves, given)


def _drafted(view: View) -> _Draft:
    clock = clock_of(view.left, view.speed)
    steps = clock.bins(view.left)
    on = view.place >= 0
    survivors = clock.survivors(steps[on], view.place[on], view.slices)
    live = np.bincount(view.place[on], minlength=view.slices)
    return _Draft(view, clock, steps, view.place.copy(), live, live.copy(), survivors, clock.seconds(survivors))


# ---- admissions


def _admissions(draft: _Draft) -> list[tuple[int, np.ndarray]]:
    """(slice, samples) to admit: the longest first, wherever they end in time."""
    view, waiting = draft.view, np.flatnonzero(draft.view.place == WAITS)
    open_slices = np.flatnonzero(~view.freed & (draft.live < view.rows))
    if not len(waiting) or not len(open_slices):
        return []
    mean = view.left[waiting].mean(axis=1)
    waiting = waiting[np.argsort(-mean, kind="stable")]
    if not draft.live.any():
        lists = packing.first(draft.clock, draft.steps[waiting], len(open_slices), _inference(view))
        firsts = [(there, waiting[own[: view.rows]]) for there, own in zip(open_slices.tolist(), lists, strict=True)]
        return [(there, samples) for there, samples in firsts if len(samples)]
    kept = draft.survivors[~view.freed]
    # Full slices will have room, too; the first to end are the likely ones.
    lightest = np.argsort(np.where(view.freed, np.inf, draft.ends), kind="stable")[: 2 * SLICES_TRIED]
    longest = draft.survivors[lightest] + draft.curve(waiting[:1])
    deadline = packing.deadline(draft.clock, kept, float(mean.sum()))
    return _refilled(draft, waiting, open_slices, packing.SLACK * max(deadline, draft.clock.seconds(longest).min()))


def _refilled(
    draft: _Draft, waiting: np.ndarray, open_slices: np.ndarray, deadline: float
) -> list[tuple[int, np.ndarray]]:
    """Each open slice, the first to end first, takes the longest of those waiting that let it end by the deadline."""
    view, found = draft.view, []
    room = view.rows - draft.live
    taken, survivors = np.zeros(len(waiting), bool), draft.survivors.copy()
    for _ in range(MOST_ROUNDS):
        order = open_slices[np.argsort(draft.clock.seconds(survivors[open_slices]), kind="stable")]
        firsts = _firsts(draft, survivors[order], waiting[~taken], deadline)
        queue = np.flatnonzero(~taken)
        admitted = _distinct(firsts, len(queue))
        for at, there in zip(admitted, order.tolist(), strict=True):
            if at is not None:
                taken[queue[at]] = True
                found.append((there, waiting[queue[at : at + 1]]))
                survivors[there] += draft.curve(waiting[queue[at : at + 1]])[0]
                room[there] -= 1
        open_slices = np.array([t for a, t in zip(admitted, order, strict=True) if a is not None and room[t] > 0], int)
        if not len(open_slices) or taken.all():
            break
    return found


def _distinct(firsts: np.ndarray, count: int) -> list[int | None]:
    """For each slice in turn the first place that is free from firsts [m] on; None where there is none."""
    free, found = np.ones(count + 1, bool), []
    for first in firsts.tolist():
        at = first + int(free[first:].argmax()) if first < count else count
        found.append(at if at < count and free[at] else None)
        free[at] = at == count
    return found


def _firsts(draft: _Draft, survivors: np.ndarray, waiting: np.ndarray, deadline: float) -> np.ndarray:
    """[m] place of the longest of those waiting that lets a slice with survivors [m, B] end in time; their number
    where none does."""
    low, high = np.zeros(len(survivors), int), np.full(len(survivors), len(waiting))
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(waiting) - 1)
        late = draft.clock.seconds(survivors + draft.curve(waiting[middle])) > deadline
        low, high = np.where(late & (low < high), middle + 1, low), np.where(late, high, np.minimum(middle, high))
    return low


# ---- moves


def _moves(draft: _Draft) -> list[tuple[int, int]]:
    """The moves that let the last slices end sooner, by clearly more than they cost; no sample moves twice."""
    moves, stuck, last = [], np.zeros(draft.view.slices, bool), draft.ends.max()
    fixed = draft.view.place == WAITS
    while len(moves) < MOST_MOVES and stuck.sum() < min(MOST_STUCK, len(stuck)):
        late = int(np.where(stuck, -np.inf, draft.ends).argmax())
        if draft.ends[late] < NEAR * last:
            break
        move = _move(draft, late, fixed)
        if move is None:
            stuck[late] = True
        else:
            draft.put(np.array([move[0]]), move[1])
            fixed[move[0]] = True
            moves.append(move)
    return moves


def _move(draft: _Draft, late: int, fixed: np.ndarray) -> tuple[int, int] | None:
    """The row of a late slice, and the slice to take it, after which both end soonest; None if nothing gains."""
    view = draft.view
    rows = np.flatnonzero((draft.place == late) & ~fixed)
    takers = np.flatnonzero(~view.freed & (draft.held < view.rows) & (np.arange(view.slices) != late))
    if not len(rows) or not len(takers) or draft.live[late] < 2:
        return None
    rows = rows[np.argsort(-view.left[rows].mean(axis=1), kind="stable")]
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS_TRIED).astype(int))]
    takers = takers[np.argsort(draft.ends[takers], kind="stable")[:SLICES_TRIED]]
    curves = draft.curve(rows)
    without = draft.clock.seconds(draft.survivors[late] - curves)
    joined = draft.clock.seconds(draft.survivors[takers][None] + curves[:, None])
    gain = draft.ends[late] - np.maximum(without[:, None], joined) - WORTH * draft.cost(rows)[:, None]
    row, taker = np.unravel_index(gain.argmax(), gain.shape)
    return (int(rows[row]), int(takers[taker])) if gain[row, taker] > LEAST * draft.ends[late] else None


# ---- slices given away


def _gathered(draft: _Draft, moved: set[int]) -> list[tuple[int, int]]:
    """The moves that empty the slice with least to do, if inference needs it and no slice ends later than the last.

    Idle slices do inference while others decode; what they cannot do by then delays the end of the stage.
    """
    view, last = draft.view, draft.ends.max()
    if _inference(view) <= (last - draft.ends).sum():
        return []
    work = np.where(draft.live > 0, draft.survivors.sum(axis=1), np.inf)
    rows = np.flatnonzero(draft.place == (here := int(work.argmin())))
    if len(rows) > MOST_GATHERED or np.count_nonzero(draft.live) < 2 or moved & set(rows.tolist()):
        return []
    trial = dataclasses.replace(draft, **{name: getattr(draft, name).copy() for name in _CHANGING})
    moves = []
    for row in rows[np.argsort(-view.left[rows].mean(axis=1), kind="stable")].tolist():
        there = _taker(trial, row, here, last)
        if there is None:
            return []
        trial.put(np.array([row]), there)
        moves.append((row, there))
    if draft.ends.sum() - trial.ends.sum() <= 2 * WORTH * draft.cost(rows).sum():
        return []
    for name in _CHANGING:
        setattr(draft, name, getattr(trial, name))
    return moves


def _inference(view: View) -> float:
    """Slice seconds of inference on all samples that have not had it."""
    return view.scoring * (view.unscored + float((view.context + view.left.mean(axis=1)).sum()))


def _taker(draft: _Draft, row: int, here: int, last: float) -> int | None:
    """The slice that a row delays least, of those that have rows and end in time with it; None without any."""
    view = draft.view
    open_slices = ~view.freed & (draft.held < view.rows) & (draft.live > 0)
    open_slices[here] = False
    joined = draft.clock.seconds(draft.survivors + draft.curve(np.array([row])))
    added = np.where(open_slices & (joined + draft.cost(np.array([row])) <= last), joined - draft.ends, np.inf)
    there = int(added.argmin())
    return there if np.isfinite(added[there]) else None
