"""Generate: the host loop over slices that decode samples independently.

The host decides and the devices compute. It never waits for one slice while another could get
rounds, and moves samples between slices as a policy decides; texts depend on none of this.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rlhf_jax.generation.assignment import (
    STATIC,
    AssignmentPolicy,
    AssignmentState,
    begin_assignment,
)
from rlhf_jax.generation.multihost import PlanCoordinator
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import (
    GenerationConfig,
    IdleWork,
    Request,
    RoundReport,
    Sample,
    is_ready,
)
from rlhf_jax.generation.rounds import (
    GenerationRun,
    RoundResult,
    can_dispatch,
    dispatch_round,
    receive_all,
    receive_next,
)
from rlhf_jax.generation.scheduler import SliceBatch, begin_slices, refill, release_finished
from rlhf_jax.generation.slice_groups import SliceGroup, slice_group_of
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.types import Model

__all__ = ["IdleWork", "generate"]

# Seconds between two polls for a slice whose results have arrived.
LOOK_INTERVAL = 5e-5


def generate(
    target: Model,
    drafter: Model | None,
    requests: Iterable[Request],
    decoding: GenerationConfig,
    layout: Layout = ONE_DEVICE,
    observe: Callable[[RoundReport], None] = lambda report: None,
    selector: Selector | None = None,
    compiler: BackgroundCompiler | None = None,
    assignment_policy: AssignmentPolicy = STATIC,
    idle_work: IdleWork | None = None,
) -> Iterator[Sample]:
    """Yield every sample of `requests` as it finishes, in order of finishing.

    target and drafter have unrolled layers, in the dtype of decoding, repeated over the slices of
    the layout; the drafter is required if a strategy's drafter `needs_model`. Under replayable
    acceptance a sample's tokens are a function of (weights, prompt, seed, sample id, sampling): not
    of strategies, rows, slices or order. The `selector` chooses each round's strategy among those
    that `compiler` has compiled; without it the first is always used, without `compiler` a strategy
    compiles on first use. `assignment_policy` assigns samples to slices and moves them; by default
    each slice gets its share of the requests at once, and keeps it. `idle_work` is other work for a
    slice that has nothing left to decode. `observe` is called with each round's report. Raises
    ValueError for a prompt that does not fit, and StageAborted if another process aborts the stage.
    """
    requests = list(requests)
    group = slice_group_of(layout, assignment_policy.name)
    _check(requests, (target, drafter), decoding, layout=layout, group=group)
    run = GenerationRun(decoding, selector, compiler, slice_group=group)
    samples = sum(len(request.sample_ids) for request in requests)
    slices = begin_slices((target, drafter), samples, decoding, layout=layout)
    state = begin_assignment(slices, layout.split(), requests, assignment_policy, run=run)
    served = _serve(slices, assignment_policy.in_turn)
    reallocates = assignment_policy.plan_reallocation is not None

    def may_do_idle_work(batch: SliceBatch) -> bool:
        # All processes that share a slice get the same answer.
        may_decode = batch.samples or (state.unassigned and batch.number not in state.freed)
        return idle_work is not None and idle_work.waits and not may_decode

    received: list[RoundResult] = []  # of samples that will move to another process
    coordinator = PlanCoordinator(
        state,
        settle=lambda batch: received.extend(receive_all(batch, run)),
        may_occupy=lambda: any(may_do_idle_work(one) and one.has_room for one in slices),
    )
    while coordinator.goes_on():
        coordinator.turn()
        if received:
            yield from _finish(received, slices, state, observe=observe)
            received.clear()
            group.decide_together(lambda: None)  # the leader of its processes has not stopped there

        for batch in slices:
            drains = not state.unassigned
            refill(batch, decoding, reallocates=reallocates, drains=drains)
            while can_dispatch(batch):
                dispatch_round(batch, drains, run)
            # The leader of the processes that share the slice checks whether it has room.
            if (
                idle_work is not None
                and may_do_idle_work(batch)
                and group.decide_together(lambda batch=batch: batch.has_room)
            ):
                running = [work for work in batch.idle_work if not is_ready(work)]
                batch.idle_work = [*running, idle_work.feed(batch.number, batch.layout)]

        yield from _finish(receive_next(next(served), run), slices, state, observe=observe)


def _check(
    requests: Sequence[Request],
    models: ModelPair,
    decoding: GenerationConfig,
    layout: Layout,
    group: SliceGroup,
) -> None:
    """Raise ValueError for invalid requests."""
    target, drafter = models
    if any(one.needs_model for one in decoding.drafters) and drafter is None:
        raise ValueError(
            "A strategy drafts with a model, and none is given; pass a drafter or choose another."
        )
    if target.norm.dtype != layout.dtype:
        raise ValueError(
            f"The weights are {target.norm.dtype.name}, and the layout computes in"
            f" {layout.dtype.name}; make them by `decoding_weights(model, layout)`."
        )
    for request in requests:
        length = len(request.prompt)
        wanted = length + request.max_new_tokens
        if not length or request.max_new_tokens < 1 or wanted > decoding.max_length:
            raise ValueError(
                f"A prompt of {length} tokens with up to {request.max_new_tokens} new"
                f" ones does not fit the cache of {decoding.max_length} slots; shorten the prompt,"
                " lower the number of new tokens or raise the slots."
            )
        latest = max(request.earlier, default=-1)
        if decoding.rule.depends_on_drafts and min(request.sample_ids, default=0) <= latest:
            raise ValueError(
                f"Under acceptance {decoding.acceptance!r} no draft may stem from the noise that"
                f" accepts it, and sample {min(request.sample_ids)} may draft from the text of"
                f" sample {latest}; use ids beyond those of all earlier texts, as `requests`"
                " does."
            )
    if group.several and not group.name:
        raise ValueError(
            "Processes that share a slice agree under the stage's name: give it one, as"
            " AssignmentPolicy(name=)."
        )


def _serve(slices: Sequence[SliceBatch], in_turn: bool) -> Iterator[SliceBatch]:
    """Yield the slices with rounds in flight, endlessly: in turn, or as their results arrive.

    In turn, a run is reproducible. Else the least recently served one with results is first, and a
    slice that alone has rounds in flight is yielded at once.
    """
    while in_turn:
        yield from [batch for batch in slices if batch.in_flight] or slices[:1]

    order = collections.deque(slices)
    while True:
        in_flight = [batch for batch in order if batch.in_flight]
        for batch in in_flight:
            batch.seen_unfinished = False
        while len(in_flight) > 1 and not any(batch.results_ready for batch in in_flight):
            for batch in in_flight:
                batch.seen_unfinished = True
            time.sleep(LOOK_INTERVAL)
        ready = [batch for batch in in_flight if batch.results_ready]
        chosen = (ready or in_flight or slices)[0]
        order.remove(chosen)
        order.append(chosen)
        yield chosen


def _finish(
    results: Iterable[RoundResult],
    slices: Sequence[SliceBatch],
    state: AssignmentState,
    observe: Callable[[RoundReport], None],
) -> Iterator[Sample]:
    """Yield the samples that received rounds ended, and free their rows."""
    for report, ended in results:
        state.rounds_received += 1
        state.samples_ended += len(ended)
        release_finished(slices, ended, state.samples, decoding=state.run.decoding)
        yield from ended
        observe(report)
