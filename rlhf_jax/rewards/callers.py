"""Rewards that are functions of the calling program, as a notebook has them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from rlhf_jax.config.schema import Config
from rlhf_jax.rewards.calls import RewardCall
from rlhf_jax.rewards.combination import (
    Response,
    Reward,
    RewardResult,
    Scorer,
    as_scores,
    in_order,
    refuse_broken,
)
from rlhf_jax.rewards.serving import call, call_async
from rlhf_jax.rewards.signatures import Signature, calls_of, signature_of
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
    def open(self, spec: str, config: Config, alive: Callable[[], None]) -> Iterator[Scorer]:
        """Call the function in a thread; a plain call that takes too long is told, and not ended.

        An async function has up to `reward.concurrency` calls under way.
        """
        name = self.term_name(spec)
        function = self.functions[spec]
        signature = signature_of(function)
        seconds = math.inf if config.deterministic else config.reward.seconds
        worked = False

        def score(responses: Sequence[Response]):
            nonlocal worked
            parts = calls_of(signature.form, responses)
            calls = [
                RewardCall(number, seconds * len(part), [responses[index] for index in part])
                for number, part in enumerate(parts)
            ]
            if signature.is_async:
                how = functools.partial(_call_together, config.reward.concurrency)
            else:
                how = functools.partial(_call_in_turn, name)
            done = worker.submit(how, function, signature, calls)
            while not done.done():
                concurrent.futures.wait([done], SILENCE)
                alive()
            scores = as_scores(in_order(parts, done.result()))
            if not worked:
                refuse_broken(name, scores)
            worked = True
            return scores

        with concurrent.futures.ThreadPoolExecutor(1, f"reward {name}") as worker:
            yield score


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


def _call_in_turn(
    name: str, function: Reward, signature: Signature, calls: list[RewardCall]
) -> list[list[RewardResult]]:
    """Return what came of each response of calls of a plain function."""
    found = []
    for asked in calls:
        began = time.monotonic()
        found.append(call(function, signature, asked))
        if time.monotonic() - began > asked.seconds:
            warnings.warn(f"Reward {name} took longer than {asked.seconds:g} s.", stacklevel=1)
    return found


def _call_together(
    concurrency: int, function: Reward, signature: Signature, calls: list[RewardCall]
) -> list[list[RewardResult]]:
    """Return what came of each response of calls of an async function, several under way."""

    async def do_all() -> list[list[RewardResult]]:
        room = asyncio.Semaphore(concurrency)

        async def do_one(asked: RewardCall) -> list[RewardResult]:
            async with room:
                return await call_async(function, signature, asked)

        return await asyncio.gather(*map(do_one, calls))

    return asyncio.run(do_all())


CALLERS = CallerSource()
SOURCES[SCHEME] = CALLERS
