"""Carry calls and replies between the trainer and the processes that compute rewards.

Only bytes of bounded length go through the pipe, and only these messages are made of them.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from multiprocessing import connection

from rlhf_jax.rewards.combination import Response, Score
from rlhf_jax.runtime import messages

LARGEST_CALL = 1 << 28  # bytes of responses with their prompts and rows
LARGEST_REPLY = 1 << 20  # bytes of numbers, or of why there are none, for each RESPONSES
RESPONSES = 1024
PAUSE = 10  # seconds in which the rest of a message must come, or be taken, once it has begun


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardCall:
    """Ask for the rewards of the responses of one call."""

    number: int  # of the call
    seconds: float  # after which an async function is told to give up
    responses: list[Response]  # rows have the types that the reader of their file gives


@messages.register
@dataclasses.dataclass(frozen=True)
class WorkerImports:
    """Say that the import of the reward begins."""


@messages.register
@dataclasses.dataclass(frozen=True)
class WorkerReady:
    """Say that the reward is imported, and how it wants to be called; calls may come."""

    form: str  # of `signatures.Form`
    is_async: bool
    columns: tuple[str, ...] = ()  # of the prompts, which it cannot do without


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardResults:
    """Give what came of each response of a call; None where an async function gave it up."""

    number: int
    results: list[Score | str] | None


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardFailure:
    """Say why there never will be rewards."""

    reason: str


# what came of the start, or of a call
RewardReply = WorkerImports | WorkerReady | RewardResults | RewardFailure


def send(pipe: connection.Connection, message: RewardCall | RewardReply) -> None:
    """Send a message; raise ValueError if it holds what cannot travel or is too long."""
    largest = LARGEST_REPLY
    if isinstance(message, RewardCall):
        largest = LARGEST_CALL
    elif isinstance(message, RewardResults):
        largest = largest_reply(len(message.results or []))
    pipe.send_bytes(messages.encode(message, largest))


def largest_reply(responses: int) -> int:
    """Return the most bytes of a reply about so many responses."""
    return LARGEST_REPLY * max(1, -(-responses // RESPONSES))


def receive_call(pipe: connection.Connection) -> RewardCall:
    """Return the next call.

    Raises ValueError for bytes that are none, EOFError where the trainer has closed its end, and
    OSError if there are too many bytes.
    """
    return messages.decode(pipe.recv_bytes(LARGEST_CALL), "the pipe of calls", RewardCall)


def receive_reply(pipe: connection.Connection, largest: int) -> RewardReply:
    """Return the next reply, of at most so many bytes.

    Raises ValueError for bytes that are none, EOFError where the process has closed its end,
    BlockingIOError where a reply that began does not go on, and OSError if there are too many
    bytes.
    """
    data = pipe.recv_bytes(largest)
    reply = messages.decode(data, "the pipe of a reward process")
    if not isinstance(reply, RewardReply):
        raise ValueError(f"A reward process sent a value of type {type(reply).__name__}.")
    return reply


def limit_wait(pipe: connection.Connection) -> None:
    """Have a read or a write fail with BlockingIOError where a message goes on too late."""
    end = socket.socket(fileno=pipe.fileno())
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", PAUSE, 0))
    end.detach()  # the connection keeps its file descriptor
