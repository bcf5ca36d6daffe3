"""Follow the parts of a stage's work on devices, without holding up who hands them out."""

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
from rlhf_jax.types import Array, PackedBatch


class CallPart(NamedTuple):
    """Hold a part of a call that was handed to its devices."""

    call: str
    began: float  # when it was dispatched, by the clock of `time.perf_counter`
    result: Array
    rows: int  # samples
    tokens: int  # that are predicted


@dataclasses.dataclass
class PhaseParts:
    """Hold an array of each part that was handed to the devices; it is ready when the part is."""

    of: int  # parts in all
    handed: list[Array] = dataclasses.field(default_factory=list)
    heard: Callable[[CallPart], None] = lambda part: None

    @property
    def done(self) -> int:
        """Count the parts that are finished."""
        # The type stubs of jax.Array lack the method.
        return sum(bool(cast(Any, array).is_ready()) for array in self.handed)

    def hand(self, call: str, began: float, result: Array, batch: PackedBatch) -> None:
        """Note a part of a call, of a batch on the host, whose result is on its way."""
        self.handed.append(result)
        mask = np.asarray(batch.mask)
        # Owners count from 0 in each shard; to sort them would hold up what is dispatched next.
        rows = int((np.where(mask, batch.owner, -1).max(axis=1, initial=-1) + 1).sum())
        self.heard(CallPart(call, began, result, rows, tokens=int(mask.sum())))


class CallWatch:
    """Note when parts of calls are finished, on threads of its own; a context manager."""

    def __init__(self):
        self._pools: dict[str, concurrent.futures.ThreadPoolExecutor] = {}
        self._ends: list[tuple[CallPart, concurrent.futures.Future[float]]] = []

    def __enter__(self) -> CallWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def hear(self, part: CallPart) -> None:
        """Wait for a part; those of one call are finished in the order they were handed."""
        if part.call not in self._pools:
            self._pools[part.call] = concurrent.futures.ThreadPoolExecutor(1, part.call)
        self._ends.append((part, self._pools[part.call].submit(_end_of, part.result)))

    def spans(self, lanes: Callable[[str], Sequence[int]]) -> list[Span]:
        """Return what was done in the lanes of each call, once all is finished."""
        return [
            Span(
                lane,
                part.call.rpartition("_")[2],
                part.began,
                ended=end.result(),
                rows=part.rows,
                label=part.call,
                amount=part.tokens,
            )
            for part, end in self._ends
            for lane in lanes(part.call)
        ]


def _end_of(result: Array) -> float:
    """Return when a result was there; one that failed is told where it is read."""
    with contextlib.suppress(Exception):
        jax.block_until_ready(result)
    return time.perf_counter()
