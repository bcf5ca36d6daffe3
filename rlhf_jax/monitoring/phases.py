"""Measure the seconds of a run by phase, and how many of them compiled programs."""

from __future__ import annotations

import collections
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.monitoring
import jax.profiler

# Readable names of programs by their functions; others keep their own names.
PROGRAMS = {
    "accumulate": "gradients",
    "admit": "admission of prompts",
    "apply": "the optimizer's step",
    "look_back": "a check of drafts",
    "overwrite": "texts to draft from",
    "run_round": "a round",
    "score_packed": "log-probabilities",
    "take": "a smaller batch",
}
COMPILATION = "/jax/core/compile/backend_compile_duration"  # jax's name; of the disk cache, too


class PhaseSeconds(NamedTuple):
    """Hold the seconds of one phase, and those in which any program was compiling."""

    phase: str
    seconds: float
    compiling: float


class PhaseClock:
    """Sum the seconds of each phase of a run; a context manager, which observes compilations."""

    def __init__(self, phase: str):
        self.phase = phase
        self._since = time.perf_counter()
        self._annotation = jax.profiler.TraceAnnotation(phase)
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._compiling: dict[str, float] = collections.defaultdict(float)
        self._programs: dict[int, str] = {}  # programs compiling now, by thread
        self._compiled: float = 0.0  # time up to which compiling seconds are counted
        # seconds in which the thread of the run compiled, or waited for others that did
        self.held_up: float = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> PhaseClock:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        jax.monitoring.register_scalar_listener(self._on_begin)
        self._annotation.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        jax.monitoring.unregister_scalar_listener(self._on_begin)
        self._annotation.__exit__(None, None, None)

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with the same; a profile names it."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        with self._lock:
            self._count_compiling(now)
        if phase != self.phase:
            self._annotation.__exit__(None, None, None)
            self._annotation = jax.profiler.TraceAnnotation(phase)
            self._annotation.__enter__()
        self.phase = phase
        self._since = now

    def seconds(self) -> list[PhaseSeconds]:
        """Return the seconds of each phase until now, the longest first."""
        self.enter(self.phase)
        phases = [
            PhaseSeconds(phase, seconds, self._compiling[phase])
            for phase, seconds in self._seconds.items()
        ]
        return sorted(phases, key=lambda phase: -phase.seconds)

    def take_held_up(self) -> float:
        """Return the seconds of `held_up` since the last call."""
        held_up = self.held_up
        self.held_up = 0.0
        return held_up

    def program(self) -> str:
        """Return the name of a program that compiles now; '' if none does."""
        return next(reversed(list(self._programs.values())), "")

    def _on_begin(self, event: str, value: float | int, **details: Any) -> None:
        if event == COMPILATION:
            with self._lock:
                self._count_compiling(time.perf_counter())
                # for jit(_take) it is take; a failed compilation never reports its end
                name = re.sub(r"^jit\(_*(.*)\)$", r"\1", str(details.get("fun_name", "a program")))
                readable = PROGRAMS.get(name, name.replace("_", " "))
                self._programs[threading.get_ident()] = readable

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        if event == COMPILATION:
            with self._lock:
                self._count_compiling(time.perf_counter())
                self._programs.pop(threading.get_ident(), None)
                if threading.current_thread() is threading.main_thread():
                    self.held_up += duration_secs

    def _count_compiling(self, now: float) -> None:
        """Add the seconds since the last call if programs were compiling."""
        if self._programs:
            self._compiling[self.phase] += now - self._compiled
        self._compiled = now


@contextlib.contextmanager
def timed(
    phase: str, metrics: dict[str, float], observe: Callable[[str, None], None]
) -> Iterator[None]:
    """Announce a phase, and add its seconds to `PHASE/seconds`."""
    observe(phase, None)
    start = time.perf_counter()
    yield
    name = f"{phase}/seconds"
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
