"""Say where the seconds of a run went: by phase, and how many of them compiled programs."""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple

import jax.monitoring

COMPILATION = "/jax/core/compile/backend_compile_duration"  # jax's name; of the disk cache, too


class PhaseSeconds(NamedTuple):
    """Hold the seconds of one phase, and how long programs were compiled in it or beside it."""

    phase: str
    seconds: float
    compiling: float


class PhaseClock:
    """Sum the seconds of each phase of a run; a context manager, which hears of compilations."""

    def __init__(self, phase: str):
        self.phase = phase
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._compiling: dict[str, float] = collections.defaultdict(float)

    def __enter__(self) -> PhaseClock:
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with the same."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        self.phase = phase
        self._since = now

    def seconds(self) -> list[PhaseSeconds]:
        """Return what each phase took until now, the longest first."""
        self.enter(self.phase)
        phases = [
            PhaseSeconds(phase, seconds, self._compiling[phase])
            for phase, seconds in self._seconds.items()
        ]
        return sorted(phases, key=lambda phase: -phase.seconds)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILATION:
            self._compiling[self.phase] += duration_secs
