"""The children that call a reward: a separate process, or a thread of this one.

A child is at the other end of a pipe: it announces that it begins to import the reward, that it is
ready, and then the results of each call. Only bytes of bounded length go through the pipe, and only
these messages are decoded from them. An async function runs all incoming calls concurrently; any
other answers one after the other. A process can be killed; a thread can only be abandoned. A
process imports no jax.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, connection
from types import FrameType

from rlhf_jax.rewards.combination import Response, Reward, RewardResult, Score, load_reward
from rlhf_jax.rewards.functions import Form, call, call_async, forks_end, one_line, signature_of
from rlhf_jax.runtime import messages
from rlhf_jax.runtime.native_output import screen

LARGEST_CALL = 1 << 28  # bytes of responses with their prompts and rows
LARGEST_REPLY = 1 << 20  # bytes of numbers or errors, for each RESPONSES
RESPONSES = 1024
PAUSE = 10  # seconds in which a message that has begun must be completed
START_SECONDS = 120.0  # for Python, and for an import if calls have no limit
LEAVE_SECONDS = 0.5  # for a thread to end by itself
REFUSAL = 1000  # characters of a failed start
# The program of a process. This module is imported, not run: a reward that imports it, too, would
# otherwise register its messages a second time.
SERVE = (
    "import sys; from rlhf_jax.rewards.children import serve; serve(sys.argv[1], int(sys.argv[2]))"
)


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardCall:
    """Request the rewards of the responses of one call."""

    number: int  # of the call
    seconds: float  # time limit of an async function
    responses: list[Response]  # rows have the types that the reader of their file gives


@messages.register
@dataclasses.dataclass(frozen=True)
class WorkerImports:
    """Announce that the import of the reward begins."""


@messages.register
@dataclasses.dataclass(frozen=True)
class WorkerReady:
    """Announce that the reward is imported, with its call signature."""

    form: str  # of `functions.Form`
    is_async: bool
    columns: tuple[str, ...] = ()  # of the prompts, required by it


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardResults:
    """Return a result for each response of a call; None if an async function abandoned it."""

    number: int
    results: list[Score | str] | None


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardFailure:
    """Report why there will be no rewards."""

    reason: str


# outcome of the start, or of a call
RewardReply = WorkerImports | WorkerReady | RewardResults | RewardFailure


def send(pipe: connection.Connection, message: RewardCall | RewardReply) -> None:
    """Send a message; raise ValueError if it has unsupported content or is too long."""
    largest = LARGEST_REPLY
    if isinstance(message, RewardCall):
        largest = LARGEST_CALL
    elif isinstance(message, RewardResults):
        largest = largest_reply(len(message.results or []))
    pipe.send_bytes(messages.encode(message, largest))


def largest_reply(responses: int) -> int:
    """Return the most bytes of a reply about this many responses."""
    return LARGEST_REPLY * max(1, -(-responses // RESPONSES))


def receive_call(pipe: connection.Connection) -> RewardCall:
    """Return the next call.

    Raises ValueError for invalid bytes, EOFError if the trainer has closed its end, and OSError if
    there are too many bytes.
    """
    return messages.decode(pipe.recv_bytes(LARGEST_CALL), "the pipe of calls", RewardCall)


def receive_reply(pipe: connection.Connection, largest: int) -> RewardReply:
    """Return the next reply, of bounded length.

    Raises ValueError for invalid bytes, EOFError if the process has closed its end, BlockingIOError
    if a reply that began does not continue, and OSError if there are too many bytes.
    """
    data = pipe.recv_bytes(largest)
    reply = messages.decode(data, "the pipe of a reward process")
    if not isinstance(reply, RewardReply):
        raise ValueError(f"A reward process sent a value of type {type(reply).__name__}.")
    return reply


def limit_wait(pipe: connection.Connection) -> None:
    """Make a read or a write fail with BlockingIOError if a message is not continued in time."""
    end = socket.socket(fileno=pipe.fileno())
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", PAUSE, 0))
    end.detach()  # the connection keeps its file descriptor


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
    process = subprocess.Popen(  # noqa: S603  # this Python, and the config's own reward
        [sys.executable, "-P", "-c", SERVE, spec, str(watched.fileno())],
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


def start_thread(name: str, function: Reward) -> ThreadChild:
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


def serve(spec: str, watched: int) -> None:
    """Import the reward, then answer calls until the parent closes the socket or ends.

    `watched` is the file descriptor on which something happens only when the parent ends.
    """
    pipe = connection.Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a reward that reads its input must not take calls
    # The kernel sends SIGIO at the parent's end: ignored here, and in a call it ends the child even
    # in a regular expression that never returns and lets no other thread run. The pipe of calls
    # would not do: the signal of a call's arrival may come after the call was read.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    # Ctrl-C is for the run. Not SIG_IGN, which child processes of the reward would inherit.
    signal.signal(signal.SIGINT, _ignore)
    # Child processes of the reward do not get it.
    os.set_inheritable(watched, False)
    flags = fcntl.fcntl(watched, fcntl.F_GETFL)
    fcntl.fcntl(watched, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watched, fcntl.F_SETFL, flags | os.O_ASYNC)
    serve_calls(pipe, lambda: _imported(spec), _ended_by_parent)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # its child processes end as well


def serve_calls(
    pipe: connection.Connection,
    find: Callable[[], Reward],
    within: Callable[[bool], contextlib.AbstractContextManager],
) -> None:
    """Load the reward, then answer calls until the other end of the pipe closes.

    The reward's own code runs in a context made by `within`; its argument is whether a signal may
    raise KeyboardInterrupt there, which must hit only the reward's code.
    """
    with contextlib.suppress(EOFError, OSError):  # the other end is closed
        send(pipe, WorkerImports())
        try:
            with within(True):
                reward = find()
                signature = signature_of(reward)
        except (ValueError, OSError) as error:
            send(pipe, RewardFailure(one_line(error, REFUSAL)))
            return
        send(pipe, WorkerReady(str(signature.form), signature.is_async, signature.columns))
        if signature.is_async:
            with within(False):
                asyncio.run(_answer_together(pipe, reward, signature.form))
        while True:
            reward_call = receive_call(pipe)
            with within(True):
                results = call(reward, signature.form, reward_call.responses)
            _reply(pipe, RewardResults(reward_call.number, results))


async def _answer_together(pipe: connection.Connection, reward: Reward, form: Form) -> None:
    """Answer calls of an async function as they come, each when it is done."""

    async def answer(reward_call: RewardCall) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, as reading it will find
            responses = reward_call.responses
            results = await call_async(reward, form, responses, reward_call.seconds)
            _reply(pipe, RewardResults(reward_call.number, results))

    under_way = set()
    arrived = asyncio.Event()
    # Not by a reader thread: the loop's end would wait for it, and so for the next call.
    asyncio.get_running_loop().add_reader(pipe.fileno(), arrived.set)
    while True:
        await arrived.wait()
        arrived.clear()
        while pipe.poll():
            task = asyncio.create_task(answer(receive_call(pipe)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


def _reply(pipe: connection.Connection, reply: RewardResults) -> None:
    """Send the results of a call, or the reason why they cannot be sent."""
    try:
        send(pipe, reply)
    except ValueError as error:
        reasons: list[RewardResult] = [f"gave too much: {one_line(error)}"]
        send(pipe, RewardResults(reply.number, reasons * len(reply.results or [])))


def _imported(spec: str) -> Reward:
    """Return the reward of a spec; ValueError whatever its import raises."""
    try:
        with forks_end():
            return load_reward(spec)
    except Exception:
        raise
    except BaseException as error:
        message = f"{type(error).__name__}: {one_line(error)}".rstrip(": ")
        raise ValueError(f"Reward {spec!r} cannot be imported: {message}.") from None


@contextlib.contextmanager
def _ended_by_parent(interruptible: bool) -> Iterator[None]:
    """End this process with its parent, and let SIGINT interrupt the reward."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler if interruptible else _ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _ignore)
        signal.signal(signal.SIGIO, signal.SIG_IGN)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""
