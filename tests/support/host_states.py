"""What the host remembers at the start of a run."""

from __future__ import annotations

import dataclasses

from rlhf_jax.generation.history import History
from rlhf_jax.state import GenerationState, HostState, SpeculationState


def host_state(next_id: int = 0, **changes) -> HostState:
    kind = SpeculationState(History(8))
    generation = GenerationState(kind, kind, next_id)
    return dataclasses.replace(HostState(0, {"epoch": 0}, generation, 0.1, 0.1), **changes)
