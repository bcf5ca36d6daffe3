"""Say where the seconds of a run went: by phase, and how many of them compiled programs."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.monitoring
import jax.profiler

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
        self._annotation = jax.profiler.TraceAnnotation(phase)
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._compiling: dict[str, float] = collections.defaultdict(float)
        self._programs: list[str] = []  # that compile now, on any thread

    def __enter__(self) -> PhaseClock:
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        jax.monitoring.register_scalar_listener(self._hear_begin)
        self._annotation.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)
        jax.monitoring.unregister_scalar_listener(self._hear_begin)
        self._annotation.__exit__(None, None, None)

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with the same; a profile names it."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        if phase != self.phase:
            self._annotation.__exit__(None, None, None)
            self._annotation = jax.profiler.TraceAnnotation(phase)
            self._annotation.__enter__()
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

    def program(self) -> str:
        """Return the name of a program that compiles now, '' where none does."""
        return self._programs[-1] if self._programs else ""

    def _hear_begin(self, event: str, value: float | int, **told: Any) -> None:
        if event == COMPILATION:
            self._programs.append(_name(told))

    def _hear(self, event: str, duration_secs: float, **told: Any) -> None:
        if event == COMPILATION:
            self._compiling[self.phase] += duration_secs
            with contextlib.suppress(ValueError):  # it began before this clock listened
                self._programs.remove(_name(told))


def _name(told: Mapping[str, Any]) -> str:
    """Return the name of the program that jax tells of: of jit(update) it is update."""
    name = str(told.get("fun_name", "a program"))
    return name.removeprefix("jit(").removesuffix(")") if name.startswith("jit(") else name


@contextlib.contextmanager
def timed(
    phase: str, metrics: dict[str, float], observe: Callable[[str, None], None]
) -> Iterator[None]:
    """Say that a phase begins, and add the seconds that it takes to `PHASE/seconds`."""
    observe(phase, None)
    start = time.perf_counter()
    yield
    name = f"{phase}/seconds"
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
