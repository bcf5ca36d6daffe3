"""Order tasks in queues: every copy's micro-batches pass each stage first in, first out.

A queue holds the tasks of one kind of one stage of one copy, one per micro-batch. Queues of a copy
are a chain: forwards of its stages in order, then backwards in the opposite order.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from rlhf_jax.pipeline.problem import BACKWARD, FORWARD, Pipe, PipelineProblem

Times = list[list[float]]  # [queues][micro-batches]


class Queue(NamedTuple):
    """Describe the tasks of one kind of one stage of one copy."""

    pipe: int
    copy: int
    stage: int
    kind: int  # FORWARD or BACKWARD
    node: int
    tasks: int  # one for each micro-batch of the copy
    seconds: float  # of each, in the problem's unit of time
    kept: float  # by each, from the start of a forward to the end of its backward
    before: int | None  # the queue of the same copy that a micro-batch comes from
    after: int | None  # and the one that it goes to
    partner: int  # the queue of the other kind of the same stage


def queues_of(problem: PipelineProblem) -> list[Queue]:
    """Return the queues of all pipes, those of a copy in the order of its chain."""
    queues: list[Queue] = []
    for index, pipe in enumerate(problem.pipes):
        for copy in range(len(pipe.nodes)):
            queues += _chain(index, pipe, copy, first=len(queues))
    return queues


def _chain(index: int, pipe: Pipe, copy: int, first: int) -> list[Queue]:
    """Return the queues of one copy; first: the index of its first one among all queues."""
    stages = range(pipe.stages)
    chain = [(FORWARD, stage) for stage in stages] + [(BACKWARD, stage) for stage in stages[::-1]]
    last = first + len(chain) - 1
    return [
        Queue(
            pipe=index,
            copy=copy,
            stage=stage,
            kind=kind,
            node=pipe.nodes[copy][stage],
            tasks=pipe.micro_batches,
            seconds=(pipe.backward if kind == BACKWARD else pipe.forward)[stage],
            kept=pipe.kept[stage],
            before=place - 1 if place > first else None,
            after=place + 1 if place < last else None,
            partner=first + last - place,
        )
        for place, (kind, stage) in enumerate(chain, start=first)
    ]


def turn_problem(problem: PipelineProblem) -> PipelineProblem:
    """Return the problem reversed in time.

    Backwards become forwards, and the memory of a micro-batch is kept for just as long.
    """
    turned = [
        dataclasses.replace(pipe, forward=pipe.backward, backward=pipe.forward)
        for pipe in problem.pipes
    ]
    return dataclasses.replace(problem, pipes=tuple(turned))


def turn_times(queues: list[Queue], starts: Times) -> Times:
    """Return how long before the end tasks begin, for starts in the reversed problem.

    A queue's tasks are there those of its partner, the last micro-batch first, and take as long.
    """
    return [
        [start + queue.seconds for start in reversed(starts[queue.partner])] for queue in queues
    ]


def tails_of(queues: list[Queue]) -> Times:
    """Return the least time from the start of each task to the end of all, by chain and queue."""
    tails: Times = [[] for _ in queues]
    for place, queue in reversed(list(enumerate(queues))):
        left = [0.0] * queue.tasks if queue.after is None else tails[queue.after]
        longest = 0.0
        for then in reversed(left):
            longest = max(longest, then) + queue.seconds
            tails[place].append(longest)
        tails[place].reverse()
    return tails


def bound(problem: PipelineProblem) -> float:
    """Return a lower bound of the makespan, with or without a memory limit.

    Some tasks of a node take at least the least time before any of them, their own times, and the
    least time after any of them (Carlier, 1982); the bound is the largest such sum over nodes and
    sets.
    """
    queues = queues_of(problem)
    tails = tails_of(queues)
    turned = tails_of(queues_of(turn_problem(problem)))
    least = 0.0
    for node in range(problem.nodes):
        here = [place for place, queue in enumerate(queues) if queue.node == node]
        if here:
            seconds = np.concatenate([[queues[q].seconds] * queues[q].tasks for q in here])
            before = np.concatenate([turned[queues[q].partner][::-1] for q in here]) - seconds
            after = np.concatenate([tails[q] for q in here]) - seconds
            least = max(least, _bound_of_node(before, seconds, after))
    return least


def _bound_of_node(before: np.ndarray, seconds: np.ndarray, after: np.ndarray) -> float:
    """Return the largest sum over the relevant sets of tasks [n] of a node.

    Those are, for each pair of times, the tasks with no less before and no less after them.
    """
    earliest, row = np.unique(before, return_inverse=True)
    shortest, column = np.unique(after, return_inverse=True)
    work = np.zeros((len(earliest), len(shortest)))
    np.add.at(work, (row, column), seconds)
    work = work[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    sums = earliest[:, None] + work + shortest
    return float(sums[work > 0].max())
