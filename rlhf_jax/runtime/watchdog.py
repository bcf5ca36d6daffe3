"""Report which phase of a run stands still, for how long, and its stacks; end nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """Hold the last sign of life: the phase it came from, and its time in seconds of the clock."""

    phase: str
    at: float


class Seen(NamedTuple):
    """Hold the state of the watchdog at its last check.

    `due` is the silence, in seconds after the beat, after which it reports next.
    """

    beat: Beat
    due: float


def look(
    seen: Seen, beat: Beat, now: float, seconds: float, program: str = ""
) -> tuple[Seen, list[str]]:
    """Check the last beat at the time `now`; return the new state and sentences to print.

    A silence is reported after `seconds`, twice that, four times that and so on, and once more when
    it ends. `program` is the name of a program that compiles meanwhile.
    """
    sentences = []
    if beat != seen.beat:
        if seen.due > seconds:
            silence = format_duration(beat.at - seen.beat.at)
            sentences.append(f"{seen.beat.phase} moves again: it stood still for {silence}.")
        seen = Seen(beat, seconds)
    silence = now - beat.at
    due = seen.due
    if silence >= due and program:
        sentences.append(
            f"{beat.phase} waits for {program} to compile, for {format_duration(silence)} so far."
        )
    elif silence >= due:
        sentences.append(
            f"{beat.phase} stands still: nothing has happened for {format_duration(silence)}."
        )
    while due <= silence:
        due *= 2
    return Seen(beat, due), sentences


def format_duration(seconds: float) -> str:
    """Format a duration: 8.5 s, 5 min 00 s, 2 h 05 min."""
    whole = round(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Watchdog:
    """Watch a run from a thread, and report long silences.

    Use as `with Watchdog(300, print) as watchdog: watchdog.beat("generation")`. `say` receives a
    sentence, in that thread, after a silence of `seconds`; 0 is off. `program` returns the name of
    the compiling program, '' for none. The stacks of all threads at the first standstill are
    written to the file `stacks`. `clock` returns seconds.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        program: Callable[[], str] = lambda: "",
        stacks: Path | None = None,
    ):
        if seconds < 0:
            raise ValueError(
                f"A watchdog cannot wait {seconds} seconds; give it more, or 0 for none."
            )
        self._seconds = seconds
        self._say = say
        self._clock = clock
        self._program = program
        self._stacks = stacks
        self._beat = Beat("starting", clock())
        self._reported = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._beat = Beat("starting", self._clock())
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._wake.set()
        if self._seconds:
            # A `say` that hangs must not delay the end of a run.
            self._thread.join(timeout=1)

    def beat(self, phase: str) -> None:
        """Note that `phase` is alive; cheap enough for every round."""
        self._beat = Beat(phase, self._clock())
        if self._reported:
            self._wake.set()

    def _watch(self) -> None:
        """Check whenever a sentence may be due, until the run ends."""
        seen = Seen(self._beat, self._seconds)
        while not self._stopped:
            program = self._program()
            seen, sentences = look(seen, self._beat, self._clock(), self._seconds, program)
            for sentence in sentences:
                self._say(sentence)
            if sentences and not program and self._stacks:
                with contextlib.suppress(OSError), self._stacks.open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                    self._say(f"Where its threads are is in {self._stacks}.")
                self._stacks = None
            self._reported = seen.due > self._seconds
            # A beat that came meanwhile may not have seen `_reported`, and so woke no one.
            if self._beat == seen.beat:
                self._wake.wait(max(seen.beat.at + seen.due - self._clock(), 0.001))
            self._wake.clear()
