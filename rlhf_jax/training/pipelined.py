"""Train models as concurrent pipelines: the host dispatches tasks in a schedule's order.

(RLHFuse, arXiv 2409.13221, section 5.) A stage's programs run on the devices of its own slice, so
those of different stages overlap. A stage sums gradients in the order of micro-batches whatever the
schedule, so the sums are the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.mesh import Layout, place_rows
from rlhf_jax.monitoring.parts import PhaseParts, PipelineTask
from rlhf_jax.pipeline.problem import BACKWARD, FORWARD
from rlhf_jax.pipeline.schedule import Schedule
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.compilation import Execute, run_now
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.gradients import Gradient, Learner, no_gradient
from rlhf_jax.training.schedules import kept_bytes, schedule_of
from rlhf_jax.training.stages import (
    Stage,
    backward,
    copies_of,
    forward,
    join_gradients,
    model_of_copy,
    rows_of_copy,
    send,
    split_model,
    stages_of,
    sum_copies,
)
from rlhf_jax.types import Model


@dataclasses.dataclass
class RunningStage:
    """Hold the state of a stage while its pipeline runs."""

    stage: Stage
    part: Model
    total: Gradient | None = None
    # by micro-batch: the inputs of the stage, until it has gone backward
    kept: dict[int, tuple[jax.Array | None, Any]] = dataclasses.field(default_factory=dict)
    # by micro-batch: outputs for the stage after this one, and for the one before
    gave: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    cotangents: dict[int, jax.Array] = dataclasses.field(default_factory=dict)


class RunningCopy(NamedTuple):
    """Hold a copy of a pipeline while it runs."""

    layout: Layout  # of all its stages
    stages: list[RunningStage]
    batches: list[PackedSequences]  # its rows of each micro-batch


def sum_pipelined(
    learners: Sequence[Learner],
    models: Sequence[Model],
    batches: Sequence[Sequence[PackedSequences]],
    schedule: Schedule,
    progress: PhaseParts | None = None,
    execute: Execute = run_now,
) -> list[Gradient]:
    """Return the gradient of each learner's minibatch, as `accumulate` would sum it.

    batches: the micro-batches of each learner, of host arrays. schedule: of one pipe for each, in
    their order. A neighbour's output for a task is sent when the task begins, so a stage never
    holds more inputs than the schedule's peak. Nothing waits for a device. Micro-batches are
    recorded in `progress` when their loss is dispatched, and tasks if it records them.
    """
    pipes = [_begin(*given) for given in zip(learners, models, batches, strict=True)]
    for task in schedule.tasks:
        began = time.perf_counter()
        learner = learners[task["pipe"]]
        copies = pipes[task["pipe"]]
        copy = copies[task["copy"]]
        place = int(task["stage"])
        number = int(task["micro_batch"])
        if task["kind"] == FORWARD:
            _go_forward(copy.stages, place, number, copy.batches[number], execute)
        else:
            _go_backward(copy.stages, place, number, execute)
        if progress is None:
            continue
        if progress.record_task is not None:
            _record_task(learner.call, began, copies, task, progress.record_task)
        last = place == len(copy.stages) - 1 and copy is copies[-1]
        if task["kind"] == BACKWARD and last:
            metrics = typed(Gradient, copy.stages[place].total).metrics
            # A copy, for the next call donates the sum itself.
            metric = jnp.copy(next(iter(metrics.values())))
            progress.hand(learner.call, began, metric, batches[task["pipe"]][number])
    gradients = []
    for copies, learner in zip(pipes, learners, strict=True):
        of_copies = []
        for copy in copies:
            sums = [typed(Gradient, own.total) for own in copy.stages]
            of_copies.append(join_gradients(sums, copy.layout, execute))
        gradients.append(sum_copies(of_copies, learner.settings.layout, execute))
    return gradients


def measure_stages(learner: Learner, model: Model, batch: PackedSequences) -> StageTimes:
    """Return the seconds of each stage's tasks for a micro-batch of host arrays.

    One task runs at a time, several times, and the shortest counts, in which nothing is compiled.
    Of several processes the one with the stage reports.
    """
    seconds: dict[tuple[Stage, bool], float] = {}

    def timed(function: Callable, *arguments: Any, **options: Any) -> Any:
        """Call a stage's program, and wait for it, but not for its inputs."""
        jax.block_until_ready(arguments)
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments, **options))
        if "stage" in options:
            task = (options["stage"], function is backward)
            seconds[task] = min(time.perf_counter() - began, seconds.get(task, math.inf))
        return result

    schedule = schedule_of([learner], [model], [[batch] * 2], times={}).schedule
    for _ in range(2):
        sum_pipelined([learner], [model], [[batch] * 2], schedule, execute=timed)
    copies = [stages_of(copy) for copy in copies_of(learner)]
    forwards = [
        0.0 if alike[0].loss else max(seconds[stage, False] for stage in alike)
        for alike in zip(*copies, strict=True)
    ]
    backwards = [
        max(seconds[stage, True] for stage in alike) for alike in zip(*copies, strict=True)
    ]
    of_ranks = np.array(distributed.gather([forwards, backwards])).max(axis=0)
    times = map(tuple, of_ranks.tolist())
    return StageTimes(1, *times, kept=kept_bytes(learner, model.config, batch), copies=len(copies))


def _begin(learner: Learner, model: Model, batches: Sequence[PackedSequences]) -> list[RunningCopy]:
    """Return the copies of a learner's pipeline, with its weights and nothing computed."""
    begun = []
    copies = copies_of(learner)
    for index, copy in enumerate(copies):
        stages = stages_of(copy)
        own_model = model_of_copy(model, copy, learner)
        running = list(map(RunningStage, stages, split_model(own_model, stages)))
        rows = [rows_of_copy(batch, index, len(copies)) for batch in batches]
        begun.append(RunningCopy(copy.settings.layout, running, rows))
    return begun


def _go_forward(
    pipe: list[RunningStage], place: int, number: int, batch: PackedSequences, execute: Execute
) -> None:
    """Run a stage's forward of a micro-batch; the last one only stores its inputs."""
    running = pipe[place]
    layout = running.stage.settings.layout
    needed = place_rows(running.stage.needed(batch), layout)
    given = send(pipe[place - 1].gave.pop(number), layout) if place else None
    running.kept[number] = (given, needed)
    if running.stage.loss is None:
        running.gave[number] = execute(forward, running.part, given, needed, stage=running.stage)


def _go_backward(pipe: list[RunningStage], place: int, number: int, execute: Execute) -> None:
    """Add a stage's gradient of a micro-batch to its sum."""
    running = pipe[place]
    given, needed = running.kept.pop(number)
    cotangent = None
    if running.stage.loss is None:
        cotangent = send(pipe[place + 1].cotangents.pop(number), running.stage.settings.layout)
    running.total, onward = run_backward(running, given, needed, cotangent, execute)
    if onward is not None:
        running.cotangents[number] = onward


def run_backward(
    running: RunningStage, given: Any, needed: PackedSequences, cotangent: Any, execute: Execute
) -> tuple[Gradient, jax.Array | None]:
    """Run `backward` of a stage's micro-batch on its sum so far, which begins with nothing."""
    options = {"stage": running.stage}
    total = running.total
    if total is None:
        first, _ = backward.eval_shape(None, running.part, given, needed, cotangent, **options)
        begun = {"names": tuple(first.metrics), "layout": running.stage.settings.layout}
        total = execute(no_gradient, running.part, **begun)
    return execute(backward, total, running.part, given, needed, cotangent, **options)


def _record_task(
    call: str,
    began: float,
    copies: list[RunningCopy],
    task: np.void,
    progress: Callable[[PipelineTask, jax.Array], None],
) -> None:
    """Record a dispatched task, with an array that is ready when it is done."""
    place = int(task["stage"])
    number = int(task["micro_batch"])
    index = int(task["copy"])
    running = copies[index].stages[place]
    last = place == len(copies[index].stages) - 1
    kind = "backward" if task["kind"] == BACKWARD else "forward"
    after = ("backward", place + 1) if kind == "backward" and not last else ("forward", place - 1)
    if kind == "forward":
        result = running.gave.get(number)  # the last stage has none
    elif place:
        result = running.cotangents[number]
    else:  # Nothing goes on; a small part is copied, since the next task donates the sum.
        summed = jax.tree.leaves(typed(Gradient, running.total).weights.layers)
        result = jnp.copy(min(summed, key=jnp.size))
    if result is not None:
        names = [f"{call} {index} {number} {way} {stage}" for way, stage in ((kind, place), after)]
        # nodes in the order of devices, whichever way pipelines run
        layouts = [one.stage.settings.layout for copy in copies for one in copy.stages]
        nodes = sorted(layout.devices.flat[0].id for layout in layouts)
        lane = nodes.index(running.stage.settings.layout.devices.flat[0].id)
        progress(PipelineTask(call, began, lane, *names), result)
