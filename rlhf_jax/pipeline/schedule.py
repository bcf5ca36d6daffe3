"""Hold a schedule as a table of tasks, and make the schedules in which each pipe runs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rlhf_jax.pipeline.problem import BACKWARD, FORWARD, Pipe, PipelineProblem
from rlhf_jax.pipeline.queues import Queue, Times, bound, queues_of

# The columns of a task.
TASK = np.dtype(
    [
        ("pipe", np.int32),
        ("copy", np.int32),
        ("stage", np.int32),
        ("micro_batch", np.int32),
        ("kind", np.int8),  # FORWARD or BACKWARD
        ("node", np.int32),
        ("start", np.float64),
        ("seconds", np.float64),
    ]
)

# From (pipe, queue, micro-batch) to a time in a schedule of unit tasks.
Slot = Callable[[Pipe, Queue, int], int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Hold the time of each task of a problem."""

    tasks: np.ndarray  # [n] of dtype TASK, by start and node
    makespan: float
    bound: float  # lower bound of the makespan
    peak: np.ndarray  # [nodes] most memory kept at any time


def make_schedule(problem: PipelineProblem, starts: Times) -> Schedule:
    """Return the schedule with these starts of tasks."""
    rows = [
        (queue.pipe, queue.copy, queue.stage, index, queue.kind, queue.node, start, queue.seconds)
        for queue, times in zip(queues_of(problem), starts, strict=True)
        for index, start in enumerate(times)
    ]
    tasks = np.sort(np.array(rows, TASK), order=["start", "node"])
    makespan = float((tasks["start"] + tasks["seconds"]).max())
    return Schedule(tasks, makespan, bound=bound(problem), peak=measure_peak(problem, tasks))


def starts_of(problem: PipelineProblem, schedule: Schedule) -> Times:
    """Return the starts of a schedule's tasks by queue, as `make_schedule` takes them."""
    queues = queues_of(problem)
    places = {queue[:4]: place for place, queue in enumerate(queues)}
    starts: Times = [[] for _ in queues]
    for pipe, copy, stage, _, kind, _, start, _ in schedule.tasks.tolist():
        starts[places[pipe, copy, stage, kind]].append(start)
    return starts


def measure_peak(problem: PipelineProblem, tasks: np.ndarray) -> np.ndarray:
    """Return the most memory [nodes] kept at any time, of tasks [n] by start.

    A node does one task at a time, so its memory follows from the order of its tasks.
    """
    kept = np.array([problem.pipes[row["pipe"]].kept[row["stage"]] for row in tasks])
    change = np.where(tasks["kind"] == FORWARD, kept, -kept)
    peak = np.zeros(problem.nodes)
    for node in range(problem.nodes):
        peak[node] = np.cumsum(change[tasks["node"] == node]).max(initial=0.0)
    return peak


def earliest_starts(queues: list[Queue], order: Times) -> Times:
    """Return the earliest starts for a given order of tasks on every node.

    order: numbers that ascend along a node's tasks, and along a micro-batch's path.
    """
    every = [
        (when, place, index) for place, own in enumerate(order) for index, when in enumerate(own)
    ]
    free = [0.0] * (1 + max(queue.node for queue in queues))
    starts: Times = [[0.0] * queue.tasks for queue in queues]
    for _, place, index in sorted(every):
        queue = queues[place]
        start = free[queue.node]
        if queue.before is not None:
            start = max(start, starts[queue.before][index] + queues[queue.before].seconds)
        starts[place][index] = start
        free[queue.node] = start + queue.seconds
    return starts


def one_f_one_b(problem: PipelineProblem) -> Schedule:
    """Return the schedule of the pipes one after the other, each by 1F1B (PipeDream, 2019).

    A stage does as many forwards as there are stages from it on, then backwards and forwards in
    turn. It ignores the limit.
    """

    def slot(pipe: Pipe, queue: Queue, index: int) -> int:
        if queue.kind == BACKWARD:
            return 2 * (pipe.stages + index) - 1 - queue.stage
        first = index < pipe.stages - queue.stage
        return queue.stage + (index if first else 2 * index)

    return one_after_the_other(problem, slot)


def one_after_the_other(problem: PipelineProblem, slot: Slot) -> Schedule:
    """Return the schedule in which each pipe begins when the previous one has ended.

    slot: the turn of a queue's task of a pipe, by its number. It ignores the limit.
    """
    starts: Times = []
    ended = 0.0
    for pipe in problem.pipes:
        queues = queues_of(PipelineProblem((pipe,)))
        order = [
            [float(slot(pipe, queue, index)) for index in range(queue.tasks)] for queue in queues
        ]
        own = earliest_starts(queues, order)
        starts += [[ended + start for start in times] for times in own]
        ended += max(times[-1] + queue.seconds for queue, times in zip(queues, own, strict=True))
    return make_schedule(problem, starts)
