"""Plan which samples are admitted where, which move, and which slices are given to inference.

The aim is the earliest end of the stage. A slice is described by its expected live rows by tokens
to come. Its end follows from the speed of rows by their number. The longest samples determine the
end of the stage, so they go to light slices and short ones to full ones (`packing`); later, single
moves correct deviations. The end of a stage is a smooth maximum over the outcomes of its rows
(`DrainForecast.deadline`), and a move gains if it makes that earlier.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.generation.reallocation import packing
from rlhf_jax.generation.reallocation.drain_model import (
    ROUNDING,
    DecodeRate,
    DrainForecast,
    decode_rate_of,
)
from rlhf_jax.generation.reallocation.length_model import SHARES

WAITS = -1  # The slice of a sample without one.

# Limits of a decision, and the least gain of a move.

# Moves of a decision; by hand, checked by benchmarks/makespan.py: free moves would gain at most 0.8
# % more.
_MOST_MOVES = 4
# Late slices without a useful move, after which a decision stops; by hand.
_MOST_STUCK = 4
# Most rows of a slice that is emptied to be given away; by hand.
_MOST_GATHERED = 8
# Rounds of admissions of a decision, one sample per slice each; by hand.
_ADMISSION_ROUNDS = 4
# Rows of the late slice that are tried; by hand, limits the time.
_ROWS_TRIED = 16
# Slices that are tried for such a row; by hand, likewise.
_SLICES_TRIED = 12
# Least gain of a move, as a multiple of the seconds that it stops its slices; by hand.
_MOVE_PRICE = 2.0
# Least additional gain, as a share of the delay on its two slices; by hand, checked by
# benchmarks/makespan.py.
_LEAST_GAIN = 0.15
# Deadline of admissions over the soonest possible, for waiting samples; by hand.
_SLACK = 1.03


@dataclasses.dataclass(frozen=True)
class ClusterView:
    """Hold the state of n unfinished samples and of the slices.

    Tokens to come are given in the Q outcomes of `length_model.SHARES`.
    """

    place: np.ndarray  # [n] int, slice of each sample, WAITS if it has none
    left: np.ndarray  # [n, Q] tokens to come, above 0
    context: np.ndarray  # [n] tokens known, which a move carries
    rows: int  # row slots of a slice
    slices: int
    # [rows + 1] tokens per second of one row by live rows of its slice; speed[0] is unused
    speed: np.ndarray
    move_seconds: float  # fixed seconds that a move stops its two slices
    token_seconds: float  # additional seconds per token of context
    freed: np.ndarray  # [slices] bool, already given to inference, once their rows have ended
    unscored: float = 0.0  # tokens of finished samples that wait for inference
    # inference seconds per token on one slice; 0 if the stages are not fused
    scoring: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reallocation:
    """Hold the actions to take now."""

    admissions: list[tuple[int, int]]  # (sample, slice)
    moves: list[tuple[int, int]]  # (sample, to slice)
    freed: np.ndarray  # [slices] bool, that get no further samples from now on


@dataclasses.dataclass
class _Draft:
    """Hold a reallocation in progress: the places of samples and the ends of slices."""

    view: ClusterView
    decode_rate: DecodeRate
    steps: np.ndarray  # [n, Q] bin in which each outcome ends
    place: np.ndarray  # [n]
    live: np.ndarray  # [slices] rows
    # [slices] rows that need memory: those that leave still hold theirs
    held: np.ndarray
    expected_live: np.ndarray  # [slices, B] rows expected to live in each bin
    fixed: np.ndarray  # [n] bool, not to move: samples that waited or have moved
    deadline: float = dataclasses.field(init=False)  # these two are set by `admit`, which is first
    ends: np.ndarray = dataclasses.field(init=False)  # [slices] seconds
    # [slices] seconds by which the rows of each delay the deadline
    late: np.ndarray = dataclasses.field(init=False)

    def curve(self, samples: np.ndarray) -> np.ndarray:
        """Return [m, B] chances that each of m samples lives in each bin."""
        return self.decode_rate.curves(self.steps[samples])

    def drain(self, expected_live: np.ndarray) -> DrainForecast:
        """Return the forecast of slices with expected rows [..., B]."""
        return self.decode_rate.drain(expected_live)

    def admit(self, samples: np.ndarray, there: np.ndarray) -> None:
        """Put waiting samples [m] on slices [m]."""
        self.place[samples] = there
        slices, which, joined = np.unique(there, return_inverse=True, return_counts=True)
        self.live[slices] += joined
        self.held[slices] += joined
        steps = self.steps[samples]
        self.expected_live[slices] += self.decode_rate.expected_live(steps, which, len(slices))
        drain = self.drain(self.expected_live)
        self.deadline = drain.deadline()
        self.ends = drain.seconds
        self.late = drain.late(self.deadline)

    def move(self, sample: int, there: int) -> None:
        """Put a sample on another slice; the deadline stays."""
        curve = self.curve(np.array([sample]))
        pair = np.array([self.place[sample], there])
        self.expected_live[pair] += curve * [[-1], [1]]
        self.live[pair] += [-1, 1]
        self.held[there] += 1
        self.place[sample] = there
        self.fixed[sample] = True
        drain = self.drain(self.expected_live[pair])
        self.ends[pair] = drain.seconds
        self.late[pair] = drain.late(self.deadline)

    def longest_first(self, samples: np.ndarray) -> np.ndarray:
        """Return the samples [m] in order of their expected tokens."""
        return samples[np.argsort(-(self.view.left[samples] @ SHARES), kind="stable")]

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """Return [m] seconds for which a move of each stops two slices."""
        return self.view.move_seconds + self.view.context[samples] * self.view.token_seconds

    def inference(self) -> float:
        """Return the slice seconds of inference on all samples that have not had it."""
        view = self.view
        tokens = view.unscored + float((view.context + view.left @ SHARES).sum())
        return view.scoring * tokens


def plan_reallocation(view: ClusterView) -> Reallocation:
    """Plan for a view; the same view gives the same plan."""
    if not len(view.place):
        return Reallocation([], [], view.freed | (view.scoring > 0))
    decode_rate = decode_rate_of(view.left, view.speed)
    steps = decode_rate.bins(view.left)
    live = np.bincount(view.place + 1, minlength=view.slices + 1)[1:]
    draft = _Draft(
        view,
        decode_rate,
        steps,
        place=view.place.copy(),
        live=live,
        held=live.copy(),
        expected_live=decode_rate.expected_live(steps, view.place, view.slices),
        fixed=view.place == WAITS,
    )
    samples, there, given = _admissions(draft)
    draft.admit(samples, there)

    waits = bool((draft.place == WAITS).any())
    moves = _moves(draft)
    gathered = []
    empty = draft.live == 0
    if not waits:
        gathered = _gather(draft)
        empty[[view.place[sample] for sample, _ in gathered]] = True
    # A slice without samples at the beginning stays without.
    begins = not (view.place >= 0).any()
    given |= view.freed | (empty & (view.scoring > 0) & (begins or not waits))
    admissions = list(zip(samples.tolist(), there.tolist(), strict=True))
    return Reallocation(admissions, moves + gathered, given)


# Admissions.


def _admissions(draft: _Draft) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose (samples, slices) to admit, the longest first, wherever they end in time.

    The third array, [slices] bool, marks slices that get no further samples.
    """
    view = draft.view
    given = np.zeros(view.slices, bool)
    waiting = np.flatnonzero(view.place == WAITS)
    open_slices = np.flatnonzero(~view.freed & (draft.live < view.rows))
    if not len(waiting) or not len(open_slices):
        return np.zeros(0, int), np.zeros(0, int), given
    waiting = draft.longest_first(waiting)

    if not draft.live.any():
        lists, spared = packing.place_first(
            draft.decode_rate, draft.steps[waiting], len(open_slices), inference=draft.inference()
        )
        lists = [own[: view.rows] for own in lists]
        given[open_slices[len(open_slices) - spared :]] = True
        samples = waiting[np.concatenate(lists)]
        return samples, open_slices.repeat([len(own) for own in lists]), given

    # The seconds to finish all waiting samples: their sum, and the longest. Full slices will have
    # room, too; those with least to do are the likely ones.
    expected_live = draft.expected_live[~view.freed]
    tokens = float((view.left[waiting] @ SHARES).sum())
    lightest = np.argsort(expected_live.sum(axis=1), kind="stable")
    lightest = lightest[: 2 * _SLICES_TRIED]
    alone = draft.drain(expected_live[lightest] + draft.curve(waiting[:1])).seconds.min()
    together = packing.deadline(draft.decode_rate, expected_live, tokens)
    deadline = _SLACK * max(together, float(alone))
    return *_refill(draft, waiting, open_slices, deadline=deadline), given


def _refill(
    draft: _Draft, waiting: np.ndarray, open_slices: np.ndarray, deadline: float
) -> tuple[np.ndarray, np.ndarray]:
    """Give each open slice the longest waiting sample that lets it end by the deadline.

    The first slice to end chooses first, while there are samples, for a few rounds. Returns samples
    and their slices.
    """
    room = draft.view.rows - draft.live
    expected_live = draft.expected_live.copy()
    there = np.full(len(waiting), WAITS)
    for _ in range(_ADMISSION_ROUNDS):
        ends = draft.drain(expected_live[open_slices]).seconds
        order = open_slices[np.argsort(ends, kind="stable")]
        queue = np.flatnonzero(there == WAITS)
        firsts = _find_firsts(draft, expected_live[order], waiting[queue], deadline=deadline)

        # Each slice in turn takes the first sample from there on that no other took.
        free = np.ones(len(queue) + 1, bool)
        places = []
        for first in firsts.tolist():
            places.append(first + int(free[first:].argmax()))
            free[places[-1]] = places[-1] == len(queue)

        taken_by = np.array(places)
        taking = order[taken_by < len(queue)]
        taken = queue[taken_by[taken_by < len(queue)]]
        there[taken] = taking
        expected_live[taking] += draft.curve(waiting[taken])
        room[taking] -= 1
        open_slices = taking[room[taking] > 0]
        if not len(open_slices) or (there != WAITS).all():
            break
    return waiting[there != WAITS], there[there != WAITS]


def _find_firsts(
    draft: _Draft, expected_live: np.ndarray, waiting: np.ndarray, deadline: float
) -> np.ndarray:
    """Find by bisection the longest waiting sample that lets each slice end in time.

    expected_live [m, B]: rows of the slices. Returns [m] positions in `waiting`, its length if no
    sample does.
    """
    low = np.zeros(len(expected_live), int)
    high = np.full(len(expected_live), len(waiting))
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(waiting) - 1)
        late = draft.drain(expected_live + draft.curve(waiting[middle])).seconds > deadline
        low = np.where(late & (low < high), middle + 1, low)
        high = np.where(late, high, np.minimum(middle, high))
    return low


# Moves.


def _moves(draft: _Draft) -> list[tuple[int, int]]:
    """Make the moves that reduce the delay most, by clearly more than they cost.

    No sample moves twice. Returns (sample, to slice) of each.
    """
    moves = []
    stuck = np.zeros(draft.view.slices, bool)
    most_stuck = min(_MOST_STUCK, len(stuck))
    while len(moves) < _MOST_MOVES and stuck.sum() < most_stuck:
        late = int(np.where(stuck, -np.inf, draft.late).argmax())
        move = _best_move(draft, late)
        if move is None:
            stuck[late] = True
        else:
            draft.move(*move)
            moves.append(move)
    return moves


def _best_move(draft: _Draft, late: int) -> tuple[int, int] | None:
    """Return the row of a late slice, and the slice to take it, that minimise the delay of both.

    Returns None if nothing gains.
    """
    view = draft.view
    rows = np.flatnonzero((draft.place == late) & ~draft.fixed)
    has_room = ~view.freed & (draft.held < view.rows)
    takers = np.flatnonzero(has_room & (np.arange(view.slices) != late))
    if not len(rows) or not len(takers) or draft.live[late] < 2:
        return None
    rows = _pick_evenly(draft.longest_first(rows), _ROWS_TRIED)
    takers = takers[np.lexsort((draft.ends[takers], draft.late[takers]))[:_SLICES_TRIED]]

    # The cost of a move counts as an earlier deadline.
    curves = draft.curve(rows)
    deadline = draft.deadline - _MOVE_PRICE * draft.cost(rows)
    without = draft.drain(draft.expected_live[late] - curves).late(deadline)
    together = draft.drain(draft.expected_live[takers][None] + curves[:, None])
    joined = together.late(deadline[:, None])
    before = draft.late[late] + draft.late[takers]
    gain = before - without[:, None] - joined - _LEAST_GAIN * before
    row, taker = np.unravel_index(gain.argmax(), gain.shape)
    return (int(rows[row]), int(takers[taker])) if gain[row, taker] > 0 else None


def _pick_evenly(places: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of some places, evenly spaced, with the first and the last."""
    return places[np.unique(np.linspace(0, len(places) - 1, count).astype(int))]


# Slices that are given away.


def _gather(draft: _Draft) -> list[tuple[int, int]]:
    """Empty the slice with least to do, if that gains more than it delays.

    Idle slices do inference while others decode; the remainder delays the end of the stage. If
    nothing waits for them, they only save the slots of rows that pad a batch, which must not slow
    down any row. The draft keeps these moves, whether they gain or not.
    """
    view = draft.view
    ends = draft.ends.sum()
    late = draft.late.sum()
    work = np.where(draft.live > 0, draft.expected_live.sum(axis=1), np.inf)
    here = int(work.argmin())
    rows = np.flatnonzero(draft.place == here)
    if len(rows) > _MOST_GATHERED or draft.fixed[rows].any():
        return []

    # A few of the slices with rows and room, the earliest to end first.
    may = ~view.freed & (draft.live > 0) & (draft.held < view.rows)
    may[here] = False
    takers = np.flatnonzero(may)
    if len(takers):
        takers = takers[np.argsort(draft.ends[takers], kind="stable")]
        takers = _pick_evenly(takers, 2 * _SLICES_TRIED)

    wanted = draft.inference() > (draft.ends.max() - draft.ends).sum()
    moves = []
    for row in draft.longest_first(rows).tolist():
        there = _find_taker(draft, row, takers, wanted=wanted)
        if there is None:
            return []
        draft.move(row, there)
        moves.append((row, there))

    # A bin may exceed the remaining tokens of the rows.
    tokens = float(view.left[rows].max())
    pace = draft.decode_rate.paces[len(rows)]
    spared = min(ends - draft.ends.sum(), tokens / draft.decode_rate.width * pace)
    spared -= 2 * _MOVE_PRICE * draft.cost(rows).sum()
    return moves if spared > max(0.0, view.slices * (draft.late.sum() - late)) else []


def _find_taker(draft: _Draft, row: int, takers: np.ndarray, wanted: bool) -> int | None:
    """Return the slice whose rows a given row delays least; of equals the first to end.

    wanted: whether inference needs the slice that the row leaves. If not, no slice takes a row that
    becomes slower by it or that slows others. Returns None without room.
    """
    samples = np.array([row])
    takers = takers[draft.held[takers] < draft.view.rows]
    curve = draft.curve(samples)
    before = draft.expected_live[takers]
    joined = draft.drain(before + curve)
    late = joined.late(draft.deadline - draft.cost(samples)) - draft.late[takers]
    added = joined.seconds - draft.ends[takers] + draft.view.slices * late
    if not wanted:
        pace = draft.decode_rate.pace
        here = draft.expected_live[int(draft.place[row])]
        own = np.where(curve > ROUNDING, pace(here), np.inf)
        theirs = np.where(before > ROUNDING, pace(before), np.inf)
        slowed = np.any(joined.pace > np.minimum(own, theirs) * (1 + ROUNDING), axis=1)
        added = np.where(slowed, np.inf, added)
    return int(takers[added.argmin()]) if np.isfinite(added).any() else None
