"""Sources of rewards in a config, found in a registry by the scheme of a spec.

`SCHEME://...` belongs to the source registered for that scheme. Any other spec names a Python
function, which runs in separate processes. A new kind, such as a judge over HTTP, is a class with
these three methods and one call of `register`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlhf_jax.config.derived import reward_models
from rlhf_jax.config.schema import Config
from rlhf_jax.rewards.children import Child, start_process, start_thread
from rlhf_jax.rewards.combination import READY, Reward, Scorer
from rlhf_jax.rewards.functions import ANSWERS, CHOICE, Signature
from rlhf_jax.rewards.workers import Workers
from rlhf_jax.runtime.extensions import split_name

CALLER = "caller"  # the scheme of functions of the calling program, such as a notebook
PLAIN_TYPES = (str, bytes, int, float, bool, type(None))


class RewardSource(Protocol):
    """Turn specs of one kind, from `reward.functions` and `reward.metrics`, into scorers.

    In a run of several processes each opens the source, and has it score a share of the responses.
    """

    def term_name(self, spec: str) -> str:
        """Return the name of the term in metrics."""
        ...

    def check(self, spec: str) -> None:
        """Raise ValueError or FileNotFoundError, in one sentence, if the spec cannot work."""
        ...

    def open(
        self, spec: str, config: Config, alive: Callable[[], None]
    ) -> AbstractContextManager[Scorer]:
        """Return a context in which the spec's scorer works.

        A response that cannot be scored is a failure of its own (`combination.as_scores`). `alive`
        must be called every second while scores are awaited; it may raise.
        """
        ...


class FunctionSource(RewardSource):
    """Run Python functions, named by file or module, in worker processes."""

    def term_name(self, spec: str) -> str:
        """Return the function's own name."""
        return spec.rpartition(":")[2]

    def check(self, spec: str) -> None:
        """Look for the file; `check_sources` imports the function in a separate process."""
        split_name(READY.get(spec, spec), "Reward")

    def open(
        self, spec: str, config: Config, alive: Callable[[], None]
    ) -> AbstractContextManager[Workers]:
        """Start worker processes."""
        return workers_of(spec, config, alive, config.reward.workers, start_process)


class CallerSource(FunctionSource):
    """Call functions that were registered in this process."""

    def __init__(self):
        self.functions: dict[str, Reward] = {}  # by spec

    def term_name(self, spec: str) -> str:
        """Return the function's own name."""
        return spec.removeprefix(f"{CALLER}://").partition("/")[0]

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


def workers_of(
    name: str, config: Config, alive: Callable[[], None], count: int, start: Callable[[str], Child]
) -> Workers:
    """Make the pool of a config; a deterministic run has no time limit."""
    return Workers(
        name,
        count,
        math.inf if config.deterministic else config.reward.seconds,
        alive,
        config.reward.concurrency,
        config.watchdog_seconds or math.inf,
        start,
    )


PYTHON_FUNCTIONS = FunctionSource()
CALLERS = CallerSource()
SOURCES: dict[str, RewardSource] = {CALLER: CALLERS}  # by scheme


def register(scheme: str, source: RewardSource) -> None:
    """Register a source for rewards `SCHEME://...` in a config.

    Raises ValueError if the scheme is taken or invalid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ValueError(f"A reward's scheme cannot be {scheme!r}: use small letters and digits.")
    if SOURCES.get(scheme, source) is not source:
        raise ValueError(f"There is a reward source {scheme!r} already; choose another scheme.")
    SOURCES[scheme] = source


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
    spec = f"{CALLER}://{name}/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    CALLERS.functions[spec] = function
    return spec


def source_of(spec: str) -> RewardSource:
    """Return the source of a spec; raises ValueError if its scheme is not registered."""
    scheme, separator, _ = spec.partition("://")
    if not separator:
        return PYTHON_FUNCTIONS
    if scheme not in SOURCES:
        raise ValueError(f"Reward {spec!r}: no source is registered for {scheme}://.")
    return SOURCES[scheme]


def term_names(config: Config) -> list[str]:
    """Return the metric names of the reward's functions, then its models, in the config's order.

    A function has its own name, another source's term the name that it gives, a model the last part
    of its path.
    """
    functions = [source_of(spec).term_name(spec) for spec in config.reward.functions]
    folders = map(pathlib.PurePath, reward_models(config))
    # a preference model that a run has left is called as the run
    return functions + [
        path.parent.name if path.name == "policy" else path.name for path in folders
    ]


def check_sources(config: Config) -> dict[str, Signature]:
    """Return the call signature of each function, by its spec.

    Raises ValueError or FileNotFoundError for the first reward or measure that cannot work.
    Functions are imported concurrently by separate processes.
    """
    reward = config.reward
    labels = (reward.labels,) if reward.labels else ()
    specs = dict.fromkeys((*reward.functions, *labels, *reward.metrics.values()))
    for spec in specs:
        source_of(spec).check(spec)
    sources = {spec: source_of(spec) for spec in specs}
    with contextlib.ExitStack() as stack:
        started = {
            spec: stack.enter_context(source.open(spec, config, lambda: None))
            for spec, source in sources.items()
            if isinstance(source, FunctionSource)
        }
        return {spec: workers.signature() for spec, workers in started.items()}


def check_columns(signatures: Mapping[str, Signature], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a function names a column that none of the prompts' rows has."""
    there = {name for row in rows for name in row}
    answers = {"ground_truth"} if ANSWERS in there else set()
    for spec, signature in signatures.items():
        for missing in [name for name in signature.columns if name not in there | answers]:
            raise ValueError(
                f"Reward {spec!r} has a parameter {missing!r}, which is no column of the prompts"
                f" ({', '.join(sorted(map(str, there)))}): rename it, give it a default, or map the"
                f" column by data.columns; a reward may name {CHOICE}."
            )
