"""Run Python rewards in processes of their own: the pool that hands out calls and takes replies.

Parent and child talk over one socket, the child's standard input, in the messages of `calls.py`.
The child says that it begins to import the reward, that it is ready, and then for each call what
came of it. The parent imports no reward, and runs nothing that a child sends. What a child does is
in `serving.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, connection

from rlhf_jax.rewards.calls import (
    LARGEST_REPLY,
    RewardCall,
    RewardFailure,
    RewardResults,
    WorkerImports,
    WorkerReady,
    limit_wait,
    receive_reply,
    send,
)
from rlhf_jax.rewards.combination import (
    READY,
    Response,
    RewardResult,
    Scores,
    as_scores,
    failure,
    in_order,
    refuse_broken,
)
from rlhf_jax.rewards.signatures import EarlyCalls, Form, Signature, calls_of
from rlhf_jax.runtime.native_output import screen

START_SECONDS = 120.0  # for Python, and for an import where calls have no limit
LEAST_IMPORT_SECONDS = 2.0  # for the import of a reward, where its calls have less
HANGS = 4  # so many calls out of time, and none that ever succeeded: the reward hangs
SILENCE = 1.0  # seconds between two signs of life at most
GRACE = 5.0  # seconds more, in which an async function may end a call that it gives up itself


@dataclasses.dataclass
class _Child:
    process: subprocess.Popen
    pipe: connection.Connection
    lifeline: connection.Connection  # closed by the kernel, whatever ends this process
    start_deadline: float
    imports: bool = False  # the reward
    ready: bool = False
    deadlines: dict[int, float] = dataclasses.field(default_factory=dict)  # by call

    @property
    def busy(self) -> bool:
        return not self.ready or bool(self.deadlines)

    @property
    def deadline(self) -> float:
        """Return the first time at which it is late."""
        return min(self.deadlines.values()) if self.ready else self.start_deadline


class Workers:
    """Run a reward function as a scorer, in up to `count` processes; an async one in one.

    The reward is imported in the processes alone, the first of which begins with the context; its
    import and a call take `seconds` at most, for each response that the call has. One that raises,
    gives no finite float32, takes too long (never, with math.inf seconds), sends anything but a
    reply or ends its process fails alone; the process is replaced. An async function has up to
    `concurrency` calls under way, which fail together where their process ends. ValueError where
    the reward is broken: it cannot be imported, or it has never given a number yet and fails on
    every answer, or hangs. `observe` is called after every wait for results, of a second at most;
    it may raise to stop the call. Leaving the context kills the processes and all that they have
    started; they also end when this process does, killed or not.
    """

    def __init__(
        self,
        spec: str,
        count: int,
        seconds: float,
        observe: Callable[[], None] = lambda: None,
        concurrency: int = 1,
    ):
        self._spec = spec
        self._count = count
        self._capacity = concurrency  # calls of a process
        self._seconds = seconds
        self._import_seconds = max(seconds, LEAST_IMPORT_SECONDS)
        if spec in READY or math.isinf(seconds):
            self._import_seconds = START_SECONDS
        self._observe = observe
        self._children: list[_Child] = []
        self._works = False  # whether it ever gave a number
        self._hung = 0  # calls out of time
        self._numbers = itertools.count()
        self._calls: dict[int, list[Response]] = {}  # without results yet, by number
        self._waiting: collections.deque[int] = collections.deque()  # those not handed out
        self._results: dict[int, list[RewardResult]] = {}  # that nobody took yet
        self._signature: Signature | None = None  # as the first process told
        self._early = EarlyCalls()
        self._begun: dict[int, list[int]] = {}  # by call, the keys that `begin` had for it

    def __enter__(self) -> Workers:
        self._start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and forget all calls; a later call starts new ones."""
        for found in (self._calls, self._waiting, self._results, self._begun, self._early):
            found.clear()
        while self._children:
            self._end(self._children[-1])

    def signature(self) -> Signature:
        """Return how the reward wants to be called; wait for the first process to import it."""
        if self._signature is None:
            if not self._children:
                self._start()
            self._wait_while(lambda: self._signature is None)
            assert self._signature is not None
        return self._signature

    def __call__(self, answers: Sequence[Response]) -> Scores:
        """Return scores in the order of the answers."""
        parts = calls_of(self.signature().form, answers)
        numbers = [self._enqueue([answers[index] for index in part]) for part in parts]
        self._wait_while(lambda: any(number in self._calls for number in numbers))
        scores = as_scores(in_order(parts, map(self._results.pop, numbers)))
        if not self._works:
            refuse_broken(self._spec, scores)
        return scores

    def begin(self, key: int, answer: Response, siblings: tuple[int, ...]) -> None:
        """Start to score an answer that `collect` may return under a key; do not wait for that.

        A call of several answers begins when it has them all; siblings: as `EarlyCalls` wants them.
        """
        whole = self._early.add(self.signature().form, key, answer, siblings)
        if whole:
            number = self._enqueue([answer for _, answer in whole])
            self._begun[number] = [key for key, _ in whole]

    def advance(self) -> None:
        """Hand out calls and take replies, as far as that needs no waiting."""
        if self._calls:
            self._serve(0.0)

    def collect(self) -> dict[int, RewardResult]:
        """Return the results of all calls that were begun, by key; wait for them.

        There are none where the reward never gave a number, so that a call finds that out.
        """
        self._wait_while(lambda: any(number in self._calls for number in self._begun))
        found: dict[int, RewardResult] = {}
        for number, keys in self._begun.items():
            found |= zip(keys, self._results.pop(number), strict=True)
        self._begun.clear()
        self._early.clear()
        return found if self._works else {}

    def _enqueue(self, responses: list[Response]) -> int:
        number = next(self._numbers)
        self._calls[number] = responses
        self._waiting.append(number)
        return number

    def _wait_while(self, holds: Callable[[], bool]) -> None:
        try:
            while holds():
                self._serve(SILENCE)
                self._observe()
        except BaseException:
            self.close()  # what they still work on must not be taken for a later call's
            raise

    def _serve(self, patience: float) -> None:
        """Hand out calls, and take what comes until the patience ends or a deadline passes."""
        self._hand_out()
        busy = {child.pipe: child for child in self._children if child.busy}
        left = min(child.deadline for child in busy.values()) - time.monotonic()
        for pipe in connection.wait(list(busy), min(max(0.0, left), patience)):
            self._receive(busy[pipe])  # pyright: ignore[reportArgumentType]
        for child in self._children.copy():
            late = child.busy and child.deadline <= time.monotonic()
            if late and not child.pipe.poll():  # nor is a reply there that was not taken yet
                self._give_up(child, self._lateness(child))
        if self._hung >= HANGS and not self._works:
            raise ValueError(
                f"Reward {self._spec} hangs: {self._hung} calls {_late(self._seconds)} and none"
                " succeeded; make it faster or raise its seconds."
            )

    def _hand_out(self) -> None:
        for child in [
            child for child in self._children if not child.busy and child.process.poll() is not None
        ]:
            self._end(child)
        free = sum(not child.deadlines for child in self._children)
        for _ in range(min(self._count - len(self._children), len(self._waiting) - free)):
            self._start()
        for child in self._children:
            while self._waiting and child.ready and len(child.deadlines) < self._capacity:
                self._send(child, self._waiting.popleft())

    def _start(self) -> None:
        """Start a process, which imports the reward."""
        ours, theirs = Pipe()
        held, watched = Pipe()  # nothing is sent: what happens on it is the end of this process
        # It imports the reward as this process would, and is not ready yet.
        module = "rlhf_jax.rewards.serving"
        process = subprocess.Popen(  # noqa: S603  # this Python, and the config's own reward
            [sys.executable, "-P", "-m", module, self._spec, str(watched.fileno())],
            stdin=theirs.fileno(),
            pass_fds=(watched.fileno(),),
            stdout=screen(),  # what a reward prints
            stderr=screen(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        theirs.close()
        watched.close()
        limit_wait(ours)
        self._children.append(_Child(process, ours, held, time.monotonic() + START_SECONDS))

    def _send(self, child: _Child, number: int) -> None:
        responses = self._calls[number]
        seconds = self._seconds * len(responses)
        grace = GRACE if self.signature().is_async else 0.0
        child.deadlines[number] = time.monotonic() + seconds + grace
        # a dead child is noticed when its result is read
        with contextlib.suppress(OSError):
            send(child.pipe, RewardCall(number, seconds, responses))

    def _receive(self, child: _Child) -> None:
        """Take a child's reply; one that sends anything else is ended: its calls have failed."""
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

        if isinstance(reply, RewardResults) and reply.number in child.deadlines:
            if len(reply.results) != len(self._calls[reply.number]):
                return self._give_up(child, "sent results of another number of responses")
            del child.deadlines[reply.number]
            return self._note(reply.number, reply.results)
        if child.ready:
            return self._give_up(child, "sent a reply out of turn")
        match reply:
            case WorkerImports() if not child.imports:
                child.imports = True
                child.start_deadline = time.monotonic() + self._import_limit()
            case WorkerReady() if child.imports and reply.form in set(Form):
                child.ready = True
                self._note_signature(Signature(Form(reply.form), reply.is_async))
            case RewardFailure():
                self._end(child)
                raise ValueError(f"{reply.reason.rstrip('.')}.")
            case _:
                self._give_up(child, "sent a reply out of turn")

    def _note_signature(self, signature: Signature) -> None:
        """Note how the reward wants to be called; what the first process told stays."""
        if self._signature is None:
            self._signature = signature
            if signature.is_async:
                self._count = 1
            else:
                self._capacity = 1

    def _import_limit(self) -> float:
        """Return the seconds for an import: those of a call, until one process has managed it."""
        return self._import_seconds if self._signature is None else START_SECONDS

    def _lateness(self, child: _Child) -> str:
        """Say for what a child took too long."""
        if child.ready:
            return _late(self._seconds)
        if not child.imports:
            return _late(START_SECONDS)
        return (
            f"was not imported within {self._import_limit():g} s; import less, or raise"
            " reward.seconds"
        )

    def _note(self, number: int, results: list[RewardResult]) -> None:
        """Note what came of a call."""
        del self._calls[number]
        self._results[number] = results
        self._works |= not all(map(failure, results))
        self._hung += results[0] == _late(self._seconds)

    def _give_up(self, child: _Child, reason: str) -> None:
        """End a child: its calls have failed.

        One that never got ready would not do so the next time either: that is a ValueError.
        """
        self._end(child)
        if not child.deadlines:
            raise ValueError(
                f"Reward {self._spec} does not start in a process of its own: it"
                f" {reason.rstrip('.')}."
            )
        for number in child.deadlines:
            self._note(number, [reason] * len(self._calls[number]))

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
