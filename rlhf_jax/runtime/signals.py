"""Answer SIGTERM and Ctrl-C: the first asks the run to stop at the next safe place.

A later one stops it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from rlhf_jax.runtime import messages

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ASKED = "Stopping at the next safe place; once more stops at once."
# seconds after a signal in which another is the same one: launchers send it to the group and the
# process
ECHO = 1.0


@messages.register_error
class Stopped(Exception):
    """Say that a run was asked to stop.

    `exit_code` is the shell's for the signal, `name` the signal's own.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped by {self.name}"


class Stop:
    """Hold whether a signal has asked to stop."""

    def __init__(self):
        self.signal: int | None = None

    def check(self) -> None:
        """Raise `Stopped` where a signal has come."""
        if self.signal is not None:
            raise Stopped(self.signal)


def tell(line: str) -> None:
    """Write a line to stderr past its buffer, which what the signal interrupted may hold."""
    # A live panel on a terminal erases its own three lines above the cursor when it is drawn again.
    text = f"\n{line}\n\n\n" if os.isatty(2) else f"{line}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


@contextlib.contextmanager
def listening(say: Callable[[str], object] = tell) -> Iterator[Stop]:
    """Set `Stop.signal` at a first signal, within the context, and answer it with a line.

    The next, unless it comes within ECHO seconds, is given to the handlers from before.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    first = 0.0

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, _) -> None:
        nonlocal first
        if stop.signal is None:
            stop.signal = number
            first = time.monotonic()
            say(ASKED)
        elif time.monotonic() - first > ECHO:
            restore()
            os.kill(os.getpid(), number)

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
