"""What a source of samples is, and what it gives a step to learn from."""

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
    """Hold what a step learns from; a source may complete it when the step has learned."""

    # of the host; generated samples have columns `rewards`, as they are learned from, and `ended`
    batch: Sequences
    # what the host remembers once all were drawn
    host: HostState
    metrics: dict[str, float]
    # one row a sample, for people to read
    table: list[dict[str, Any]]
    # by the clock of `time.perf_counter`
    began: float
    # what the slices of all processes did, in seconds since then
    spans: list[Span] = dataclasses.field(default_factory=list)
    # by sample id, what slices had time to score beside generation
    scored: Mapping[int, Scored] = dataclasses.field(default_factory=dict)
    # updates since the weights that drew samples ahead; None of others
    behind: int | None = None
    # raises what went wrong beside, before the models are used up
    check: Callable[[], None] | None = None


class SampleSource(Protocol):
    """Give each step its samples; hold no state beside that of `HostState`."""

    def draw(self, state: RunState, observe: Observer) -> AbstractContextManager[Drawn]:
        """Draw the samples of the next step, which learns from them within the context."""
        ...

    def longest(self, host: HostState) -> Sequences:
        """Return sequences as long as the next ones may be, with their columns of zeros."""
        ...
