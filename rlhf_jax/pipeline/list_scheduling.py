"""Schedule tasks one by one: each node takes the most urgent task that it could do next.

The next node is always the one that could end a task first (Giffler and Thompson, 1960). So all
tasks that it could begin before then are known, and no later task is worth waiting for.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from rlhf_jax.pipeline.problem import FORWARD, RELATIVE_ERROR
from rlhf_jax.pipeline.queues import Queue, Times


class Rule(NamedTuple):
    """Hold the rule by which nodes choose among tasks, besides urgency."""

    # Tasks that a node may choose: those that could begin by this share of the time from when one
    # could first begin to when one could first end. With 0 no node waits while there is a task.
    patience: float
    favoured: int  # the pipe for which other pipes leave memory, the next ones in rotation after it


class _Choice(NamedTuple):
    """Hold a task that a node may do next; the largest one is best."""

    urgency: float
    queue: int
    begins: float
    ends: float


@dataclasses.dataclass
class _Pass:
    """Hold a schedule under construction."""

    queues: list[Queue]
    urgency: Times
    rule: Rule
    limit: float
    here: list[list[int]]  # [nodes] the queues of each
    yields_to: list[list[int]]  # [queues] forwards for which a forward leaves memory on its node
    starts: Times  # of the tasks that are scheduled
    arrived: Times  # times from which further tasks may begin, as far as known
    free: list[float]  # [nodes] time from which each is idle
    level: list[float]  # [nodes] memory kept then
    held: list[int]  # [queues] of a queue of forwards: micro-batches kept then

    def fits(self, place: int) -> bool:
        """Return whether there is memory for the next task of a queue.

        A pipe must leave room for a first micro-batch of each pipe before it. So the favoured pipe
        never waits for another, nor the second except for the first: they cannot block each other.
        """
        queue = self.queues[place]
        if queue.kind != FORWARD or math.isinf(self.limit):
            return True
        promised = sum(
            self.queues[other].kept
            for other in self.yields_to[place]
            if not self.held[other] and len(self.starts[other]) < self.queues[other].tasks
        )
        return self.level[queue.node] + queue.kept + promised <= self.limit

    def choices(self, node: int) -> list[_Choice]:
        """Return the possible next tasks of a node, as far as known."""
        choices = []
        for place in self.here[node]:
            done = len(self.starts[place])
            if done < len(self.arrived[place]) and self.fits(place):
                begins = max(self.free[node], self.arrived[place][done])
                ends = begins + self.queues[place].seconds
                choices.append(_Choice(self.urgency[place][done], place, begins, ends))
        return choices

    def choose(self, choices: list[_Choice]) -> _Choice:
        """Return the most urgent choice that is worth waiting for."""
        begins = min(choice.begins for choice in choices)
        ends = min(choice.ends for choice in choices)
        latest = begins + self.rule.patience * (ends - begins)
        return max(one for one in choices if one.begins <= latest and one.begins < ends)

    def append(self, choice: _Choice) -> list[int]:
        """Schedule a task; return the nodes whose choices change."""
        place = choice.queue
        queue = self.queues[place]
        self.starts[place].append(choice.begins)
        self.free[queue.node] = choice.ends
        if queue.kind == FORWARD:
            self.level[queue.node] += queue.kept
            self.held[place] += 1
        else:
            self.level[queue.node] -= queue.kept
            self.held[queue.partner] -= 1
        if queue.after is None:
            return [queue.node]
        self.arrived[queue.after].append(choice.ends)
        after = self.queues[queue.after].node
        return [queue.node] if after == queue.node else [queue.node, after]


def list_schedule(queues: list[Queue], urgency: Times, rule: Rule, limit: float | None) -> Times:
    """Return the starts of all tasks; urgency: by task, larger ones are taken sooner."""
    state = _begin_pass(queues, urgency, rule, math.inf if limit is None else limit)
    nodes = range(len(state.here))
    choices: list[list[_Choice]] = [[] for _ in nodes]
    version = [0 for _ in nodes]  # of a node's choices
    events: list[tuple[float, int, int]] = []  # (first end, node, version of its choices)
    changed: Iterable[int] = nodes
    while True:
        for node in changed:
            version[node] += 1
            choices[node] = state.choices(node)
            if choices[node]:
                first_end = min(choice.ends for choice in choices[node])
                heapq.heappush(events, (first_end, node, version[node]))
        # An event of earlier choices of its node is void.
        while events and events[0][2] < version[events[0][1]]:
            heapq.heappop(events)
        if not events:
            return state.starts
        _, node, _ = heapq.heappop(events)
        changed = state.append(state.choose(choices[node]))


def _begin_pass(queues: list[Queue], urgency: Times, rule: Rule, limit: float) -> _Pass:
    """Return a pass in which nothing has begun."""
    nodes = 1 + max(queue.node for queue in queues)
    pipes = 1 + max(queue.pipe for queue in queues)
    here = [[q for q, queue in enumerate(queues) if queue.node == node] for node in range(nodes)]
    rank = [(pipe - rule.favoured) % pipes for pipe in range(pipes)]
    yields_to = [
        [
            other
            for other in here[queue.node]
            if queues[other].kind == FORWARD and rank[queues[other].pipe] < rank[queue.pipe]
        ]
        for queue in queues
    ]
    return _Pass(
        queues=queues,
        urgency=urgency,
        rule=rule,
        limit=limit * (1 + RELATIVE_ERROR),
        here=here,
        yields_to=yields_to,
        starts=[[] for _ in queues],
        arrived=[[0.0] * queue.tasks if queue.before is None else [] for queue in queues],
        free=[0.0] * nodes,
        level=[0.0] * nodes,
        held=[0] * len(queues),
    )
