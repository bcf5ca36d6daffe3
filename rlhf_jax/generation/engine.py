"""The host loop of generation: one queue of samples, and slices that decode them, each in its own
time.

The host decides and the devices work. It never waits for one slice while another could be fed, and
moves samples between slices where a plan says so; their text depends on none of that.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation import assignment as placings
from rlhf_jax.generation import precompile
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import scheduler as boards
from rlhf_jax.generation.assignment import STATIC, PlacementPolicy, Stage
from rlhf_jax.generation.multihost import PlanCoordinator
from rlhf_jax.generation.precompile import BackgroundCompiler, Models
from rlhf_jax.generation.requests import GenerationConfig, Request, RoundReport, Sample
from rlhf_jax.generation.rounds import Setting, can_dispatch, dispatch_round, receive_round
from rlhf_jax.generation.slice_batch import Instance
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.runtime.slice_groups import SliceGroup, slice_group_of
from rlhf_jax.types import Array, Model

RoundResult = tuple[RoundReport, list[Sample]]  # and the samples that ended with it
NAP = 5e-5  # seconds between two looks for a slice whose round has arrived


class IdleWork(Protocol):
    """Other work for slices that decode nothing more. Processes that share a slice have the same
    work in one order.
    """

    @property
    def waits(self) -> bool:
        """Whether there is any now."""
        ...

    def feed(self, number: int, mesh: jax.sharding.Mesh | None) -> Array:
        """Have a slice do the next of it: an array that is ready when it has."""
        ...


def generate(
    target: Model,
    drafter: Model | None,
    requests: Iterable[Request],
    decoding: GenerationConfig,
    mesh: jax.sharding.Mesh | None = None,
    observe: Callable[[RoundReport], None] = lambda report: None,
    selector: Selector | None = None,
    ahead: BackgroundCompiler | None = None,
    placing: PlacementPolicy = STATIC,
    spare: IdleWork | None = None,
) -> Iterator[Sample]:
    """Yield every sample of `requests` as it finishes, in order of finishing.

    target and drafter have unrolled layers, in the dtype they decode in, repeated over the slices
    of the mesh; the drafter is wanted by strategies of drafter 'model' only. Under replayable
    acceptance a sample's tokens are a function of (weights, prompt, seed, sample id, sampling): not
    of the strategies, the rows, the slices or the order. The `selector` chooses each round's
    strategy among those that `ahead` has compiled; without it the first is always taken, without
    `ahead` a strategy is compiled when it is first played. `placing` says which slice decodes what,
    and moves samples; by default each slice gets its share of the requests at once, and keeps it.
    `spare` gives other work to a slice that decodes nothing more. `observe` is called with each
    round's report. Raises ValueError for a prompt that does not fit, and Abandoned where another
    process gives the stage up.
    """
    if decoding.uses_drafter("model") and drafter is None:
        raise ValueError(
            "A strategy drafts with a model, and none is given; pass a drafter or choose another."
        )
    requests = list(requests)
    for request in requests:
        boards.check(request, decoding)
    groups = [
        [Sample(i, request, list(request.history)) for i in request.sample_ids]
        for request in requests
    ]
    setting = Setting(decoding, selector, ahead, slice_group_of(mesh, placing.name))
    if setting.slice_group.several and not placing.name:
        raise ValueError(
            "Processes that share a slice agree under the stage's name: give it one, as"
            " Placing(name=)."
        )
    fleet = _fleet((target, drafter), groups, decoding, mesh)
    siblings = {id(request): group for request, group in zip(requests, groups, strict=True)}
    stage = placings.begin(fleet, _slices(mesh), groups, placing, setting)
    turns = _in_turn(fleet) if placing.in_turn else _as_they_arrive(fleet)
    for landed in _landings(stage, turns, spare):
        for report, ended in landed:
            stage.landed, stage.ended = stage.landed + 1, stage.ended + len(ended)
            _pass_on(fleet, siblings, ended, decoding)
            yield from ended
            observe(report)


def _landings(
    stage: Stage, turns: Iterator[Instance], spare: IdleWork | None
) -> Iterator[Iterable[RoundResult]]:
    """The rounds as they land, until all samples have ended; slices are fed meanwhile."""
    fleet = list(stage.fleet.values())
    setting = stage.setting
    settled = []
    plans = PlanCoordinator(
        stage,
        settle=lambda instance: settled.extend(_all_of(instance, setting)),
        may_occupy=lambda: any(
            _idle(instance, stage, spare) and instance.has_room for instance in fleet
        ),
    )
    while plans.goes_on():
        plans.turn()
        if settled:
            yield settled
            settled.clear()
            setting.slice_group.decide_together(lambda: None)  # its leader has not stopped there
        for instance in fleet:
            _feed(instance, stage)
            if spare is not None and _idle(instance, stage, spare):
                _run_idle_work(instance, spare, setting.slice_group)
        yield _next_arrival(next(turns), setting)


def _all_of(instance: Instance, setting: Setting) -> Iterator[RoundResult]:
    """All rounds that the samples of a slice have in the air."""
    for source, flight in instance.arrived:
        while flight in source.in_flight:
            yield from _next_arrival(source, setting)
    while instance.in_flight:
        yield from _next_arrival(instance, setting)


def _slices(mesh: jax.sharding.Mesh | None) -> list[jax.sharding.Mesh | None]:
    """All slices of a mesh."""
    return [mesh] if mesh is None or mesh.shape["slices"] == 1 else [*meshes.split(mesh)]


def _fleet(
    models: Models, groups: list[list[Sample]], decoding: GenerationConfig, mesh
) -> list[Instance]:
    """The slices of this process, those that it shares among them, without samples."""
    samples = sum(map(len, groups))
    slices = _slices(mesh)
    if len(slices) == 1:
        return [boards.begin(0, models, mesh, samples, decoding)]
    own = [
        (number, part)
        for number, part in enumerate(slices)
        if part is not None and meshes.is_here(part)
    ]
    return [
        boards.begin(number, meshes.on_slice(models, part), part, samples, decoding)
        for number, part in own
    ]


def _feed(instance: Instance, stage: Stage) -> None:
    """Start the slice's next round, if it may have one. Under a plan it has rows for what that
    gives it, no more.
    """
    decoding = stage.setting.decoding
    drains = not stage.pool
    if stage.placing.plan_reallocation is not None:
        boards.fit(instance, len(instance.samples), decoding)
    boards.refill(instance, decoding)
    if drains and not instance.queue and not instance.waiting:
        boards.fit(instance, len(instance.live), decoding)
    while can_dispatch(instance):
        dispatch_round(instance, drains, stage.setting)


def _idle(instance: Instance, stage: Stage, spare: IdleWork | None) -> bool:
    """Whether a slice decodes nothing while other work waits: all that share it say the same."""
    return (
        spare is not None
        and spare.waits
        and not instance.samples
        and (instance.freed or not stage.pool)
    )


def _run_idle_work(instance: Instance, spare: IdleWork, slice_group: SliceGroup) -> None:
    """Let an idle slice do something else, if its crew's leader sees that it has done most of what
    it was given.
    """
    if slice_group.decide_together(lambda: instance.has_room):
        running = [work for work in instance.aside if not work.is_ready()]
        instance.aside = [*running, spare.feed(instance.number, instance.mesh)]


def _in_turn(fleet: list[Instance]) -> Iterator[Instance]:
    """The slices one after the other, whatever the clock says: so a run repeats itself."""
    while True:
        yield from [instance for instance in fleet if instance.in_flight] or fleet[:1]


def _as_they_arrive(fleet: list[Instance]) -> Iterator[Instance]:
    """The slice whose round is there, the one that was served least recently first; the only one is
    waited for.
    """
    order = collections.deque(fleet)
    while True:
        flying = [instance for instance in order if instance.in_flight]
        for instance in flying:
            instance.watched = False
        while len(flying) > 1 and not any(instance.ready for instance in flying):
            for instance in flying:
                instance.watched = True
            time.sleep(NAP)
        chosen = next((instance for instance in flying if instance.ready), (flying or fleet)[0])
        order.remove(chosen)
        order.append(chosen)
        yield chosen


def _next_arrival(instance: Instance, setting: Setting) -> Iterator[RoundResult]:
    """The slice's oldest round, after those of other slices that its samples took part in before
    they moved.
    """
    if not instance.in_flight:
        return
    for source, flight in instance.in_flight[0].after:
        while flight in source.in_flight:
            yield from _next_arrival(source, setting)
    yield receive_round(instance, setting)


def _pass_on(
    fleet: list[Instance],
    siblings: dict[int, list[Sample]],
    ended: list[Sample],
    decoding: GenerationConfig,
) -> None:
    """Finished samples give up their rows, and are history to their siblings that are not."""
    for instance in fleet if ended else ():
        instance.board = [
            None if sample is None or sample.done else sample for sample in instance.board
        ]
    if not ended or not decoding.history or not decoding.uses_drafter("lookup"):
        return
    for sample in ended:
        text = np.array(sample.tokens, np.int32)
        for other in siblings[id(sample.request)]:
            if not other.done:
                other.texts.append(text)
    for instance in fleet:
        boards.pass_on(instance, ended, decoding)


def warm_up(
    target: Model,
    drafter: Model | None,
    samples: int,
    decoding: GenerationConfig,
    mesh: jax.sharding.Mesh | None = None,
    look: bool = False,
) -> Mapping[str, float]:
    """Compile the first strategy's rounds of `samples` samples, for every number of rows they may
    shrink to.

    `look` is for a selector, which wants to know how its drafters would do, and what XLA says that
    a plain round of the most rows does: that is returned, "flops" and "bytes accessed".
    """
    request = Request(np.zeros(1, np.int32), (), 1)
    groups = [[Sample(i, request, []) for i in range(samples)]]
    fleet = _fleet((target, drafter), groups, decoding, mesh)
    first = fleet[0]
    does = precompile.analysis(first.state, first.models[0], decoding, first.mesh) if look else {}
    for instance in fleet:
        _warm_up(instance, decoding, look)
    return does


def _warm_up(instance: Instance, decoding: GenerationConfig, look: bool) -> None:
    rows = len(instance.board)
    state = instance.state
    mesh = instance.mesh
    while True:
        alone = boards.siblings([None] * rows, decoding)
        state, _ = precompile.dispatch(
            state, instance.models, decoding.strategies[0], alone, decoding, mesh, look
        )
        rows, before = boards.row_bucket(rows // 2, rows, decoding, mesh), rows
        if rows == before:
            return
        state = row_verbs.resize(state, np.arange(rows, dtype=np.int32), mesh)
