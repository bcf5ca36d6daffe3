"""Carry calls and replies between the trainer and the processes that compute rewards.

Only bytes of bounded length go through the pipe, and only these messages are decoded from them.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from multiprocessing import connection

from rlhf_jax.rewards.combination import Response, Score
from rlhf_jax.runtime import messages

LARGEST_CALL = 1 << 28  # bytes of responses with their prompts and rows
LARGEST_REPLY = 1 << 20  # bytes of numbers or errors, for each RESPONSES
RESPONSES = 1024
PAUSE = 10  # seconds in which a message that has begun must be completed


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

    form: str  # of `signatures.Form`
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
