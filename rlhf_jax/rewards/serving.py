"""A process that computes rewards: it imports the function, then answers calls until the end.

It talks over its standard input in the messages of `calls.py`, and imports no jax. An async
function has as many calls under way as come; any other answers one after the other.
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
from rlhf_jax.rewards.signatures import Signature, arguments, results_of, signature_of

MESSAGE = 200  # characters of an error that are kept


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
    # Processes that the reward starts do not get it.
    os.set_inheritable(watched, False)
    flags = fcntl.fcntl(watched, fcntl.F_GETFL)
    fcntl.fcntl(watched, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watched, fcntl.F_SETFL, flags | os.O_ASYNC)
    with contextlib.suppress(EOFError, OSError):  # the parent's end
        send(pipe, WorkerImports())
        try:
            with _ended_by_parent(), _forks_end():
                reward = load_reward(spec)
        except (ValueError, OSError) as error:
            send(pipe, RewardFailure(_one_line(error)))
            return
        signature = signature_of(reward)
        send(pipe, WorkerReady(str(signature.form), signature.is_async))
        if signature.is_async:
            asyncio.run(_answer_together(pipe, reward, signature))
        while True:
            asked = receive_call(pipe)
            with _ended_by_parent():
                results = call(reward, signature, asked)
            send(pipe, RewardResults(asked.number, results))
    os.killpg(os.getpgrp(), signal.SIGKILL)  # what the reward has started ends as well


def call(reward: Callable[..., Any], signature: Signature, asked: RewardCall) -> list[RewardResult]:
    """Return what came of each response of a call of a plain function."""
    given = arguments(reward, signature.form, asked.responses)
    try:
        with _forks_end():
            value = reward(*given.positional, **given.named)
    except (Exception, SystemExit) as error:
        return [_raised(error)] * len(asked.responses)
    return results_of(signature.form, value, len(asked.responses), given.logged)


async def call_async(
    reward: Callable[..., Any], signature: Signature, asked: RewardCall
) -> list[RewardResult]:
    """Return what came of each response of a call of an async function, within its time."""
    given = arguments(reward, signature.form, asked.responses)
    limit = asked.seconds if math.isfinite(asked.seconds) else None

    async def answer() -> Any:
        with _forks_end():
            return await reward(*given.positional, **given.named)

    try:
        value = await asyncio.wait_for(answer(), limit)
    except TimeoutError:
        return [f"took longer than {asked.seconds:g} s"] * len(asked.responses)
    except Exception as error:
        return [_raised(error)] * len(asked.responses)
    return results_of(signature.form, value, len(asked.responses), given.logged)


async def _answer_together(
    pipe: connection.Connection, reward: Callable[..., Any], signature: Signature
) -> None:
    """Answer calls of an async function as they come, each when it is done."""

    async def answer(asked: RewardCall) -> None:
        send(pipe, RewardResults(asked.number, await call_async(reward, signature, asked)))

    loop = asyncio.get_running_loop()
    under_way = set()
    with _ended_by_parent():
        while True:
            task = loop.create_task(answer(await loop.run_in_executor(None, receive_call, pipe)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


@contextlib.contextmanager
def _ended_by_parent() -> Iterator[None]:
    """Let the end of the parent end this process at once."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGIO, signal.SIG_IGN)


@contextlib.contextmanager
def _forks_end() -> Iterator[None]:
    """End a process that is forked within the context where it leaves that.

    It would answer as its parent does, and take the next calls.
    """
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(0)


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MESSAGE]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
