"""Answer SIGTERM, SIGHUP and Ctrl-C: the first asks the run to stop, a later stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rlhf_jax.runtime import messages
from rlhf_jax.runtime.native_output import screen

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKED = "Stopping at the next safe place; once more stops at once."
# Seconds after a signal in which another is the same one: launchers send a signal to the group of
# processes, and to the process itself too.
ECHO = 1.0


@messages.register_error
class Stopped(Exception):
    """End a run that a signal asked to stop.

    `name` is the signal's, `exit_code` what a shell reports for it.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped by {self.name}"


class Stop:
    """Hold the signal that has asked the run to stop, or None."""

    def __init__(self):
        self.signal: int | None = None

    def check(self) -> None:
        """Raise `Stopped` where a signal has come."""
        if self.signal is not None:
            raise Stopped(self.signal)


def write_to_stderr(line: str) -> None:
    """Write a line to stderr past its buffer, which what the signal interrupted may hold.

    A stderr that is closed is no error.
    """
    # A live panel on a terminal erases its own three lines above the cursor when it is drawn again.
    text = f"\n{line}\n\n\n" if os.isatty(screen()) else f"{line}\n"
    with contextlib.suppress(OSError):
        os.write(screen(), text.encode())


@contextlib.contextmanager
def listen_for_signals(say: Callable[[str], object] = write_to_stderr) -> Iterator[Stop]:
    """Let the first signal within the context ask to stop, and give later ones to the old handlers.

    The first sets `Stop.signal` and is answered with one line, which `say` gets. Those that follow
    it within ECHO seconds are taken for its echo. SIGHUP stays ignored where `nohup` had it so.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    first = 0.0

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal first
        if stop.signal is None:
            stop.signal = number
            first = time.monotonic()
            say(ASKED)
        elif time.monotonic() - first > ECHO:
            restore()
            os.kill(os.getpid(), number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
