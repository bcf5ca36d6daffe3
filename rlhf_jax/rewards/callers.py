"""Rewards that are functions of the calling program, as a notebook has them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import inspect
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from rlhf_jax.config.schema import Config
from rlhf_jax.rewards.calls import RewardCall
from rlhf_jax.rewards.combination import (
    Response,
    Reward,
    RewardResult,
    Scores,
    as_scores,
    failure,
    in_order,
    refuse_broken,
)
from rlhf_jax.rewards.serving import call, call_async
from rlhf_jax.rewards.signatures import EarlyCalls, calls_of, signature_of
from rlhf_jax.rewards.sources import SOURCES, RewardSource

SCHEME = "caller"
SILENCE = 1.0  # seconds between two signs of life
PLAIN_TYPES = (str, bytes, int, float, bool, type(None))


class CallerSource(RewardSource):
    """Call functions that this process has given."""

    def __init__(self):
        self.functions: dict[str, Reward] = {}  # by spec

    def term_name(self, spec: str) -> str:
        """Return the function's own name."""
        return spec.removeprefix(f"{SCHEME}://").partition("/")[0]

    def check(self, spec: str) -> None:
        """Refuse a function that this process was not given."""
        if spec not in self.functions:
            raise ValueError(
                f"Reward {spec!r} was a function of the program that began the run: go on with it"
                " by rlhf_jax.train(config, reward=...)."
            )

    @contextlib.contextmanager
    def open(self, spec: str, config: Config, alive: Callable[[], None]) -> Iterator[CallerScorer]:
        """Call the function in a thread; a plain call that takes too long is told, and not ended.

        An async function has up to `reward.concurrency` calls under way.
        """
        name = self.term_name(spec)
        function = self.functions[spec]
        seconds = math.inf if config.deterministic else config.reward.seconds
        if signature_of(function).is_async:
            calls = _in_loop(name, function, config.reward.concurrency)
        else:
            calls = _in_turn(name, function)
        with calls as submit:
            yield CallerScorer(name, function, seconds, submit, alive)


Submit = Callable[[RewardCall], Future[list[RewardResult]]]  # begin a call, without waiting


class CallerScorer:
    """Score responses by a function of this process, as they finish or all at once."""

    def __init__(
        self, name: str, function: Reward, seconds: float, submit: Submit, alive: Callable[[], None]
    ):
        self._name = name
        self._form = signature_of(function).form
        self._seconds = seconds  # for each response of a call
        self._submit = submit
        self._alive = alive
        self._works = False  # whether it ever gave a number
        self._early = EarlyCalls()
        self._begun: list[tuple[list[int], Future[list[RewardResult]]]] = []  # keys, what comes

    def __call__(self, responses: Sequence[Response]) -> Scores:
        """Return scores in the order of the responses."""
        parts = calls_of(self._form, responses)
        calls = [self._call([responses[index] for index in part]) for part in parts]
        scores = as_scores(in_order(parts, map(self._wait, calls)))
        if not self._works:
            refuse_broken(self._name, scores)
        return scores

    def begin(self, key: int, response: Response, siblings: tuple[int, ...]) -> None:
        """Start to score a response that `collect` may return under a key; do not wait."""
        whole = self._early.add(self._form, key, response, siblings)
        if whole:
            self._begun.append(([key for key, _ in whole], self._call([one for _, one in whole])))

    def advance(self) -> None:
        """Do nothing: the thread goes on by itself."""

    def collect(self) -> dict[int, RewardResult]:
        """Return the results of all calls that were begun, by key; wait for them.

        There are none where the reward never gave a number, so that a call finds that out.
        """
        found: dict[int, RewardResult] = {}
        for keys, call_of_keys in self._begun:
            found |= zip(keys, self._wait(call_of_keys), strict=True)
        self._begun.clear()
        self._early.clear()
        return found if self._works else {}

    def _call(self, responses: list[Response]) -> Future[list[RewardResult]]:
        return self._submit(RewardCall(0, self._seconds * len(responses), responses))

    def _wait(self, future: Future[list[RewardResult]]) -> list[RewardResult]:
        while not future.done():
            concurrent.futures.wait([future], SILENCE)
            self._alive()
        self._works |= not all(map(failure, future.result()))
        return future.result()


def offer(function: Reward, identity: str = "") -> str:
    """Let a config name a function of this process; return the spec that names it.

    The function is known by its source and the plain values of its closure, or by `identity`.
    Raises ValueError where neither is there.
    """
    if not identity:
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise ValueError(
                "The source of the reward cannot be read, so that a run that goes on could not tell"
                " whether it is the same: give reward_id= a text that names it."
            ) from error
        closure = inspect.getclosurevars(function).nonlocals
        values = {key: value for key, value in closure.items() if isinstance(value, PLAIN_TYPES)}
        identity = f"{source}{sorted(values.items())!r}"
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    spec = f"{SCHEME}://{name}/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    CALLERS.functions[spec] = function
    return spec


@contextlib.contextmanager
def _in_turn(name: str, function: Reward) -> Iterator[Submit]:
    """Call a plain function in a thread, one call after the other."""
    signature = signature_of(function)

    def do(asked: RewardCall) -> list[RewardResult]:
        began = time.monotonic()
        results = call(function, signature, asked)
        if time.monotonic() - began > asked.seconds:
            warnings.warn(f"Reward {name} took longer than {asked.seconds:g} s.", stacklevel=1)
        return results

    worker = concurrent.futures.ThreadPoolExecutor(1, f"reward {name}")
    try:
        yield lambda asked: worker.submit(do, asked)
    finally:
        worker.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _in_loop(name: str, function: Reward, concurrency: int) -> Iterator[Submit]:
    """Call an async function in a thread's event loop, several calls under way."""
    signature = signature_of(function)
    room = asyncio.Semaphore(concurrency)

    async def do(asked: RewardCall) -> list[RewardResult]:
        async with room:
            return await call_async(function, signature, asked)

    async def end_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"reward {name}", daemon=True)
    thread.start()
    try:
        yield lambda asked: asyncio.run_coroutine_threadsafe(do(asked), loop)
    finally:
        asyncio.run_coroutine_threadsafe(end_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


CALLERS = CallerSource()
SOURCES[SCHEME] = CALLERS
