"""Handle SIGTERM, SIGHUP and Ctrl-C: the first stops the run in order, a later one at once."""

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
# Seconds in which a second signal counts as the same one: launchers send a signal to the group of
# processes, and to the process itself.
ECHO = 1.0


@messages.register_error
class Stopped(Exception):
    """End a run that received a signal.

    `name` is the signal's, `exit_code` the shell's code for it.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped by {self.name}"


class Stop:
    """Hold the signal that the run received, or None."""

    def __init__(self):
        self.signal: int | None = None

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal is not None:
            raise Stopped(self.signal)


def write_to_stderr(line: str) -> None:
    """Write a line to stderr past its buffer, which the interrupted code may hold.

    A closed stderr is no error.
    """
    # A live panel on a terminal erases its own three lines above the cursor when it is drawn again.
    text = f"\n{line}\n\n\n" if os.isatty(screen()) else f"{line}\n"
    with contextlib.suppress(OSError):
        os.write(screen(), text.encode())


@contextlib.contextmanager
def listen_for_signals(say: Callable[[str], object] = write_to_stderr) -> Iterator[Stop]:
    """Handle the first signal within the context as a request; later ones by the old handlers.

    The first sets `Stop.signal` and prints one line with `say`. Those that follow it within ECHO
    seconds are taken for its echo. SIGHUP stays ignored under `nohup`.
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
