"""Rewards that are functions of the calling program, such as a notebook."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable

from rlhf_jax.config.schema import Config
from rlhf_jax.rewards.children import start_thread
from rlhf_jax.rewards.combination import Reward
from rlhf_jax.rewards.sources import SOURCES, FunctionSource, workers_of
from rlhf_jax.rewards.workers import Workers

SCHEME = "caller"
PLAIN_TYPES = (str, bytes, int, float, bool, type(None))


class CallerSource(FunctionSource):
    """Call functions that were registered in this process."""

    def __init__(self):
        self.functions: dict[str, Reward] = {}  # by spec

    def term_name(self, spec: str) -> str:
        """Return the function's own name."""
        return spec.removeprefix(f"{SCHEME}://").partition("/")[0]

    def check(self, spec: str) -> None:
        """Refuse a function that was not registered in this process."""
        if spec not in self.functions:
            raise ValueError(
                f"Reward {spec!r} was a function of the program that began the run: go on with it"
                " by rlhf_jax.train(config, reward=...)."
            )

    def open(self, spec: str, config: Config, alive: Callable[[], None]) -> Workers:
        """Call the function in a thread; a call that takes too long is abandoned."""
        function = self.functions[spec]
        start = functools.partial(start_thread, function=function)
        return workers_of(self.term_name(spec), config, alive, count=1, start=start)


def offer(function: Reward, identity: str = "") -> str:
    """Register a function of this process; return the spec that names it.

    Its source and the plain values of its closure, or `identity`, identify the function. Raises
    ValueError if neither is available.
    """
    if not identity:
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise ValueError(
                "The source of the reward cannot be read, so that a resumed run could not know"
                " whether it is the same: give reward_id= a text that names it."
            ) from error
        closure = inspect.getclosurevars(function).nonlocals
        values = {key: value for key, value in closure.items() if isinstance(value, PLAIN_TYPES)}
        identity = f"{source}{sorted(values.items())!r}"
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    spec = f"{SCHEME}://{name}/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    CALLERS.functions[spec] = function
    return spec


CALLERS = CallerSource()
SOURCES[SCHEME] = CALLERS
