"""Say which phase of a run stands still, for how long, and where its threads are; end nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Beat(NamedTuple):
    """Hold the last sign of life: the phase that gave it, and when, in seconds of the clock."""

    phase: str
    at: float


class Seen(NamedTuple):
    """Hold what the watchdog last looked at.

    `due` is the silence, in seconds after the beat, after which it speaks next.
    """

    beat: Beat
    due: float


def look(
    seen: Seen, beat: Beat, now: float, seconds: float, program: str = ""
) -> tuple[Seen, list[str]]:
    """Look at the last beat at the time `now`, and return what is seen and the sentences to say.

    A silence is spoken of after `seconds`, twice that, four times that and so on, and once more
    when it ends. `program` is the name of one that compiles meanwhile, which takes its time.
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
    """Write a duration to read: 8.5 s, 5 min 00 s, 2 h 05 min."""
    whole = round(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Watchdog:
    """Watch a run from a thread, and say so when nothing was heard of it for long.

    Use as `with Watchdog(300, print) as watchdog: watchdog.beat("generation")`. `say` gets a
    sentence, from that thread, once nothing was heard for `seconds`; 0 is off. `program` gives the
    name of one that compiles, '' for none. Where all threads were at the first standstill is
    written to the file `stacks`. `clock` gives seconds.
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
            # A `say` that hangs must not hold up the end of a run.
            self._thread.join(timeout=1)

    def beat(self, phase: str) -> None:
        """Note that `phase` is alive; cheap enough for every round."""
        self._beat = Beat(phase, self._clock())
        if self._reported:
            self._wake.set()

    def _watch(self) -> None:
        """Look whenever a sentence may be due, until the run ends."""
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
            # A beat that came meanwhile may not have seen `_reported`, and so woke nobody.
            if self._beat == seen.beat:
                self._wake.wait(max(seen.beat.at + seen.due - self._clock(), 0.001))
            self._wake.clear()
