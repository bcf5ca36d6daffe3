"""Check a schedule against its problem, from the table of tasks alone."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from rlhf_jax.pipeline.problem import BACKWARD, FORWARD, RELATIVE_ERROR, PipelineProblem
from rlhf_jax.pipeline.schedule import Schedule

TASK_KINDS = {FORWARD: "forward", BACKWARD: "backward"}


class _Name(NamedTuple):
    """Name a task."""

    pipe: int
    copy: int
    stage: int
    micro_batch: int
    kind: int

    def __str__(self) -> str:
        kind = TASK_KINDS.get(self.kind, f"kind {self.kind}")
        return (
            f"the {kind} of micro-batch {self.micro_batch} at stage {self.stage} of copy "
            f"{self.copy} of pipe {self.pipe}"
        )


class _Span(NamedTuple):
    """Hold where and when a task runs."""

    node: int
    start: float
    end: float


_Spans = dict[_Name, _Span]


def check(problem: PipelineProblem, schedule: Schedule) -> None:
    """Raise ValueError, with a sentence that describes the fault, if a schedule is not legal."""
    spans = _read_spans(schedule.tasks)
    slack = RELATIVE_ERROR * max(schedule.makespan, 1.0)
    _check_tasks(problem, spans, slack)
    _check_dependencies(problem, spans, slack)
    _check_nodes(spans, slack)
    _check_memory(problem, schedule, spans)
    end = max(span.end for span in spans.values())
    if abs(end - schedule.makespan) > slack:
        raise ValueError(f"The last task ends at {end:g}, not at {schedule.makespan:g}.")
    if schedule.makespan < schedule.bound - slack:
        raise ValueError(f"The makespan {end:g} is below its bound {schedule.bound:g}.")


def _read_spans(tasks: np.ndarray) -> _Spans:
    """Return when each task of a table runs; raise ValueError if one is there twice."""
    spans: _Spans = {}
    for row in tasks.tolist():
        name = _Name(*row[:5])
        if name in spans:
            raise ValueError(f"There is {name} twice.")
        node, start, seconds = row[5:]
        spans[name] = _Span(node, start, start + seconds)
    return spans


def _check_tasks(problem: PipelineProblem, spans: _Spans, slack: float) -> None:
    """Raise ValueError unless every task is there, on its node and as long as it takes."""
    expected = {
        _Name(index, copy, stage, micro_batch, kind): (nodes[stage], seconds)
        for index, pipe in enumerate(problem.pipes)
        for copy, nodes in enumerate(pipe.nodes)
        for kind, times in ((FORWARD, pipe.forward), (BACKWARD, pipe.backward))
        for stage, seconds in enumerate(times)
        for micro_batch in range(pipe.micro_batches)
    }
    for name in spans.keys() ^ expected.keys():
        wrong = "is missing" if name in expected else "belongs to no pipe"
        raise ValueError(f"There {wrong} {name}.")
    for name, (node, seconds) in expected.items():
        span = spans[name]
        if span.node != node:
            raise ValueError(f"Node {span.node} does {name}, which belongs on node {node}.")
        # False for NaN, too.
        timed = abs(span.end - span.start - seconds) <= slack and span.start >= -slack
        if not timed:
            raise ValueError(
                f"From {span.start:g} to {span.end:g} runs {name}, which takes {seconds:g} from 0 "
                "on."
            )


def _check_dependencies(problem: PipelineProblem, spans: _Spans, slack: float) -> None:
    """Raise ValueError if a task begins before its inputs are ready.

    Those are the same micro-batch in the stage before it, and the micro-batch before in its own.
    """
    for name, span in spans.items():
        last = problem.pipes[name.pipe].stages - 1
        needed = []
        if name.micro_batch:
            needed.append(name._replace(micro_batch=name.micro_batch - 1))
        if name.kind == FORWARD and name.stage:
            needed.append(name._replace(stage=name.stage - 1))
        if name.kind == BACKWARD:
            following = name._replace(stage=name.stage + 1)
            needed.append(following if name.stage < last else name._replace(kind=FORWARD))
        for other in needed:
            if spans[other].end > span.start + slack:
                raise ValueError(
                    f"At {span.start:g} begins {name}, before {other} has ended, at "
                    f"{spans[other].end:g}."
                )


def _check_nodes(spans: _Spans, slack: float) -> None:
    """Raise ValueError if a node does two tasks at once."""
    latest: dict[int, _Name] = {}
    for name in sorted(spans, key=lambda one: spans[one].start):
        span = spans[name]
        before = latest.get(span.node)
        if before is not None and spans[before].end > span.start + slack:
            raise ValueError(f"At {span.start:g} node {span.node} does both {before} and {name}.")
        latest[span.node] = name


def _check_memory(problem: PipelineProblem, schedule: Schedule, spans: _Spans) -> None:
    """Raise ValueError if a node keeps more than the limit, or another peak than reported."""
    level: dict[int, float] = collections.defaultdict(float)
    peak: dict[int, float] = collections.defaultdict(float)
    changes = []
    for name, span in spans.items():
        kept = problem.pipes[name.pipe].kept[name.stage]
        # Halfway through a task, so that rounded ends and starts keep their order.
        middle = (span.start + span.end) / 2
        changes.append((middle, span.node, kept if name.kind == FORWARD else -kept))
    for when, node, change in sorted(changes):
        level[node] += change
        peak[node] = max(peak[node], level[node])
        if problem.limit is not None and level[node] > problem.limit * (1 + RELATIVE_ERROR):
            raise ValueError(
                f"Node {node} keeps {level[node]:g} at {when:g}, above the limit of "
                f"{problem.limit:g}."
            )
    reported = schedule.peak.tolist()
    if len(reported) != problem.nodes or not np.allclose(
        reported, [peak[node] for node in range(len(reported))]
    ):
        raise ValueError("The peaks are not those of the tasks.")
