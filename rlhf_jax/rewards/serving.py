"""A process that computes rewards: it imports the function, then answers calls until the end.

It communicates over its standard input in the messages of `calls.py`, and imports no jax. An async
function runs all incoming calls concurrently; any other answers one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import connection
from types import FrameType
from typing import Any

from rlhf_jax.rewards.calls import (
    RewardCall,
    RewardFailure,
    RewardResults,
    WorkerImports,
    WorkerReady,
    receive_call,
    send,
)
from rlhf_jax.rewards.combination import RewardResult, load_reward
from rlhf_jax.rewards.results import one_line, raised, results_of
from rlhf_jax.rewards.signatures import Form, Signature, arguments, signature_of

REFUSAL = 1000  # characters of a failed start


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
    find: Callable[[], Callable[..., Any]],
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
                asyncio.run(_answer_together(pipe, reward, signature))
        while True:
            reward_call = receive_call(pipe)
            with within(True):
                results = call(reward, signature, reward_call)
            _reply(pipe, RewardResults(reward_call.number, results))


def call(
    reward: Callable[..., Any], signature: Signature, reward_call: RewardCall
) -> list[RewardResult]:
    """Return the result of each response in a call of a plain function, whatever it raises."""
    try:
        with _forks_end():
            given = arguments(reward, signature.form, reward_call.responses)
            value = reward(*given.positional, **given.named)
            alone = signature.form is Form.ONE
            return results_of(alone, value, len(reward_call.responses), given.logged)
    except BaseException as error:
        return [raised(error, reward_call.responses[0].row)] * len(reward_call.responses)


async def call_async(
    reward: Callable[..., Any], signature: Signature, reward_call: RewardCall
) -> list[RewardResult] | None:
    """Return the result of each response in a call of an async function; None on timeout.

    Whatever the function raises is caught within its task: there CancelledError is its own doing,
    while SystemExit and KeyboardInterrupt would end the loop.
    """

    async def answer() -> list[RewardResult]:
        try:
            with _forks_end():
                given = arguments(reward, signature.form, reward_call.responses)
                value = await reward(*given.positional, **given.named)
                alone = signature.form is Form.ONE
                return results_of(alone, value, len(reward_call.responses), given.logged)
        except BaseException as error:
            return [raised(error, reward_call.responses[0].row)] * len(reward_call.responses)

    task = asyncio.ensure_future(answer())
    limit = reward_call.seconds if math.isfinite(reward_call.seconds) else None
    done, _ = await asyncio.wait([task], timeout=limit)
    if not done:
        task.cancel()  # not awaited: it may refuse to end
        return None
    if task.cancelled():  # it was cancelled, but returned all the same
        return [raised(asyncio.CancelledError())] * len(reward_call.responses)
    return task.result()


async def _answer_together(
    pipe: connection.Connection, reward: Callable[..., Any], signature: Signature
) -> None:
    """Answer calls of an async function as they come, each when it is done."""

    async def answer(reward_call: RewardCall) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, as reading it will find
            results = await call_async(reward, signature, reward_call)
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


def _imported(spec: str) -> Callable[..., Any]:
    """Return the reward of a spec; ValueError whatever its import raises."""
    try:
        with _forks_end():
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


@contextlib.contextmanager
def _forks_end() -> Iterator[None]:
    """End a process that was forked within the context when it leaves that.

    It would otherwise answer as its parent does, and take the next calls.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
