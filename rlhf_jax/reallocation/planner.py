"""Which samples are admitted where, which move, and which slices are given away: to end a stage
soonest.

A slice is known by its survivors: how many of its rows are expected to live after so many tokens
more. Its end follows, as rows gain at the speed of their number. The longest samples rule the end
of the stage, so these stand on light slices and short ones on full ones (`packing.py`); afterwards
single moves correct what turns out otherwise. A move gains if fewer row seconds are then expected
after the time at which all but one row of the stage have ended: so what many rows may become counts
for as much as it is likely.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.reallocation import packing
from rlhf_jax.reallocation.drain_model import ROUNDING, DecodeRate, decode_rate_of
from rlhf_jax.reallocation.length_model import SHARES

WAITS = -1
MOST_MOVES = 4  # a decision
MOST_STUCK = 4  # late slices that nothing helps, after which a decision looks no further
MOST_GATHERED = 8  # rows of a slice that is emptied to be given away
MOST_ROUNDS = 4  # of admissions, one sample a slice each
# of the late slice, and of those that might take one of them
ROWS_TRIED = 16
SLICES_TRIED = 12
WORTH = 4.0  # times what a move costs that it must gain
LEAST = 0.2  # of what is late on its two slices, that it must gain besides


@dataclasses.dataclass(frozen=True)
class ClusterView:
    """What is known of the unfinished samples and of the slices; n samples, Q outcomes of
    `lengths.SHARES`.
    """

    place: np.ndarray  # [n] int, slice of each sample, WAITS where it has none
    left: np.ndarray  # [n, Q] tokens to come, at least a little
    context: np.ndarray  # [n] tokens known, which a move carries
    rows: int  # row slots of a slice
    slices: int
    # [rows + 1] tokens a second of one row when so many of its slice are live; speed[0] is unused
    speed: np.ndarray
    move_seconds: float  # that a move stops its two slices for ...
    token_seconds: float  # ... and more for each token of context
    freed: np.ndarray  # [slices] bool, given to inference already, once their rows have ended
    unscored: float = 0.0  # tokens of finished samples that wait for inference
    # seconds of inference a token on one slice; 0 where the stages are not fused
    scoring: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reallocation:
    """What to do now."""

    admissions: list[tuple[int, int]]  # (sample, slice)
    moves: list[tuple[int, int]]  # (sample, to slice)
    freed: np.ndarray  # [slices] bool, that from now on decode nothing but what they have


@dataclasses.dataclass
class _Draft:
    """A plan in the making: where samples are, and when slices end."""

    view: ClusterView
    clock: DecodeRate
    steps: np.ndarray  # [n, Q] bin of the clock in which each outcome ends
    place: np.ndarray  # [n]
    live: np.ndarray  # [slices] rows
    # [slices] rows for which there must be memory: those that leave still hold theirs
    held: np.ndarray
    drain_model: np.ndarray  # [slices, B]
    fixed: np.ndarray  # [n] bool, not to move: what waited, or has moved
    deadline: float = dataclasses.field(init=False)  # these by `admit`, which comes first
    ends: np.ndarray = dataclasses.field(init=False)  # [slices] seconds
    # [slices] row seconds expected after the deadline
    late: np.ndarray = dataclasses.field(init=False)

    def curve(self, samples: np.ndarray) -> np.ndarray:
        """[m, B] survivors of each of m samples alone."""
        return self.clock.curves(self.steps[samples])

    def admit(self, samples: np.ndarray, there: np.ndarray) -> None:
        """Let samples [m] that wait stand on slices [m]."""
        self.place[samples] = there
        slices, which, joined = np.unique(there, return_inverse=True, return_counts=True)
        self.live[slices] += joined
        self.held[slices] += joined
        self.drain_model[slices] += self.clock.drain_model(self.steps[samples], which, len(slices))
        drain = self.clock.drain(self.drain_model)
        self.deadline = drain.deadline()
        self.ends = drain.seconds
        self.late = drain.late(self.deadline)

    def move(self, sample: int, there: int) -> None:
        """Let a sample stand on another slice; the deadline stays."""
        curve = self.curve(np.array([sample]))
        pair = np.array([self.place[sample], there])
        self.drain_model[pair] += curve * [[-1], [1]]
        self.live[pair] += [-1, 1]
        self.held[there] += 1
        self.place[sample] = there
        self.fixed[sample] = True
        drain = self.clock.drain(self.drain_model[pair])
        self.ends[pair], self.late[pair] = drain.seconds, drain.late(self.deadline)

    def longest_first(self, samples: np.ndarray) -> np.ndarray:
        """[m] the samples in order of their expected tokens."""
        return samples[np.argsort(-(self.view.left[samples] @ SHARES), kind="stable")]

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """[m] seconds for which a move of each stops two slices."""
        return self.view.move_seconds + self.view.context[samples] * self.view.token_seconds


def plan_reallocation(view: ClusterView) -> Reallocation:
    """The plan for a view; the same view gives the same plan."""
    if not len(view.place):
        return Reallocation([], [], view.freed | (view.scoring > 0))
    draft = _drafted(view)
    samples, there, given = _admissions(draft)
    draft.admit(samples, there)
    waits = bool((draft.place == WAITS).any())
    moves = _moves(draft)
    gathered = []
    empty = draft.live == 0
    if not waits:
        gathered = _gathered(draft)
        empty[[view.place[sample] for sample, _ in gathered]] = True
    begins = not (view.place >= 0).any()  # then a slice without samples is to have none
    given |= view.freed | (empty & (view.scoring > 0) & (begins or not waits))
    return Reallocation(
        list(zip(samples.tolist(), there.tolist(), strict=True)), moves + gathered, given
    )


def _drafted(view: ClusterView) -> _Draft:
    clock = decode_rate_of(view.left, view.speed)
    steps = clock.bins(view.left)
    drain_model = clock.drain_model(steps, view.place, view.slices)
    live = np.bincount(view.place + 1, minlength=view.slices + 1)[1:]
    return _Draft(
        view, clock, steps, view.place.copy(), live, live.copy(), drain_model, view.place == WAITS
    )


# ---- admissions


def _admissions(draft: _Draft) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(samples, slices) to admit, the longest first, wherever they end in time; [slices] that are
    to have no more.
    """
    view = draft.view
    given = np.zeros(draft.view.slices, bool)
    waiting = np.flatnonzero(view.place == WAITS)
    open_slices = np.flatnonzero(~view.freed & (draft.live < view.rows))
    if not len(waiting) or not len(open_slices):
        return np.zeros(0, int), np.zeros(0, int), given
    waiting = draft.longest_first(waiting)
    if not draft.live.any():
        lists, spared = packing.first(
            draft.clock, draft.steps[waiting], len(open_slices), _inference(view)
        )
        lists = [own[: view.rows] for own in lists]
        given[open_slices[len(open_slices) - spared :]] = True
        return (
            waiting[np.concatenate(lists)],
            open_slices.repeat([len(own) for own in lists]),
            given,
        )
    return *_refilled(draft, waiting, open_slices, packing.SLACK * _deadline(draft, waiting)), given


def _deadline(draft: _Draft, waiting: np.ndarray) -> float:
    """Seconds by which all that waits, the longest first, could be done: the sum of it, and its
    longest.
    """
    drain_model = draft.drain_model[~draft.view.freed]
    tokens = float((draft.view.left[waiting] @ SHARES).sum())
    # Full slices will have room, too; those with least to do are the likely ones.
    lightest = np.argsort(drain_model.sum(axis=1), kind="stable")[: 2 * SLICES_TRIED]
    alone = draft.clock.drain(drain_model[lightest] + draft.curve(waiting[:1])).seconds.min()
    return max(packing.deadline(draft.clock, drain_model, tokens), float(alone))


def _refilled(
    draft: _Draft, waiting: np.ndarray, open_slices: np.ndarray, deadline: float
) -> tuple[np.ndarray, np.ndarray]:
    """Each open slice, the first to end first, takes the longest of those waiting that let it end
    by the deadline.
    """
    room = draft.view.rows - draft.live
    drain_model = draft.drain_model.copy()
    there = np.full(len(waiting), WAITS)
    for _ in range(MOST_ROUNDS):
        order = open_slices[
            np.argsort(draft.clock.drain(drain_model[open_slices]).seconds, kind="stable")
        ]
        queue = np.flatnonzero(there == WAITS)
        found = _distinct(_firsts(draft, drain_model[order], waiting[queue], deadline), len(queue))
        taking = order[found < len(queue)]
        taken = queue[found[found < len(queue)]]
        there[taken] = taking
        drain_model[taking] += draft.curve(waiting[taken])
        room[taking] -= 1
        open_slices = taking[room[taking] > 0]
        if not len(open_slices) or (there != WAITS).all():
            break
    return waiting[there != WAITS], there[there != WAITS]


def _distinct(firsts: np.ndarray, count: int) -> np.ndarray:
    """[m] for each slice in turn the first place that is free from firsts [m] on; count where there
    is none.
    """
    free = np.ones(count + 1, bool)
    found = []
    for first in firsts.tolist():
        found.append(first + int(free[first:].argmax()))
        free[found[-1]] = found[-1] == count
    return np.array(found)


def _firsts(
    draft: _Draft, drain_model: np.ndarray, waiting: np.ndarray, deadline: float
) -> np.ndarray:
    """[m] place of the longest of those waiting that lets a slice with survivors [m, B] end in
    time; their number where none does.
    """
    low = np.zeros(len(drain_model), int)
    high = np.full(len(drain_model), len(waiting))
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(waiting) - 1)
        late = draft.clock.drain(drain_model + draft.curve(waiting[middle])).seconds > deadline
        low = np.where(late & (low < high), middle + 1, low)
        high = np.where(late, high, np.minimum(middle, high))
    return low


# ---- moves


def _moves(draft: _Draft) -> list[tuple[int, int]]:
    """The moves that let least be late, by clearly more than they cost; no sample moves twice."""
    moves = []
    stuck = np.zeros(draft.view.slices, bool)
    while len(moves) < MOST_MOVES and stuck.sum() < min(MOST_STUCK, len(stuck)):
        late = int(np.where(stuck, -np.inf, draft.late).argmax())
        move = _move(draft, late)
        if move is None:
            stuck[late] = True
        else:
            draft.move(*move)
            moves.append(move)
    return moves


def _move(draft: _Draft, late: int) -> tuple[int, int] | None:
    """The row of a late slice, and the slice to take it, after which both are least late; None if
    nothing gains.
    """
    view = draft.view
    rows = np.flatnonzero((draft.place == late) & ~draft.fixed)
    takers = np.flatnonzero(
        ~view.freed & (draft.held < view.rows) & (np.arange(view.slices) != late)
    )
    if not len(rows) or not len(takers) or draft.live[late] < 2:
        return None
    rows = draft.longest_first(rows)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS_TRIED).astype(int))]
    takers = takers[np.lexsort((draft.ends[takers], draft.late[takers]))[:SLICES_TRIED]]
    # as late as the deadline sooner
    curves = draft.curve(rows)
    deadline = draft.deadline - WORTH * draft.cost(rows)
    without = draft.clock.drain(draft.drain_model[late] - curves).late(deadline)
    joined = draft.clock.drain(draft.drain_model[takers][None] + curves[:, None]).late(
        deadline[:, None]
    )
    before = draft.late[late] + draft.late[takers]
    gain = before - without[:, None] - joined - LEAST * before
    row, taker = np.unravel_index(gain.argmax(), gain.shape)
    return (int(rows[row]), int(takers[taker])) if gain[row, taker] > 0 else None


# ---- slices given away


def _gathered(draft: _Draft) -> list[tuple[int, int]]:
    """The moves that empty the slice with least to do, if inference gains more by it than other
    rows are late.

    Idle slices do inference while others decode; what they cannot do by then delays the end of the
    stage. Where nothing waits for them they only spare the slots of rows that pad a batch, and for
    that no row is to be slower. The draft is left with these moves, whether they gain or not.
    """
    view = draft.view
    ends = draft.ends.sum()
    late = draft.late.sum()
    work = np.where(draft.live > 0, draft.drain_model.sum(axis=1), np.inf)
    rows = np.flatnonzero(draft.place == work.argmin())
    takers = _takers(draft, int(work.argmin()))
    if len(rows) > MOST_GATHERED or draft.fixed[rows].any():
        return []
    wanted = _inference(view) > (draft.ends.max() - draft.ends).sum()
    moves = []
    for row in draft.longest_first(rows).tolist():
        there = _taker(draft, row, takers, wanted)
        if there is None:
            return []
        draft.move(row, there)
        moves.append((row, there))
    tokens = float(view.left[rows].max())  # a bin may be more than all that they have to come
    spared = min(ends - draft.ends.sum(), tokens / draft.clock.width * draft.clock.paces[len(rows)])
    spared -= 2 * WORTH * draft.cost(rows).sum()
    return moves if spared > max(0.0, view.slices * (draft.late.sum() - late)) else []


def _inference(view: ClusterView) -> float:
    """Slice seconds of inference on all samples that have not had it."""
    return view.scoring * (view.unscored + float((view.context + view.left @ SHARES).sum()))


def _takers(draft: _Draft, here: int) -> np.ndarray:
    """[m] slices that may take the rows of another: a few of those with rows and room, from the
    first to end on.
    """
    may = ~draft.view.freed & (draft.live > 0) & (draft.held < draft.view.rows)
    may[here] = False
    found = np.flatnonzero(may)
    found = found[np.argsort(draft.ends[found], kind="stable")]
    return (
        found[np.unique(np.linspace(0, len(found) - 1, 2 * SLICES_TRIED).astype(int))]
        if len(found)
        else found
    )


def _taker(draft: _Draft, row: int, takers: np.ndarray, wanted: bool) -> int | None:
    """The slice of some whose rows that one delays least, the first to end of those alike; None
    without room.

    Where the slice that it leaves is not `wanted` for anything else, none that is slower for it, or
    slows it.
    """
    view = draft.view
    samples = np.array([row])
    takers = takers[draft.held[takers] < draft.view.rows]
    curve = draft.curve(samples)
    here = int(draft.place[row])
    joined = draft.clock.drain(draft.drain_model[takers] + curve)
    late = joined.late(draft.deadline - draft.cost(samples)) - draft.late[takers]
    added = joined.seconds - draft.ends[takers] + view.slices * late
    if not wanted:
        added = np.where(_slowed(draft, curve, here, takers, joined.pace), np.inf, added)
    return int(takers[added.argmin()]) if np.isfinite(added).any() else None


def _slowed(
    draft: _Draft, curve: np.ndarray, here: int, takers: np.ndarray, pace: np.ndarray
) -> np.ndarray:
    """[m] whether a row of `curve` [1, B] is slower on a slice than here, or slows it: at pace [m,
    B] with the row.
    """
    there = draft.drain_model[takers]
    own = np.where(curve > ROUNDING, draft.clock.pace(draft.drain_model[here]), np.inf)
    theirs = np.where(there > ROUNDING, draft.clock.pace(there), np.inf)
    return np.any(pace > np.minimum(own, theirs) * (1 + ROUNDING), axis=1)
