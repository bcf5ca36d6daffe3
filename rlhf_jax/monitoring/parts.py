"""Follow the parts of a stage's work on devices without blocking the dispatch."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from rlhf_jax.monitoring.trace import Span
from rlhf_jax.runtime.shards import owners_of
from rlhf_jax.sequences.batch import PackedSequences

# Returns the time at which a result was ready.
Future = concurrent.futures.Future[float]


class CallPart(NamedTuple):
    """Hold a dispatched part of a call."""

    call: str
    began: float  # when it was dispatched, by the clock of `time.perf_counter`
    rows: int  # samples
    tokens: int  # that are predicted


class PipelineTask(NamedTuple):
    """Hold a dispatched task of a pipeline."""

    call: str
    began: float  # when it was dispatched
    slice: int
    name: str
    after: str  # the name of the task whose result it waits for


@dataclasses.dataclass
class PhaseParts:
    """Hold an array of each dispatched part; it is ready when the part is."""

    of: int  # parts in all
    handed: list[jax.Array] = dataclasses.field(default_factory=list)
    record: Callable[[CallPart, jax.Array], None] = lambda part, result: None
    # receives tasks of pipelines, one by one; None: they are not recorded
    record_task: Callable[[PipelineTask, jax.Array], None] | None = None

    @property
    def done(self) -> int:
        """Count the finished parts."""
        # The type stubs of jax.Array lack the method.
        return sum(bool(cast(Any, array).is_ready()) for array in self.handed)

    def hand(self, call: str, began: float, result: jax.Array, batch: PackedSequences) -> None:
        """Record a dispatched part of a call, of a batch on the host."""
        self.handed.append(result)
        mask = np.asarray(batch.mask)
        # Segments count from 0 in each shard; sorting them would delay the next dispatch.
        rows = int((np.where(mask, batch.segment_ids, -1).max(axis=1, initial=-1) + 1).sum())
        self.record(CallPart(call, began, rows, tokens=int(mask.sum())), result)


class CallWatch:
    """Record when parts of calls finish, on separate threads; a context manager."""

    def __init__(self):
        self._pools: dict[str, concurrent.futures.ThreadPoolExecutor] = {}
        self._ends: list[tuple[CallPart, Future]] = []
        # of tasks: the future each waits for, if it is here, and its end
        self._tasks: list[tuple[PipelineTask, Future | None, Future]] = []
        self._last: dict[str, Future] = {}  # ends of tasks by name

    def __enter__(self) -> CallWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def follow(self, phase: PhaseParts, *, tasks: bool) -> None:
        """Follow the parts of a phase, and each task of pipelines if requested.

        Tasks cost memory, as results are held until they are ready.
        """
        phase.record = self.record
        phase.record_task = self.record_task if tasks else None

    def record(self, part: CallPart, result: jax.Array) -> None:
        """Wait for a part; those of one call finish in the order of dispatch."""
        if end := self._wait(part.call, result):
            self._ends.append((part, end))

    def record_task(self, task: PipelineTask, result: jax.Array) -> None:
        """Wait for a task of a pipeline; those of a slice finish in the order of dispatch."""
        if end := self._wait(f"slice {task.slice}", result):
            self._tasks.append((task, self._last.get(task.after), end))
            self._last[task.name] = end

    def _wait(self, line: str, result: jax.Array) -> Future | None:
        """Wait for a result after others of its lane; of several processes its first owner does.

        The result is freed once it is ready.
        """
        if owners_of(result.sharding)[0] != jax.process_index():
            return None
        if line not in self._pools:
            self._pools[line] = concurrent.futures.ThreadPoolExecutor(1, line)
        return self._pools[line].submit(_end_of, result)

    def spans(self, lanes: Callable[[str], Sequence[int]]) -> list[Span]:
        """Return the spans in the lanes of each call, once all is finished.

        Recorded tasks of pipelines replace the calls' parts in the lanes of their slices. A task
        begins when the task it waits for and the previous one have ended.
        """
        spans = []
        ends: dict[int, float] = {}
        with_tasks = {task.call for task, *_ in self._tasks}
        for part, end in self._ends:
            kind = part.call.rpartition("_")[2]
            ended = end.result()
            for lane in () if part.call in with_tasks else lanes(part.call):
                spans.append(Span(lane, kind, part.began, ended, part.rows, part.call, part.tokens))
        for task, ready, end in self._tasks:
            lane = lanes(task.call)[task.slice]
            began = max(task.began, ends.get(lane, 0.0), ready.result() if ready else 0.0)
            ends[lane] = max(began, end.result())
            spans.append(Span(lane, "training", began, ends[lane], 0, task.call, 0))
        return spans


def _end_of(result: jax.Array) -> float:
    """Return when a result was ready; a failure is raised where the result is read."""
    with contextlib.suppress(Exception):
        jax.block_until_ready(result)
    return time.perf_counter()
