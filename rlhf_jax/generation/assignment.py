"""Which slice decodes which sample, and when a running one moves: what a plan is shown, and what it
decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from rlhf_jax.generation import precompile
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import scheduler as boards
from rlhf_jax.generation.requests import GenerationConfig, Request, Sample
from rlhf_jax.generation.rounds import Setting
from rlhf_jax.generation.slice_batch import Instance
from rlhf_jax.reallocation import length_model, row_transfer
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.reallocation.planner import WAITS, ClusterView, Reallocation
from rlhf_jax.reallocation.row_transfer import RowPacket
from rlhf_jax.runtime import messages

# bytes a second of a move, about (a CPU's by benchmarks/moves.py)
LINK = {"cpu": 1e9, "gpu": 5e10, "tpu": 5e10}
MOVE = 2e-3  # seconds that a move takes besides
OFTEN = 32  # rounds after which there is a new plan, if no sample has ended before


@dataclasses.dataclass(frozen=True)
class PlacementPolicy:
    """How samples are placed."""

    # None: each slice gets its share at once, and keeps it
    plan_reallocation: Callable[[ClusterView], Reallocation] | None = None
    lengths: Lengths = dataclasses.field(default_factory=Lengths)  # the law of responses
    # slices are served one after the other, not as they are ready: then a run repeats itself
    in_turn: bool = False
    # of the stage, where processes plan together or share a slice: no other has it before `forget`
    name: str = ""
    # seconds of inference a token on a slice that decodes no more; 0 where there is none to do
    scoring: float = 0.0
    unscored: Callable[[], float] = lambda: 0.0  # tokens of finished samples that wait for it


STATIC = PlacementPolicy()
Standing = list[tuple[int, int, int]]  # (sample id, its slice, tokens so far) of unfinished samples


@dataclasses.dataclass
class Stage:
    """What one call of `generate` is to decode, and where."""

    fleet: dict[int, Instance]  # this process's slices, by their number
    slices: list[jax.sharding.Mesh | None]  # all of them
    samples: dict[int, Sample]  # all of them, by id
    pool: list[int]  # samples that have no slice yet
    placing: PlacementPolicy
    setting: Setting
    # [k, bins + 1] chances that a response is longer than each of `lengths.EDGES`,
    curves: np.ndarray
    laws: dict[int, int]  # and which of them is a request's
    landed: int = 0  # rounds since the last plan,
    ended: int = 0  # and samples
    freed: tuple[int, ...] = ()  # slices that are to decode nothing but what they have

    @property
    def due(self) -> bool:
        """Whether it is time for a plan: after some rounds, or where nothing else can happen."""
        flying = any(instance.in_flight for instance in self.fleet.values())
        enough = self.landed >= (len(self.slices) if self.ended else max(OFTEN, len(self.slices)))
        return self.placing.plan_reallocation is not None and (enough or not flying)


@messages.register
@dataclasses.dataclass(frozen=True)
class Assignments:
    """A plan by sample ids."""

    admissions: list[tuple[int, int]]  # (sample, slice)
    moves: list[tuple[int, int, int]]  # (sample, from slice, to slice)
    freed: list[int]  # slices that are to decode nothing but what they have
    over: bool = False  # nothing is left to do


def begin(
    fleet: list[Instance],
    slices,
    groups: list[list[Sample]],
    placing: PlacementPolicy,
    setting: Setting,
) -> Stage:
    """A stage whose samples are dealt out, a prompt's together, or wait for a plan."""
    samples = {sample.sample_id: sample for group in groups for sample in group}
    if placing.plan_reallocation is None:
        for turn, group in enumerate(groups):
            fleet[turn % len(fleet)].queue.extend(group)
    pool = [] if placing.plan_reallocation is None else list(samples)
    own = {instance.number: instance for instance in fleet}
    curves, laws = _curves(placing, [group[0].request for group in groups if group] if pool else [])
    return Stage(own, slices, samples, pool, placing, setting, curves, laws)


def _curves(placing: PlacementPolicy, requests: list[Request]) -> tuple[np.ndarray, dict[int, int]]:
    """What is known of the lengths of each request's responses: once, as neither law nor history
    change in a stage.
    """
    law = placing.lengths
    known = [request for request in requests if request.history]
    curves = length_model.survival(law)[None]
    laws = dict.fromkeys(map(id, requests), 0)
    if known:
        earlier = [[len(text) for text in request.history] for request in known]
        curves = np.concatenate([curves, length_model.believed(law, earlier)])
        laws |= {id(request): 1 + one for one, request in enumerate(known)}
    return curves, laws


def standing(stage: Stage) -> Standing:
    """Of this process's slices."""
    return [
        (sample.sample_id, number, len(sample.tokens))
        for number, instance in stage.fleet.items()
        for sample in instance.samples
        if not sample.done
    ]


def orders(stage: Stage, where: Standing) -> Assignments:
    """What the plan says of samples that stand so, and of those that wait."""
    assert stage.placing.plan_reallocation is not None
    stage.landed = stage.ended = 0
    ids = [*(one for one, _, _ in where), *stage.pool]
    places = [*(place for _, place, _ in where), *(WAITS for _ in stage.pool)]
    generated = np.array([*(tokens for _, _, tokens in where), *(0 for _ in stage.pool)], int)
    if not ids:
        return Assignments([], [], [])
    plan = stage.placing.plan_reallocation(_view(stage, ids, places, generated))
    return Assignments(
        admissions=[(ids[index], to) for index, to in plan.admissions],
        moves=[(ids[index], places[index], to) for index, to in plan.moves],
        freed=np.flatnonzero(plan.freed).tolist(),
    )


def carry_out(
    stage: Stage, wanted: Assignments, carry: Callable[[int, int, int], None] | None = None
) -> None:
    """Do what the orders say of this process's slices; `carry` moves a sample from or to another
    process.
    """
    for sample_id, source, target in wanted.moves:
        if source in stage.fleet and target in stage.fleet:
            _reassign(
                stage.fleet[source],
                stage.fleet[target],
                stage.samples[sample_id],
                stage.setting.decoding,
            )
        elif carry is not None:
            carry(sample_id, source, target)
    for sample_id, number in wanted.admissions:
        if number in stage.fleet:
            stage.fleet[number].queue.append(stage.samples[sample_id])
    stage.freed = tuple(wanted.freed)
    for number, instance in stage.fleet.items():
        instance.freed = number in stage.freed
    begun = {sample_id for sample_id, _ in wanted.admissions}
    stage.pool = [sample_id for sample_id in stage.pool if sample_id not in begun]


def _reassign(
    source: Instance, target: Instance, sample: Sample, decoding: GenerationConfig
) -> None:
    """Have a sample decoded elsewhere; one whose prompt alone is prefilled stays."""
    if sample in source.board:
        move(source, target, sample, decoding)
    elif sample in source.queue:
        source.queue.remove(sample)
        target.queue.append(sample)


def _view(stage: Stage, ids: list[int], places: list[int], generated: np.ndarray) -> ClusterView:
    instance = next(iter(stage.fleet.values()))
    requests = [stage.samples[one].request for one in ids]
    limit = np.array([request.max_new_tokens for request in requests])
    which = np.array([stage.laws[id(request)] for request in requests])
    move_seconds, token_seconds = _price_of_a_move(instance)
    return ClusterView(
        place=np.array(places),
        left=length_model.remaining(stage.curves, which, generated, limit),
        context=generated + np.array([len(request.prompt) for request in requests]),
        rows=stage.setting.decoding.max_rows,
        slices=len(stage.slices),
        speed=_speed(instance, stage.setting),
        move_seconds=move_seconds,
        token_seconds=token_seconds,
        freed=np.isin(np.arange(len(stage.slices)), stage.freed),
        unscored=stage.placing.unscored(),
        scoring=stage.placing.scoring,
    )


def _speed(instance: Instance, setting: Setting) -> np.ndarray:
    """[rows + 1] tokens a second of one row when so many are live.

    Without a selector only their ratios are right: rounds seem long, and moves cost nothing beside
    them.
    """
    decoding = setting.decoding
    mesh = instance.mesh
    selector = setting.selector
    live = np.arange(1, decoding.max_rows + 1)
    sizes = np.array(
        [boards.row_bucket(count, decoding.max_rows, decoding, mesh) for count in live.tolist()]
    )
    if selector is None:
        paces = {size: 1 / (decoding.max_rows + size) for size in set(sizes.tolist())}
    else:
        nodes = precompile.VERIFIED * boards.shared(1, mesh)
        paces = {size: selector.pace(size, size, nodes // size) for size in set(sizes.tolist())}
    return np.array([0.0, *(paces[size] for size in sizes.tolist())])


def _price_of_a_move(instance: Instance) -> tuple[float, float]:
    """Seconds of a move, and more for each token of context."""
    state = instance.state
    caches = jax.tree.leaves((state.cache, state.draft and state.draft.cache))
    of_token = sum(leaf.nbytes for leaf in caches) / (len(state.done) * state.tokens.shape[1])
    return MOVE, of_token / LINK[jax.default_backend()]


def move(source: Instance, target: Instance, sample: Sample, decoding: GenerationConfig) -> None:
    """Move a running sample with its caches to another slice.

    The source's rounds that it is in land before the target's first one with it.
    """
    boards.fit(target, len(target.samples) + 1, decoding)
    slots = row_transfer.width(_longest(sample, decoding), source.state.tokens.shape[1])
    join(target, sample, row_transfer.send(leave(source, sample, slots), target.mesh))
    target.arrived += [*source.arrived, *((source, flight) for flight in source.in_flight)]


def leave(instance: Instance, sample: Sample, slots: int) -> RowPacket:
    """Take a running sample out of its row: what of it travels, with so many token slots."""
    row = instance.board.index(sample)
    place = np.array([row], np.int32)
    instance.board[row] = None
    packet = row_transfer.pack_rows(instance.state, place, slots, mesh=instance.mesh)
    instance.state = row_verbs.retire(instance.state, place, mesh=instance.mesh)
    return packet


def join(instance: Instance, sample: Sample, packet: RowPacket) -> None:
    """Let a sample that has travelled run on in a free row."""
    row = instance.board.index(None)
    instance.board[row] = sample
    instance.state = row_transfer.unpack_rows(
        instance.state, packet, np.array([row], np.int32), mesh=instance.mesh
    )
    instance.moved.append(row_transfer.bytes_of(packet))


def _longest(sample: Sample, decoding: GenerationConfig) -> int:
    """Tokens that the sample may have once the rounds in the air are over, on whichever slices they
    are.
    """
    most = 1 + max(len(strategy.parents) for strategy in decoding.strategies)
    return len(sample.prompt) + len(sample.tokens) + sample.flying * most
