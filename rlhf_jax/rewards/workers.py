"""Run Python rewards in processes of their own: the pool that hands out answers, and each process.

Parent and child talk over one socket, the child's standard input, in the messages of `calls.py`.
The child says that it is ready once, then for each call the reward, or why there is none. It
imports no jax, and the parent runs nothing that a child sends.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import numbers
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, connection

import numpy as np

from rlhf_jax.rewards.calls import (
    LARGEST_REPLY,
    RewardCall,
    RewardFailure,
    RewardScore,
    WorkerReady,
    limit_wait,
    receive_call,
    receive_reply,
    send,
)
from rlhf_jax.rewards.combination import (
    Response,
    Scores,
    as_scores,
    failure,
    load_reward,
    refuse_broken,
)

START_SECONDS = 120.0  # for Python and the reward's imports
HANGS = 4  # so many calls out of time, and none that ever succeeded: the reward hangs
SILENCE = 1.0  # seconds between two signs of life at most
MESSAGE = 200  # characters of an error that are kept


@dataclasses.dataclass
class _Child:
    process: subprocess.Popen
    pipe: connection.Connection
    lifeline: connection.Connection  # closed by the kernel, whatever ends this process
    deadline: float  # of what it does now: start, or answer `index`
    ready: bool = False
    index: int | None = None

    @property
    def busy(self) -> bool:
        return not self.ready or self.index is not None


class Workers:
    """Run a reward function as a scorer, in up to `count` processes.

    A call takes `seconds` at most. One that raises, gives no finite float32, takes too long (never,
    with math.inf seconds), sends anything but a reply or ends its process fails alone; the process
    is replaced. ValueError where the reward is broken: it cannot be imported (here or in a
    process), or it has never given a number yet and fails on every answer, or hangs. `observe` is
    called after every wait for results, of a second at most; it may raise to stop the call. Leaving
    the context kills the processes and all that they have started; they also end when this process
    does, killed or not.
    """

    def __init__(
        self, spec: str, count: int, seconds: float, observe: Callable[[], None] = lambda: None
    ):
        load_reward(spec)
        self._spec = spec
        self._count = count
        self._seconds = seconds
        self._observe = observe
        self._children: list[_Child] = []
        self._works = False  # whether it ever gave a number

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        while self._children:
            self._end(self._children[-1])

    def __call__(self, answers: Sequence[Response]) -> Scores:
        """Return scores in the order of the answers."""
        waiting = collections.deque(range(len(answers)))
        results: dict[int, float | str] = {}
        try:
            while len(results) < len(answers):
                self._hand_out(waiting, answers)
                # Until the first results, the first deadline, or a sign of life is due.
                found: dict[int, float | str] = {}
                busy = {child.pipe: child for child in self._children if child.busy}
                patience = min(child.deadline for child in busy.values()) - time.monotonic()
                for pipe in connection.wait(list(busy), min(max(0.0, patience), SILENCE)):
                    found |= self._receive(busy[pipe])  # pyright: ignore[reportArgumentType]
                for child in self._children.copy():
                    if child.busy and child.deadline <= time.monotonic():
                        late = _late(self._seconds if child.ready else START_SECONDS)
                        found |= self._give_up(child, late)

                results |= found
                self._works |= not all(map(failure, found.values()))
                hung = list(results.values()).count(_late(self._seconds))
                if hung >= HANGS and not self._works:
                    raise ValueError(
                        f"Reward {self._spec} hangs: {hung} calls {_late(self._seconds)} and none"
                        " succeeded; make it faster or raise its seconds."
                    )
                self._observe()
        except BaseException:
            self.close()  # what they still work on must not be taken for a later call's
            raise
        scores = as_scores([results[index] for index in range(len(answers))])
        if not self._works:
            refuse_broken(self._spec, scores)
        return scores

    def _hand_out(self, waiting: collections.deque[int], answers: Sequence[Response]) -> None:
        for child in [
            child for child in self._children if not child.busy and child.process.poll() is not None
        ]:
            self._end(child)
        free = sum(child.index is None for child in self._children)
        for _ in range(min(self._count - len(self._children), len(waiting) - free)):
            ours, theirs = Pipe()
            held, watched = Pipe()  # nothing is sent: what happens on it is the end of this process
            # It imports the reward as this process would, and is not ready yet.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, self._spec, str(watched.fileno())],
                stdin=theirs.fileno(),
                pass_fds=(watched.fileno(),),
                stdout=2,  # what a reward prints
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
            theirs.close()
            watched.close()
            limit_wait(ours)
            deadline = time.monotonic() + START_SECONDS
            self._children.append(_Child(process, ours, held, deadline))
        for child in self._children:
            if waiting and not child.busy:
                child.index = waiting.popleft()
                child.deadline = time.monotonic() + self._seconds
                answer = answers[child.index]
                # a dead child is noticed when its result is read
                with contextlib.suppress(OSError):
                    send(child.pipe, RewardCall(answer.prompt, answer.response, answer.row))

    def _receive(self, child: _Child) -> dict[int, float | str]:
        """Take a child's reply; one that sends anything else is ended: its answer has failed."""
        try:
            reply = receive_reply(child.pipe)
        except (EOFError, ConnectionError):
            status = "its end of the pipe closed"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.process.wait(1)
                status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return self._give_up(child, f"ended its process with {status}")
        except BlockingIOError:
            return self._give_up(child, "began a reply and did not end it")
        except OSError as error:
            reason = f"sent no reply of at most {LARGEST_REPLY:,} bytes ({error})"
            return self._give_up(child, reason)
        except ValueError as error:
            return self._give_up(child, f"sent no reply ({str(error).rstrip('.')})")

        if child.ready and child.index is not None and not isinstance(reply, WorkerReady):
            index = child.index
            child.index = None
            return {index: reply.value if isinstance(reply, RewardScore) else reply.reason}
        if child.ready or isinstance(reply, RewardScore):
            return self._give_up(child, "sent a reply out of turn")
        if isinstance(reply, RewardFailure):
            return self._give_up(child, reply.reason)
        child.ready = True
        return {}

    def _give_up(self, child: _Child, reason: str) -> dict[int, float | str]:
        """End a child: its answer has failed.

        One that never got ready would not do so the next time either: that is a ValueError.
        """
        self._end(child)
        if child.index is None:
            raise ValueError(
                f"Reward {self._spec} does not start in a process of its own: {reason.rstrip('.')}."
            )
        return {child.index: reason}

    def _end(self, child: _Child) -> None:
        self._children.remove(child)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # it leads a group: what it has started ends as well
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.pipe.close()
        child.lifeline.close()


def _late(seconds: float) -> str:
    return f"took longer than {seconds:g} s"


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
    try:
        reward = load_reward(spec)
    except (ValueError, OSError) as error:
        send(pipe, RewardFailure(_one_line(error)))
        return
    with contextlib.suppress(EOFError, OSError):  # the parent's end
        send(pipe, WorkerReady())
        while True:
            asked = receive_call(pipe)
            signal.signal(signal.SIGIO, signal.SIG_DFL)
            try:
                value = reward(asked.prompt, asked.response, asked.row)
                what = f"gave a value of type {type(value).__name__} instead of one float"
                is_number = isinstance(value, numbers.Real | np.bool_)
                reply = RewardScore(float(value)) if is_number else RewardFailure(what)
            except Exception as error:
                reply = RewardFailure(f"raised {type(error).__name__}: {_one_line(error)}")
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            send(pipe, reply)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # what the reward has started ends as well


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MESSAGE]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
