"""End this process with one sentence if another of the run is lost: dead, stopped or cut off.

XLA's coordination service detects that, in threads that Python cannot block. It then writes the
reason and ends every process by abort(), which no callback prevents: they cannot be given a status
in Python (std::bad_cast). So SIGABRT is handled: its output is read, and reported in one sentence.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.runtime import distributed, jax_internals
from rlhf_jax.runtime.jax_internals import Verdict
from rlhf_jax.runtime.native_output import NativeLog
from rlhf_jax.runtime.signals import write_to_stderr
from rlhf_jax.runtime.watchdog import format_duration

LOST = 75  # exit code: another is lost, and the same may be tried again (EX_TEMPFAIL of sysexits.h)
TICK = 1.0  # seconds between two polls of the clock, and for a rank that has left
LINGER = 2.0  # seconds that the service outlives its rank's message, for all to receive it
IDLE = 0.5  # share of a standstill in which processors may have worked
STANDSTILL = 0.5  # share of the heartbeat: after a longer absence, others are not lost
LEFT = "the rank that has left"
AGAIN = "the same command resumes from the last checkpoint."

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class Guard:
    """Watch over this process as one of several: `begin` before it joins them, `listen` after."""

    def __init__(self):
        self.heartbeat = 0  # seconds of silence after which a rank is lost
        self.log: NativeLog | None = None
        self._code: int | None = None  # of a process that has reported its own end
        self._gap = 0.0  # seconds for which this process stood still, and when that ended
        self._gap_end = 0.0
        self._sleeping = 0.0  # since when the thread sleeps; 0 if it does not
        self._worked = 0.0  # seconds of all processors before that
        self._once = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="lost ranks", daemon=True)
        self._handler = _Handler(self._abort)

    def begin(self, heartbeat: int, workdir: Path | None) -> None:
        """Keep library output off the screen, and handle XLA's end of this process."""
        self.heartbeat = heartbeat
        self.log = NativeLog(workdir)
        _handle_abort(self._handler)

    def listen(self) -> None:
        """Poll, in a thread, for a rank that leaves alone, and detect standstills of this one."""
        self._thread.start()

    def speak_for_itself(self, code: int) -> None:
        """Note that this process has reported why it ends: no other rank is to blame."""
        self._code = code

    def leave_alone(self, code: int) -> None:
        """Notify the others that this rank leaves, for a reason that it has reported."""
        distributed.publish(LEFT, [distributed.rank(), code])
        time.sleep(LINGER)

    def await_verdict(self) -> None:
        """Give XLA time to find out who is lost, which ends this process; else return."""
        if not distributed.all_here("a failure of all", self.heartbeat + distributed.PATIENCE):
            time.sleep(2 * LINGER)

    def end(self) -> None:
        """Stop watching: all processes end together."""
        if self.log is None:
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(distributed.PATIENCE)
        _handle_abort(None)
        self.log.keep(distributed.rank())
        self.discard_log()

    def discard_log(self) -> None:
        """Remove the library output of a process that ends by itself before it had a workdir."""
        if self.log is not None:
            self.log.discard()

    def _listen(self) -> None:
        """Poll the clock and the others' messages until the end."""
        rank = distributed.rank()
        while True:
            self._worked = time.process_time()
            self._sleeping = _now()
            if self._over.wait(TICK):
                return
            gap = self._stood_still()
            self._sleeping = 0.0
            if gap > self.heartbeat * STANDSTILL:
                self._gap = gap
                self._gap_end = _now()
            if self.log is not None:
                self.log.keep(rank)
            _handle_abort(self._handler)  # libtpu installs its own when it is loaded
            left = distributed.read_published(LEFT, list)
            if left and left[0] != rank and not self._once.locked():
                if self._code is None and rank == lowest_but(left[:1], distributed.count()):
                    write_to_stderr(
                        f"Ended with rank {left[0]}, whose last message has the reason."
                    )
                self.discard_log()
                os._exit(left[1] if self._code is None else self._code)

    def _stood_still(self) -> float:
        """Return the seconds for which this process did nothing, beyond those of a tick.

        A thread that waits for Python while another computes is no standstill.
        """
        gap = _now() - self._sleeping - TICK
        return gap if time.process_time() - self._worked < IDLE * gap else 0.0

    def _abort(self, _: int) -> None:
        """Report who is lost, and end; if a library ends this process, report it and return."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # the thread that came first ends the process
        rank = distributed.rank()
        assert self.log is not None
        self.log.keep(rank)
        verdict = jax_internals.read_verdict(self.log.words())
        if verdict is None:
            write_to_stderr(
                f"error: rank {rank} was ended by a library, whose words are in {self.log.path};"
                f" {AGAIN}"
            )
            return _handle_abort(None)
        gap = self._stood_still() if self._sleeping else 0.0
        if _now() - self._gap_end < 2 * self.heartbeat:  # by then XLA has reported its consequences
            gap = max(gap, self._gap)
        message = sentence(
            verdict,
            rank,
            distributed.count(),
            self.heartbeat,
            stood_still=gap,
            file_of=self.log.of_rank,
        )
        if message and self._code is None:
            write_to_stderr(f"error: {message}")
        if rank == distributed.LEADER:
            time.sleep(LINGER)
        os._exit(LOST if self._code is None else self._code)


@functools.cache
def guard() -> Guard:
    """Return the guard of this process."""
    return Guard()


def sentence(
    verdict: Verdict,
    rank: int,
    size: int,
    heartbeat: int,
    stood_still: float,
    file_of: Callable[[int], Path],
) -> str:
    """Return a rank's sentence about the lost ones; '' if a lower rank reports it.

    stood_still: recent seconds for which this rank did. file_of: the file of a rank's library
    output.
    """
    if verdict.unmet:
        return (
            f"rank {rank} did not meet all {size} processes of the run: begin them at about the"
            " same time, with one --coordinator that each of them can reach."
        )
    was_away = stood_still > heartbeat * STANDSTILL
    # If rank 0, with the service, was away, it missed the ranks that it then takes for lost.
    own = was_away and (not verdict.unheard or rank == distributed.LEADER)
    if own or rank in verdict.unheard:
        how = f"stood still for {format_duration(stood_still)}" if was_away else "sent no heartbeat"
        return (
            f"rank {rank} itself {how}, too long for heartbeat_seconds = {heartbeat}, and the"
            " others have ended: was it stopped, did its host sleep, was the network cut?"
            f" {AGAIN[0].upper()}{AGAIN[1:]}"
        )
    lost = verdict.unheard or (distributed.LEADER,)
    # A rank without an answer may be the one that is cut off: no other can report it.
    speaks = verdict == Verdict() or rank == lowest_but(lost, size)
    return _of_others(verdict, lost, heartbeat, file_of) if speaks else ""


def _of_others(
    verdict: Verdict, lost: Sequence[int], heartbeat: int, file_of: Callable[[int], Path]
) -> str:
    """Describe which other ranks are gone, how that was noticed, and where to look."""
    names = " and ".join(map(str, lost))
    who = f"ranks {names} are" if len(lost) > 1 else f"rank {names} is"
    how = f"no heartbeat for {heartbeat} s"
    if not verdict.unheard:
        how = "the connection has closed" if verdict.closed else f"no answer within {heartbeat} s"
    files = ", ".join(str(file_of(rank)) for rank in lost)
    return (
        f"{who} gone ({how}): look at the last messages there, at the host, and in {files}; {AGAIN}"
    )


def lowest_but(lost: Iterable[int], size: int) -> int:
    """Return the lowest of the remaining ranks, which reports for all of them."""
    return min({*range(size)} - {*lost})


def _now() -> float:
    """Return seconds of a clock that goes on while the host sleeps, if there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _handle_abort(handler: Any) -> None:
    """Let a C function handle SIGABRT, since Python's own come too late; None for nothing."""
    library = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
