"""Carry calls and replies between the trainer and the processes that compute rewards.

Only bytes of bounded length go through the pipe, and only these messages are made of them.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from multiprocessing import connection
from typing import Any

from rlhf_jax.runtime import messages

__all__ = [
    "LARGEST_REPLY",
    "RewardCall",
    "RewardFailure",
    "RewardReply",
    "RewardScore",
    "WorkerReady",
    "limit_wait",
    "receive_call",
    "receive_reply",
    "send",
]

LARGEST_CALL = 1 << 28  # bytes of a prompt, its row and the response
LARGEST_REPLY = 1 << 14  # bytes of a number, or of why there is none
PAUSE = 10  # seconds in which the rest of a reply must come once it has begun


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardCall:
    """Ask for the reward of a response."""

    prompt: str
    response: str
    row: dict[str, Any]  # of the prompt file, with the types that its reader gives


@messages.register
@dataclasses.dataclass(frozen=True)
class WorkerReady:
    """Say that the reward is imported, and calls may come."""


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardScore:
    """Give the reward."""

    value: float


@messages.register
@dataclasses.dataclass(frozen=True)
class RewardFailure:
    """Say why there is no reward, or why there never will be one."""

    reason: str


RewardReply = WorkerReady | RewardScore | RewardFailure  # what came of the start, or of a call


def send(pipe: connection.Connection, message: RewardCall | RewardReply) -> None:
    """Send a message; raise ValueError where it holds what cannot travel or is too long."""
    largest = LARGEST_CALL if isinstance(message, RewardCall) else LARGEST_REPLY
    pipe.send_bytes(messages.encode(message, largest))


def receive_call(pipe: connection.Connection) -> RewardCall:
    """Return the next call.

    Raises ValueError for bytes that are none, EOFError where the trainer has closed its end, and
    OSError where there are too many bytes.
    """
    return messages.decode(pipe.recv_bytes(LARGEST_CALL), "the pipe of calls", RewardCall)


def receive_reply(pipe: connection.Connection) -> RewardReply:
    """Return the next reply.

    Raises ValueError for bytes that are none, EOFError where the process has closed its end,
    BlockingIOError where a reply that began does not go on, and OSError where there are too many
    bytes.
    """
    data = pipe.recv_bytes(LARGEST_REPLY)
    reply = messages.decode(data, "the pipe of a reward process")
    if not isinstance(reply, RewardReply):
        raise ValueError(f"A reward process sent a value of type {type(reply).__name__}.")
    return reply


def limit_wait(pipe: connection.Connection) -> None:
    """Have a read fail with BlockingIOError where a message that began goes on too late."""
    end = socket.socket(fileno=pipe.fileno())
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PAUSE, 0))
    end.detach()  # the connection keeps its file descriptor
