"""Rewards of responses, on the host: inputs, results of a scorer, and weighted sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from rlhf_jax.runtime import messages
from rlhf_jax.runtime.extensions import load_named

# A function that scores responses; `functions` defines its forms.
Reward = Callable[..., Any]

# Rewards of the package that a config names without a module.
READY = {
    "math_verify": "rlhf_jax.rewards.ready.answers:math_verify",
    "think_format": "rlhf_jax.rewards.ready.formats:think_format",
}

LARGEST = float(np.finfo(np.float32).max)


@messages.register
@dataclasses.dataclass(frozen=True)
class Response:
    """Hold a response with all inputs of a reward."""

    prompt: str  # the user's text
    messages: list[dict[str, Any]]  # the chat before the response, system message included
    row: dict[str, Any]  # the prompt's whole row of the file
    response: str
    tokens: list[int] = dataclasses.field(default_factory=list)  # of the response
    group: int = 0  # of the samples of one prompt, in one roll-out


@messages.register
@dataclasses.dataclass(frozen=True)
class Score:
    """Hold the reward of a response, and further numbers that are logged by their names.

    An invalid number is NaN.
    """

    value: float
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


RewardResult = Score | str  # of a response: its score, or the reason of a failure


@messages.register
@dataclasses.dataclass(frozen=True)
class Scores:
    """Hold one number for each response, or the reason of a failure."""

    values: np.ndarray  # [B] float32, NaN where scoring failed
    failures: dict[int, str]  # index of the response -> reason, in order of the responses
    # of responses with further numbers: index -> numbers by name
    numbers: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)

    def result(self, index: int) -> RewardResult:
        """Return the result of one response."""
        if index in self.failures:
            return self.failures[index]
        return Score(float(self.values[index]), self.numbers.get(index, {}))


class Broken(ValueError):
    """Report a reward that has never returned a number, and failed for all of these responses."""

    def __init__(self, message: str, scores: Scores):
        super().__init__(message)
        self.scores = scores


Scorer = Callable[[Sequence[Response]], Scores]


@runtime_checkable
class EagerScorer(Protocol):
    """Score responses as they arrive, in the background, and the rest when called."""

    def __call__(self, responses: Sequence[Response], /) -> Scores:
        """Score responses, and wait for the results."""
        ...

    def begin(self, key: int, response: Response, siblings: tuple[int, ...]) -> None:
        """Start scoring a response that `collect` may return under a key, without waiting.

        siblings: the keys of all samples of its prompt, this one's included, in order.
        """
        ...

    def advance(self) -> None:
        """Make progress without waiting."""
        ...

    def collect(self) -> dict[int, RewardResult]:
        """Return the results of started responses by key; wait for them."""
        ...


class Term(NamedTuple):
    """Describe one summand of a reward."""

    name: str
    weight: float
    scorer: Scorer


def weighted(
    terms: Sequence[Term],
    responses: Sequence[Response],
    known: Mapping[str, Mapping[int, RewardResult]] = {},
) -> tuple[Scores, dict[str, float]]:
    """Compute the weighted sum of several scorers, and metrics of each.

    known: by term, results that some responses have already, by their index. A response fails if
    any term fails, for the reason of the first such term. `reward/<name>/mean` is over the
    responses that the term could score, and left out if there are none; `reward/<name>/failed`
    counts the others. `reward/<name>/<number>` is the mean of a further number over the responses
    that have it, and `reward/<name>/<number>/failed` counts those whose number was not finite, if
    any. Broken if a term is, and none of its results was known.
    """
    values = np.zeros(len(responses), np.float32)
    failures = {}
    metrics = {}
    for name, weight, scorer in terms:
        scores = _with_known(scorer, responses, known.get(name, {}))
        with np.errstate(over="ignore", invalid="ignore"):  # reported below
            values += np.float32(weight) * scores.values
        reasons = {index: f"{name} {reason}" for index, reason in scores.failures.items()}
        failures = reasons | failures
        if len(scores.failures) < len(responses):
            metrics[f"reward/{name}/mean"] = float(np.nanmean(scores.values, dtype=float))
        metrics[f"reward/{name}/failed"] = float(len(scores.failures))
        metrics |= {f"reward/{name}/{key}": one for key, one in means_of(scores.numbers).items()}
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        failures.setdefault(index, f"gave a weighted sum of {values[index]}")
    return Scores(values, dict(sorted(failures.items()))), metrics


def means_of(numbers: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each further number, and the count of non-finite ones."""
    means = {}
    for name in sorted({one for own in numbers.values() for one in own}):
        values = np.array([own[name] for own in numbers.values() if name in own])
        finite = values[np.abs(values) <= LARGEST]
        if finite.size:
            means[name] = float(np.mean(finite))
        if finite.size < values.size:
            means[f"{name}/failed"] = float(values.size - finite.size)
    return means


def _with_known(
    scorer: Scorer, responses: Sequence[Response], known: Mapping[int, RewardResult]
) -> Scores:
    """Score the responses without known results, and join both."""
    rest = [index for index in range(len(responses)) if index not in known]
    try:
        scored = scorer([responses[index] for index in rest]) if rest else as_scores([])
    except Broken as broken:
        if not known:
            raise
        scored = broken.scores
    fresh = {index: scored.result(place) for place, index in enumerate(rest)}
    joined = {**known, **fresh}
    return as_scores([joined[index] for index in range(len(responses))])


def as_scores(results: Sequence[float | RewardResult]) -> Scores:
    """Return the scores of one result for each response: a number, or the reason of a failure.

    A number beyond float32 is a failure.
    """
    values = np.full(len(results), np.nan, np.float32)
    failures = {}
    numbers = {}
    for index, result in enumerate(results):
        if reason := failure(result):
            failures[index] = reason
        elif isinstance(result, Score):
            values[index] = result.value
            numbers |= {index: result.numbers} if result.numbers else {}
        else:
            values[index] = result
    return Scores(values, failures, numbers)


def in_order(
    parts: Sequence[Sequence[int]], results: Iterable[Iterable[RewardResult]]
) -> list[RewardResult]:
    """Return results in the order of the responses; parts: the indices of each part."""
    by_index = {
        index: result
        for part, own in zip(parts, results, strict=True)
        for index, result in zip(part, own, strict=True)
    }
    return [by_index[index] for index in range(len(by_index))]


def failure(result: float | RewardResult) -> str:
    """Return why a result is not a score; '' if it is one."""
    if isinstance(result, str):
        return result
    value = result.value if isinstance(result, Score) else result
    if not abs(value) <= LARGEST:  # nor is NaN
        return f"gave {value}, which is no finite float32"
    return ""


def refuse_broken(name: str, scores: Scores) -> None:
    """Raise Broken, with the first reason, if every response failed.

    Use it for a reward that has never returned a number: another may fail on a whole batch without
    being broken.
    """
    if scores.failures and len(scores.failures) == len(scores.values):
        first = scores.failures[0].rstrip(".")
        raise Broken(
            f"Reward {name} failed on all {len(scores.values)} answers; the first one {first}.",
            scores,
        )


@functools.cache
def load_reward(spec: str) -> Reward:
    """Return the function named by "package.module:function" or "path/to/file.py:function".

    The package's own rewards have a bare name. Errors are those of `load_named`; also ValueError
    for anything but a function.
    """
    reward = load_named(READY.get(spec, spec), "Reward")
    if not callable(reward):
        raise ValueError(f"Reward {spec!r} is of type {type(reward).__name__}, not a function.")
    return cast(Reward, reward)
