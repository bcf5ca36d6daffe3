"""Assign samples to slices and move running ones, by the reallocation policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_jax.generation import precompile
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.reallocation import forecasts, length_model, row_transfer
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts, References
from rlhf_jax.generation.reallocation.planner import WAITS, ClusterView, Reallocation
from rlhf_jax.generation.reallocation.row_transfer import RowPacket
from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.generation.rounds import GenerationRun
from rlhf_jax.generation.scheduler import InFlightRound, SliceBatch, resize, row_bucket
from rlhf_jax.generation.strategy.acceptance import bands_ahead
from rlhf_jax.mesh import Layout
from rlhf_jax.runtime import messages

# Approximate bandwidth of a move in bytes per second (a CPU's by benchmarks/moves.py).
LINK_SPEED = {"cpu": 1e9, "gpu": 5e10, "tpu": 5e10}
# Fixed seconds per move.
MOVE_SECONDS = 2e-3
# Rounds of all slices after which samples are reassigned if none has ended before.
REASSIGNED_EVERY = 32

Unfinished = list[tuple[int, int, int]]  # (sample id, its slice, tokens so far)


@dataclasses.dataclass(frozen=True)
class AssignmentPolicy:
    """Hold the policy that assigns samples to slices in one stage."""

    # None: each slice gets its share at once, and keeps it
    plan_reallocation: Callable[[ClusterView], Reallocation] | None = None
    # the model of response lengths
    lengths: LengthForecasts = dataclasses.field(default_factory=LengthForecasts)
    # slices are served in turn, not as they become ready: then a run is reproducible
    in_turn: bool = False
    # of the stage, if processes assign together or share a slice: unique until `forget`
    name: str = ""
    # inference seconds per token on a slice that is done decoding; 0 if there is none to do
    scoring: float = 0.0
    unscored: Callable[[], float] = lambda: 0.0  # tokens of finished samples that wait for it


STATIC = AssignmentPolicy()


@dataclasses.dataclass
class AssignmentState:
    """Hold which slice decodes which sample in one call of `generate`."""

    own_slices: dict[int, SliceBatch]  # this process's slices, by their number
    layouts: list[Layout]  # of all slices
    samples: dict[int, Sample]  # all of them, by id
    unassigned: list[int]  # ids of samples without a slice
    policy: AssignmentPolicy
    run: GenerationRun
    # [requests, bins + 1] chances that a response is longer than each of `length_model.EDGES`
    survival: np.ndarray
    survival_of: dict[int, int]  # index of a request in it, by request id
    running: dict[int, int]  # tokens of each running sample at the last reassignment
    ended: dict[int, list[int]]  # lengths of responses that have ended, by request id
    rounds_received: int = 0  # since samples were reassigned last
    samples_ended: int = 0  # since then
    freed: tuple[int, ...] = ()  # slices that get no further samples

    @property
    def due(self) -> bool:
        """Return whether to reassign: after some rounds, or if nothing else can happen."""
        if self.policy.plan_reallocation is None:
            return False
        in_flight = any(batch.in_flight for batch in self.own_slices.values())
        rounds = len(self.layouts)
        if not self.samples_ended:
            rounds = max(REASSIGNED_EVERY, rounds)
        return self.rounds_received >= rounds or not in_flight


@messages.register
@dataclasses.dataclass(frozen=True)
class Assignments:
    """Hold changes by sample ids: samples that begin, running ones that move."""

    admissions: list[tuple[int, int]]  # (sample, slice)
    moves: list[tuple[int, int, int]]  # (sample, from slice, to slice)
    freed: list[int]  # slices that get no further samples
    over: bool = False  # nothing is left to do


def begin_assignment(
    slices: Sequence[SliceBatch],
    layouts: list[Layout],
    requests: Sequence[Request],
    policy: AssignmentPolicy,
    run: GenerationRun,
) -> AssignmentState:
    """Assign a prompt's samples together, to the slices in turn; none if a policy assigns them.

    layouts: of all slices, those of other processes included.
    """
    reallocates = policy.plan_reallocation is not None
    samples = {}
    for turn, request in enumerate(requests):
        begun = [Sample(number, request, list(request.history)) for number in request.sample_ids]
        samples |= {sample.sample_id: sample for sample in begun}
        if not reallocates:
            slices[turn % len(slices)].queue.extend(begun)

    movable = [request for request in requests if reallocates and request.sample_ids]
    common = length_model.survival(policy.lengths.lengths)
    state = AssignmentState(
        own_slices={batch.number: batch for batch in slices},
        layouts=layouts,
        samples=samples,
        unassigned=list(samples) if reallocates else [],
        policy=policy,
        run=run,
        survival=np.tile(common, (len(movable), 1)),
        survival_of={request.id: place for place, request in enumerate(movable)},
        running={},
        ended={request.id: [] for request in movable},
    )
    _forecast(state, [request for request in movable if request.history])
    return state


def _forecast(state: AssignmentState, requests: Sequence[Request]) -> None:
    """Update the forecasts of lengths, from the narrower of the prompts' sources."""
    known = state.policy.lengths
    by_source: dict[str, list[tuple[int, References]]] = {}
    for request in requests:
        sources = []
        limit = request.max_new_tokens
        if request.history:
            lengths = np.array([len(text) for text in request.history])
            sources.append(forecasts.earlier_references([lengths], [limit]))
        if ended := state.ended[request.id]:
            size = len(request.sample_ids)
            sources.append(forecasts.sibling_references([np.array(ended)], [size], [limit]))
        chosen = forecasts.narrowest(known, sources)
        if chosen is not None:
            own = state.survival_of[request.id], chosen
            by_source.setdefault(chosen.source, []).append(own)
    for chosen in by_source.values():
        places, references = zip(*chosen, strict=True)
        state.survival[list(places)] = forecasts.survival(known, forecasts.joined(references))


def _follow(state: AssignmentState, running: Unfinished) -> None:
    """Record samples that ended since the last call, for the forecasts of their siblings.

    For a sample on another process, its last reported length is used.
    """
    now = {sample_id: tokens for sample_id, _, tokens in running}
    ended = [sample_id for sample_id in state.running if sample_id not in now]
    for sample_id in ended:
        sample = state.samples[sample_id]
        tokens = len(sample.tokens) if sample.done else state.running[sample_id]
        state.ended[sample.request.id].append(max(1, tokens))
    state.running = now
    changed = {state.samples[one].request.id: state.samples[one].request for one in ended}
    _forecast(state, list(changed.values()))


def unfinished(state: AssignmentState) -> Unfinished:
    """List the unfinished samples of this process's slices, with their tokens so far."""
    return [
        (sample.sample_id, number, len(sample.tokens))
        for number, batch in state.own_slices.items()
        for sample in batch.samples
        if not sample.done
    ]


def reassign(state: AssignmentState, running: Unfinished) -> Assignments:
    """Run the policy on the unfinished samples of all slices and on the unassigned ones.

    This restarts the count of rounds until it is `due`.
    """
    assert state.policy.plan_reallocation is not None
    state.rounds_received = 0
    state.samples_ended = 0
    _follow(state, running)
    waiting = [(sample_id, WAITS, 0) for sample_id in state.unassigned]
    if not (running or waiting):
        return Assignments([], [], [])
    ids, places, generated = map(list, zip(*running, *waiting, strict=True))
    reallocation = state.policy.plan_reallocation(
        _view(state, ids, places, generated=np.array(generated))
    )
    return Assignments(
        admissions=[(ids[index], to) for index, to in reallocation.admissions],
        moves=[(ids[index], places[index], to) for index, to in reallocation.moves],
        freed=np.flatnonzero(reallocation.freed).tolist(),
    )


def _view(
    state: AssignmentState, ids: list[int], places: list[int], generated: np.ndarray
) -> ClusterView:
    """Describe the unfinished samples and the costs of rounds and moves, for the policy.

    The cost of a move has a fixed part and a part per token of context, for its caches.
    """
    batch = next(iter(state.own_slices.values()))
    requests = [state.samples[one].request for one in ids]
    limit = np.array([request.max_new_tokens for request in requests])
    curve = np.array([state.survival_of[request.id] for request in requests])
    left = length_model.remaining(state.survival, curve, generated, limit)
    tokens = len(batch.state.done) * batch.state.tokens.shape[1]
    draft = batch.state.draft
    token_bytes = (batch.state.cache.nbytes + (draft.cache.nbytes if draft else 0)) / tokens

    # Tokens per second of one row, by live rows. Without a selector only their ratios are right:
    # rounds seem long, and moves seem to cost nothing in comparison.
    run = state.run
    rows = run.decoding.max_rows
    sizes = [
        row_bucket(live, rows, run.decoding, layout=batch.layout) for live in range(1, rows + 1)
    ]
    if run.selector is None:
        speed = {size: 1 / (rows + size) for size in set(sizes)}
    else:
        nodes = precompile.VERIFIED * batch.layout.row_shards
        at = bands_ahead(generated, generated + left @ length_model.SHARES)
        speed = {size: run.selector.pace(size, size, nodes // size, at) for size in set(sizes)}

    return ClusterView(
        place=np.array(places),
        left=left,
        context=generated + np.array([len(request.prompt) for request in requests]),
        rows=rows,
        slices=len(state.layouts),
        speed=np.array([0.0, *(speed[size] for size in sizes)]),
        move_seconds=MOVE_SECONDS,
        token_seconds=token_bytes / LINK_SPEED[state.layouts[0].platform],
        freed=np.isin(np.arange(len(state.layouts)), state.freed),
        unscored=state.policy.unscored(),
        scoring=state.policy.scoring,
    )


def apply_assignments(
    state: AssignmentState,
    wanted: Assignments,
    carry: Callable[[int, int, int], None] | None = None,
) -> None:
    """Carry out the assignments for this process's slices.

    `carry` moves a sample from or to a slice of another process: (sample id, from, to). A sample
    whose prompt is prefilled but which has not begun stays where it is.
    """
    slices = state.own_slices
    decoding = state.run.decoding
    for sample_id, number, to in wanted.moves:
        if number in slices and to in slices:
            sample = state.samples[sample_id]
            source = slices[number]
            target = slices[to]
            if sample in source.rows:
                # Rounds in flight, on any slice, may add this many tokens.
                longest_path = 1 + max(len(one.parents) for one in decoding.strategies)
                most = sample.length + sample.rounds_in_flight * longest_path
                length = row_transfer.packet_length(most, source.state.tokens.shape[1])
                resize(target, len(target.samples) + 1, decoding)
                packet = row_transfer.send(leave(source, sample, length), target.layout)
                elsewhere = [*source.receive_first, *((source, sent) for sent in source.in_flight)]
                join(target, sample, packet, receive_first=elsewhere)
            elif sample in source.queue:
                source.queue.remove(sample)
                target.queue.append(sample)
        elif carry is not None:
            carry(sample_id, number, to)

    for sample_id, number in wanted.admissions:
        if number in slices:
            slices[number].queue.append(state.samples[sample_id])
    admitted = {sample_id for sample_id, _ in wanted.admissions}
    state.unassigned = [one for one in state.unassigned if one not in admitted]
    state.freed = tuple(wanted.freed)


def leave(batch: SliceBatch, sample: Sample, cache_length: int) -> RowPacket:
    """Remove a running sample from its row; return its packet, of this cache length."""
    row = batch.rows.index(sample)
    place = np.array([row], np.int32)
    batch.rows[row] = None
    packet = row_transfer.pack_rows(batch.state, place, cache_length, layout=batch.layout)
    batch.state = row_verbs.retire(batch.state, place, layout=batch.layout)
    return packet


def join(
    batch: SliceBatch,
    sample: Sample,
    packet: RowPacket,
    receive_first: Sequence[tuple[SliceBatch, InFlightRound]] = (),
) -> None:
    """Continue a transferred sample in a free row.

    receive_first: its rounds in flight on other slices; they are received before its first round
    here.
    """
    row = batch.rows.index(None)
    place = np.array([row], np.int32)
    batch.rows[row] = sample
    batch.state = row_transfer.unpack_rows(batch.state, packet, place, layout=batch.layout)
    batch.receive_first += receive_first
    batch.moved_bytes.append(packet.nbytes)
