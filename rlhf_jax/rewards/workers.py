"""Run Python rewards in the background: the pool that hands out calls and takes replies.

`children.py` defines the children and their messages. The parent imports no reward, and executes
nothing that a child sends.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection

from rlhf_jax.rewards.children import (
    START_SECONDS,
    Child,
    RewardCall,
    RewardFailure,
    RewardResults,
    WorkerImports,
    WorkerReady,
    largest_reply,
    receive_reply,
    send,
    start_process,
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
from rlhf_jax.rewards.functions import Form, Signature
from rlhf_jax.runtime.watchdog import Beat, Seen, look

LEAST_IMPORT_SECONDS = 2.0  # for the import of a reward, if its calls have less
HANGS = 4  # this many timeouts without any success: the reward hangs
SILENCE = 1.0  # most seconds between two signs of life
GRACE = 5.0  # additional seconds in which an async function may end a call that it abandons itself


class Workers:
    """Run a reward function as a scorer, in up to `count` children; an async one in one.

    `start` makes a child from the spec: a process, which alone imports the reward. The first one
    begins with the context. The import and each call take at most `seconds`, per response of the
    call. A call that raises, returns no finite float32, takes too long (never, with math.inf
    seconds), sends anything but a reply or ends its process fails alone; the process is replaced.
    An async function has up to `concurrency` concurrent calls; if their process ends, each is
    repeated alone. ValueError if the reward is broken: it cannot be imported, or it has never
    returned a number and fails on every answer, or hangs. `observe` is called after every wait for
    results, of at most a second; it may raise to stop the call. If nothing arrives for `silence`
    seconds, a warning is printed. Leaving the context kills the processes and all processes that
    they started; they also end when this process does, killed or not.
    """

    def __init__(
        self,
        spec: str,
        count: int,
        seconds: float,
        observe: Callable[[], None] = lambda: None,
        concurrency: int = 1,
        silence: float = math.inf,
        start: Callable[[str], Child] = start_process,
    ):
        self._spec = spec
        self._start = functools.partial(start, spec)
        self._silence = silence
        self._seen = Seen(Beat(f"reward {spec}", 0.0), silence)
        self._count = count
        self._capacity = concurrency  # calls of a process
        self._seconds = seconds
        self._import_seconds = max(seconds, LEAST_IMPORT_SECONDS)
        if spec in READY or math.isinf(seconds):
            self._import_seconds = START_SECONDS
        self._observe = observe
        self._children: list[Child] = []
        self._works = False  # whether it ever returned a number
        self._hung = 0  # calls out of time
        self._numbers = itertools.count()
        self._calls: dict[int, list[Response]] = {}  # without results yet, by number
        self._waiting: collections.deque[int] = collections.deque()  # those not handed out
        self._alone: set[int] = set()  # of which one may have ended their process
        self._results: dict[int, list[RewardResult]] = {}  # not collected yet
        self._signature: Signature | None = None  # from the first process
        self._early = EarlyCalls()
        self._begun: dict[int, list[int]] = {}  # by call, the keys from `begin`

    def __enter__(self) -> Workers:
        self._children.append(self._start())
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and drop all calls; a later call starts new ones."""
        for state in (self._calls, self._waiting, self._alone, self._results, self._begun):
            state.clear()
        self._early.clear()
        while self._children:
            self._end(self._children[-1])

    def signature(self) -> Signature:
        """Return the reward's call signature; wait for the first process to import it."""
        if self._signature is None:
            if not self._children:
                self._children.append(self._start())
            self._wait_while(lambda: self._signature is None)
            assert self._signature is not None
        return self._signature

    def __call__(self, answers: Sequence[Response]) -> Scores:
        """Return scores in the order of the answers."""
        parts = _calls_of(self.signature().form, answers)
        numbers = [self._enqueue([answers[index] for index in part]) for part in parts]
        self._wait_while(lambda: any(number in self._calls for number in numbers))
        scores = as_scores(in_order(parts, map(self._results.pop, numbers)))
        if not self._works:
            refuse_broken(self._spec, scores)
        return scores

    def begin(self, key: int, answer: Response, siblings: tuple[int, ...]) -> None:
        """Start scoring an answer that `collect` may return under a key, without waiting.

        A call of several answers begins when it is complete; siblings: as in `EarlyCalls`.
        """
        if whole := self._early.add(self.signature().form, key, answer, siblings):
            number = self._enqueue([answer for _, answer in whole])
            self._begun[number] = [key for key, _ in whole]

    def advance(self) -> None:
        """Hand out calls and take replies, without waiting."""
        if self._calls:
            self._serve(0.0)

    def collect(self) -> dict[int, RewardResult]:
        """Return the results of all started calls, by key; wait for them.

        There are none if the reward never returned a number; a call then reports that.
        """
        self._wait_while(lambda: any(number in self._calls for number in self._begun))
        results: dict[int, RewardResult] = {}
        for number, keys in self._begun.items():
            results |= zip(keys, self._results.pop(number), strict=True)
        self._begun.clear()
        self._early.clear()
        return results if self._works else {}

    def _enqueue(self, responses: list[Response]) -> int:
        number = next(self._numbers)
        self._calls[number] = responses
        self._waiting.append(number)
        return number

    def _wait_while(self, holds: Callable[[], bool]) -> None:
        self._collect_answers()
        try:
            while holds():
                self._serve(SILENCE)
                now = time.monotonic()
                self._seen, sentences = look(self._seen, self._seen.beat, now, self._silence)
                for sentence in sentences:  # `observe` takes the wait itself for a sign of life
                    warnings.warn(sentence, stacklevel=1)
                self._observe()
        except BaseException:
            self.close()  # pending results must not be taken for a later call's
            raise

    def _collect_answers(self) -> None:
        """Note that something arrived, or that a wait begins."""
        self._seen = Seen(self._seen.beat._replace(at=time.monotonic()), self._silence)

    def _serve(self, patience: float) -> None:
        """Hand out calls, and take replies until the patience ends or a deadline passes."""
        self._hand_out()
        busy = {child.pipe: child for child in self._children if child.busy}
        # There is none if all children with calls have just been ended.
        left = min((child.deadline for child in busy.values()), default=0.0) - time.monotonic()
        for pipe in connection.wait(list(busy), min(max(0.0, left), patience)):
            self._receive(busy[pipe])  # pyright: ignore[reportArgumentType]
        for child in self._children.copy():
            late = child.busy and child.deadline <= time.monotonic()
            if late and not child.pipe.poll():  # and there is no unread reply
                self._give_up(child, self._lateness(child), hung=child.ready)
        if self._hung >= HANGS and not self._works:
            raise ValueError(
                f"Reward {self._spec} hangs: {self._hung} calls {_late(self._seconds)} and none"
                " succeeded; make it faster or raise its seconds."
            )

    def _hand_out(self) -> None:
        for child in [child for child in self._children if not child.busy and child.gone()]:
            self._end(child)
        free = sum(not child.deadlines for child in self._children)
        for _ in range(min(self._count - len(self._children), len(self._waiting) - free)):
            self._children.append(self._start())
        for child in self._children.copy():
            while self._waiting and child.ready and not child.pipe.closed:
                alone = not self._alone.isdisjoint((self._waiting[0], *child.deadlines))
                if len(child.deadlines) >= (1 if alone else self._capacity):
                    break
                self._send(child, self._waiting.popleft())

    def _send(self, child: Child, number: int) -> None:
        responses = self._calls[number]
        seconds = self._seconds * len(responses)
        grace = GRACE if self.signature().is_async else 0.0
        child.deadlines[number] = time.monotonic() + seconds + grace
        try:
            send(child.pipe, RewardCall(number, seconds, responses))
        except BlockingIOError:  # it does not even read
            self._give_up(child, "did not take its call")
        except OSError:
            pass  # a dead child is noticed when its result is read
        except ValueError as error:
            del child.deadlines[number]
            reason = f"could not be reached ({str(error).rstrip('.')})"
            self._note(number, [reason] * len(responses))

    def _receive(self, child: Child) -> None:
        """Take a child's reply; if it sends anything else, end it: its calls have failed."""
        largest = largest_reply(max((len(self._calls[n]) for n in child.deadlines), default=1))
        try:
            reply = receive_reply(child.pipe, largest)
        except (EOFError, ConnectionError):
            return self._give_up(child, child.ending())
        except BlockingIOError:
            return self._give_up(child, "began a reply and did not end it")
        except OSError as error:
            reason = f"sent no reply of at most {largest:,} bytes ({error})"
            return self._give_up(child, reason)
        except ValueError as error:
            return self._give_up(child, f"sent no reply ({str(error).rstrip('.')})")

        self._collect_answers()
        if isinstance(reply, RewardResults) and reply.number in child.deadlines:
            count = len(self._calls[reply.number])
            if reply.results is not None and len(reply.results) != count:
                return self._give_up(child, "sent results of another number of responses")
            del child.deadlines[reply.number]
            if reply.results is None:
                self._hung += 1
            return self._note(reply.number, reply.results or [_late(self._seconds * count)] * count)
        if child.ready:
            return self._give_up(child, "sent a reply out of turn")
        match reply:
            case WorkerImports() if not child.imports:
                child.imports = True
                child.start_deadline = time.monotonic() + self._import_limit()
            case WorkerReady() if child.imports and reply.form in set(Form):
                child.ready = True
                self._note_signature(Signature(Form(reply.form), reply.is_async, reply.columns))
            case RewardFailure():
                self._end(child)
                raise ValueError(f"{reply.reason.rstrip('.')}.")
            case _:
                self._give_up(child, "sent a reply out of turn")

    def _note_signature(self, signature: Signature) -> None:
        """Note the reward's call signature; the first process decides."""
        if self._signature is None:
            self._signature = signature
            if signature.is_async:
                self._count = 1
            else:
                self._capacity = 1

    def _import_limit(self) -> float:
        """Return the seconds for an import: those of a call, until one process has managed it."""
        return self._import_seconds if self._signature is None else START_SECONDS

    def _lateness(self, child: Child) -> str:
        """Describe the step for which a child took too long."""
        if child.ready:
            longest = max(len(self._calls[number]) for number in child.deadlines)
            return _late(self._seconds * longest)
        if not child.imports:
            return _late(START_SECONDS)
        return (
            f"was not imported within {self._import_limit():g} s; import less, or raise"
            " reward.seconds"
        )

    def _note(self, number: int, results: list[RewardResult]) -> None:
        """Note the results of a call."""
        del self._calls[number]
        self._alone.discard(number)
        self._results[number] = results
        self._works |= not all(map(failure, results))

    def _give_up(self, child: Child, reason: str, hung: bool = False) -> None:
        """End a child: its call has failed; if it had several, each is repeated alone.

        A child that never got ready would not do so the next time either: that is a ValueError.
        """
        self._end(child)
        if not child.deadlines:
            raise ValueError(
                f"Reward {self._spec} does not start in a process of its own: it"
                f" {reason.rstrip('.')}."
            )
        first, *others = child.deadlines
        if others:
            self._waiting.extendleft(reversed(child.deadlines))
            self._alone.update(child.deadlines)
        else:
            self._hung += hung
            self._note(first, [reason] * len(self._calls[first]))

    def _end(self, child: Child) -> None:
        self._children.remove(child)
        child.end()


def _late(seconds: float) -> str:
    return f"took longer than {seconds:g} s"


def _calls_of(form: Form, responses: Sequence[Response]) -> list[list[int]]:
    """Split responses into calls: the indices of the responses of each."""
    if form is Form.ONE:
        return [[index] for index in range(len(responses))]
    if form is Form.BATCH:
        return [list(range(len(responses)))] if responses else []
    groups: dict[int, list[int]] = {}
    for index, response in enumerate(responses):
        groups.setdefault(response.group, []).append(index)
    return list(groups.values())


class EarlyCalls:
    """Group responses that finish one by one into calls of a form, once each is complete."""

    def __init__(self):
        self._unfinished: dict[tuple[int, ...], dict[int, Response]] = {}  # by siblings

    def add(
        self, form: Form, key: int, response: Response, siblings: tuple[int, ...]
    ) -> list[tuple[int, Response]]:
        """Return the keys and responses of the call that this response completes, or nothing.

        siblings: the keys of all samples of its prompt, in request order. A call of all responses
        is never complete here, as the last one is unknown.
        """
        if form is Form.ONE:
            return [(key, response)]
        group = self._unfinished.setdefault(siblings, {})
        group[key] = response
        if form is Form.BATCH or len(group) < len(siblings):
            return []
        del self._unfinished[siblings]
        return [(one, group[one]) for one in siblings]

    def clear(self) -> None:
        """Drop incomplete calls."""
        self._unfinished.clear()
