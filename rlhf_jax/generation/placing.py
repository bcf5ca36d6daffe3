"""Which slice decodes which sample, and when a running one moves: what a plan is shown, and what it decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from rlhf_jax.generation import board as boards
from rlhf_jax.generation import programs
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.flights import Setting
from rlhf_jax.generation.instance import Instance
from rlhf_jax.generation.samples import Decoding, Sample
from rlhf_jax.reallocation import exchange, lengths
from rlhf_jax.reallocation.lengths import Lengths
from rlhf_jax.reallocation.plan import Plan, View

LINK = {"cpu": 4e9, "gpu": 5e10, "tpu": 5e10}  # bytes a second between two slices, about,
MOVE = 2e-3  # and seconds that a move takes besides


@dataclasses.dataclass(frozen=True)
class Placing:
    """How samples are placed."""

    decide: Callable[[View], Plan] | None = None  # None: each slice gets its share at once, and keeps it
    lengths: Lengths = dataclasses.field(default_factory=Lengths)  # the law of responses
    in_turn: bool = False  # slices are served one after the other, not as they are ready: then a run repeats itself


STATIC = Placing()


def place(fleet: list[Instance], groups: list[list[Sample]], placing: Placing) -> list[Sample]:
    """Deal the samples out, a prompt's together; what the plan places later is returned."""
    if placing.decide is not None:
        return [sample for group in groups for sample in group]
    for turn, group in enumerate(groups):
        fleet[turn % len(fleet)].queue.extend(group)
    return []


def replace(fleet: list[Instance], pool: list[Sample], placing: Placing, setting: Setting) -> list[Sample]:
    """Carry out what the plan says now; the samples that still have no slice."""
    assert placing.decide is not None
    placed = [(sample, at) for at, instance in enumerate(fleet) for sample in instance.samples if not sample.done]
    samples, places = [*(s for s, _ in placed), *pool], [*(at for _, at in placed), *(-1 for _ in pool)]
    if not samples:
        return []
    plan = placing.decide(_view(fleet, samples, places, placing, setting))
    for index, to in plan.moves:
        _reassign(fleet[places[index]], fleet[to], samples[index], setting.decoding)
    for index, to in plan.admissions:
        fleet[to].queue.append(samples[index])
    for instance, freed in zip(fleet, plan.freed.tolist(), strict=True):
        instance.freed = freed
    begun = {index for index, _ in plan.admissions}
    return [sample for index, sample in enumerate(samples) if places[index] < 0 and index not in begun]


def _reassign(source: Instance, target: Instance, sample: Sample, decoding: Decoding) -> None:
    """Have a sample decoded elsewhere; one whose prompt alone is prefilled stays."""
    if sample in source.board:
        move(source, target, sample, decoding)
    elif sample in source.queue:
        source.queue.remove(sample)
        target.queue.append(sample)


def _view(fleet: list[Instance], samples: list[Sample], places: list[int], placing: Placing, setting: Setting) -> View:
    generated = np.array([len(sample.tokens) for sample in samples])
    limit = np.array([sample.request.max_new_tokens for sample in samples])
    earlier = [np.array([len(text) for text in sample.request.history]) for sample in samples]
    move_seconds, token_seconds = _price_of_a_move(fleet[0])
    return View(
        place=np.array(places),
        left=lengths.remaining(placing.lengths, generated, limit, earlier),
        context=generated + np.array([len(sample.prompt) for sample in samples]),
        rows=setting.decoding.rows,
        slices=len(fleet),
        speed=_speed(fleet[0], setting),
        move_seconds=move_seconds,
        token_seconds=token_seconds,
        freed=np.array([instance.freed for instance in fleet]),
    )


def _speed(instance: Instance, setting: Setting) -> np.ndarray:
    """[rows + 1] tokens a second of one row when so many are live; without a selector only their ratios count."""
    decoding, mesh, selector = setting.decoding, instance.mesh, setting.selector
    live = np.arange(1, decoding.rows + 1)
    sizes = np.array([boards.row_bucket(count, decoding.rows, decoding, mesh) for count in live])
    if selector is None:
        paces = {size: 1 / (decoding.rows + size) for size in set(sizes.tolist())}
    else:
        nodes = programs.VERIFIED * boards.shared(1, mesh)
        paces = {size: selector.pace(size, size, nodes // size) for size in set(sizes.tolist())}
    return np.array([0.0, *(paces[size] for size in sizes.tolist())])


def _price_of_a_move(instance: Instance) -> tuple[float, float]:
    """Seconds of a move, and more for each token of context."""
    state = instance.state
    caches = jax.tree.leaves((state.cache, state.draft and state.draft.cache))
    of_token = sum(leaf.nbytes for leaf in caches) / (len(state.done) * state.tokens.shape[1])
    return MOVE, of_token / LINK[jax.default_backend()]


def move(source: Instance, target: Instance, sample: Sample, decoding: Decoding) -> None:
    """Move a running sample with its caches to another slice.

    The source's rounds that it is in land before the target's first one with it.
    """
    boards.fit(target, len(target.live) + 1, decoding)
    row, place = source.board.index(sample), target.board.index(None)
    leaving, arriving = np.array([row], np.int32), np.array([place], np.int32)
    slots = exchange.width(_longest(source, sample), source.state.tokens.shape[1])
    parcel = exchange.send(exchange.depart(source.state, leaving, slots, mesh=source.mesh), target.mesh)
    source.state = row_verbs.retire(source.state, leaving, mesh=source.mesh)
    target.state = exchange.arrive(target.state, parcel, arriving, mesh=target.mesh)
    source.board[row], target.board[place] = None, sample
    target.arrived += [(source, flight) for flight in source.flights]
    target.moved.append(exchange.bytes_of(parcel))


def _longest(source: Instance, sample: Sample) -> int:
    """Tokens that the sample may have once the rounds in the air are over."""
    flying = [flight.results.emission.tokens.shape[1] for flight in source.flights if sample in flight.samples]
    return len(sample.prompt) + len(sample.tokens) + sum(flying)
