"""The workers that answer calls of a reward: a separate process, or a thread of this one.

Either has the other end of a pipe, and serves calls as in `serving.py`. A process can be killed; a
thread can only be abandoned.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe, connection
from typing import Any

from rlhf_jax.rewards.calls import limit_wait
from rlhf_jax.rewards.serving import serve_calls
from rlhf_jax.runtime.native_output import screen

START_SECONDS = 120.0  # for Python, and for an import if calls have no limit
LEAVE_SECONDS = 0.5  # for a thread to end by itself


@dataclasses.dataclass
class Child(abc.ABC):
    """Hold our end of a pipe to a worker, and its calls."""

    pipe: connection.Connection
    start_deadline: float = dataclasses.field(
        default_factory=lambda: time.monotonic() + START_SECONDS
    )
    imports: bool = False  # the reward
    ready: bool = False
    deadlines: dict[int, float] = dataclasses.field(default_factory=dict)  # by call

    @property
    def busy(self) -> bool:
        """Return whether a result of it is pending."""
        return not self.ready or bool(self.deadlines)

    @property
    def deadline(self) -> float:
        """Return the first deadline."""
        return min(self.deadlines.values()) if self.ready else self.start_deadline

    @abc.abstractmethod
    def gone(self) -> bool:
        """Return whether it has ended."""

    @abc.abstractmethod
    def ending(self) -> str:
        """Describe how it ended, once its end of the pipe is closed."""

    @abc.abstractmethod
    def end(self) -> None:
        """End it, and close the pipe."""


@dataclasses.dataclass(kw_only=True)
class ProcessChild(Child):
    """Hold a process that imports the reward of a spec."""

    process: subprocess.Popen
    lifeline: connection.Connection  # closed by the kernel, however this process ends

    def gone(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None

    def ending(self) -> str:
        """Describe the exit code or signal with which it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1)
            if code >= 0:
                return f"ended its process with exit code {code}"
            return f"ended its process with signal {signal.Signals(-code).name}"
        return "ended its process with its end of the pipe closed"

    def end(self) -> None:
        """Kill the process, and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # it leads a group, so its children end as well
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        self.lifeline.close()


@dataclasses.dataclass(kw_only=True)
class ThreadChild(Child):
    """Hold a thread that calls a function of this process."""

    thread: threading.Thread

    def gone(self) -> bool:
        """Return whether the thread has ended."""
        return not self.thread.is_alive()

    def ending(self) -> str:
        """Report that it ended, which only an async function's tasks can cause."""
        return "ended its event loop"

    def end(self) -> None:
        """Close the pipe, so that the thread ends once the reward returns; do not wait for it."""
        self.pipe.close()
        self.thread.join(LEAVE_SECONDS)


def start_process(spec: str) -> ProcessChild:
    """Start a process that imports the reward as this process would; it is not ready yet."""
    ours, theirs = Pipe()
    held, watched = Pipe()  # nothing is sent: its closing marks the end of this process
    module = "rlhf_jax.rewards.serving"
    process = subprocess.Popen(  # noqa: S603  # this Python, and the config's own reward
        [sys.executable, "-P", "-m", module, spec, str(watched.fileno())],
        stdin=theirs.fileno(),
        pass_fds=(watched.fileno(),),
        stdout=screen(),  # output of a reward
        stderr=screen(),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
    theirs.close()
    watched.close()
    limit_wait(ours)
    return ProcessChild(ours, process=process, lifeline=held)


def start_thread(name: str, function: Callable[..., Any]) -> ThreadChild:
    """Start a thread that calls a function; it does not delay the end of this process."""
    ours, theirs = Pipe()

    def answer() -> None:
        # An error of the function's own tasks that escapes its event loop ends the thread.
        with theirs, contextlib.suppress(BaseException):
            serve_calls(theirs, lambda: function, lambda _: contextlib.nullcontext())

    thread = threading.Thread(target=answer, name=f"reward {name}", daemon=True)
    thread.start()
    limit_wait(ours)
    return ThreadChild(ours, thread=thread)
