"""SIGTERM and Ctrl-C: the first asks the run to stop at the next safe place, the second stops it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A run that was asked to stop; `exit_code` is the shell's for the signal."""

    def __init__(self, number: int):
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Stop:
    """Whether a signal has asked to stop."""

    def __init__(self):
        self.signal: int | None = None

    def check(self) -> None:
        """Raise `Stopped` where a signal has come."""
        if self.signal is not None:
            raise Stopped(self.signal)


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Within it, a first signal only sets `Stop.signal`, and the handlers from before serve the second."""
    stop, before = Stop(), {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, _) -> None:
        stop.signal = number
        restore()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
