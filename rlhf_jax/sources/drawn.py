"""The interface of a source of samples, and the samples of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlhf_jax.inference.scoring import Scored
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.state import HostState, Observer, RunState


@dataclasses.dataclass
class Drawn:
    """Hold the samples of a step; a source may add facts once the step has learned."""

    # on the host; generated samples have columns `rewards`, as trained on, and `ended`
    batch: Sequences
    # the host state after the draw
    host: HostState
    metrics: dict[str, float]
    # one row per sample, for display
    table: list[dict[str, Any]]
    # by the clock of `time.perf_counter`
    began: float
    # work of the slices of all processes, in seconds since then
    spans: list[Span] = dataclasses.field(default_factory=list)
    # by sample id, scores that slices computed during generation
    scored: Mapping[int, Scored] = dataclasses.field(default_factory=dict)
    # updates since the weights of prefetched samples; None otherwise
    behind: int | None = None
    # raises background errors, before the models are donated
    check: Callable[[], None] | None = None


class SampleSource(Protocol):
    """Provide the samples of each step, without state besides `HostState`."""

    def draw(self, state: RunState, observe: Observer) -> AbstractContextManager[Drawn]:
        """Draw the samples of the next step, which learns from them within the context."""
        ...

    def longest(self, host: HostState) -> Sequences:
        """Return sequences of the largest possible size, with columns of zeros."""
        ...
