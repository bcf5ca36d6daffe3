"""Rewards of responses, on the host: what is scored, what a scorer gives, and weighted sums."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from rlhf_jax.runtime import messages

# A function of (prompt, response, row of the prompt file).
Reward = Callable[[str, str, dict[str, Any]], float]

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Response:
    """Hold a response with all that a reward may read."""

    prompt: str  # what the user said
    messages: list[dict[str, Any]]  # the chat that was answered, system message included
    row: dict[str, Any]  # the prompt's whole row of the file
    response: str


@messages.register
@dataclasses.dataclass(frozen=True)
class Scores:
    """Hold one number for each response, or the reason why there is none."""

    values: np.ndarray  # [B] float32, NaN where scoring failed
    failures: dict[int, str]  # index of the response -> reason, in order of the responses


class Broken(ValueError):
    """Report a reward that has never given a number, and gave none for any of these responses."""

    def __init__(self, message: str, scores: Scores):
        super().__init__(message)
        self.scores = scores


Scorer = Callable[[Sequence[Response]], Scores]


class Term(NamedTuple):
    """Describe one summand of a reward."""

    name: str
    weight: float
    scorer: Scorer


def weighted(
    terms: Sequence[Term],
    responses: Sequence[Response],
    known: Mapping[str, Mapping[int, float]] = {},
) -> tuple[Scores, dict[str, float]]:
    """Compute the weighted sum of several scorers, and metrics of each.

    known: by term, scores that some responses have already, by their index. A response fails where
    any term fails, for the reason of the first such term. `reward/<name>/mean` is over the
    responses that the term could score, and left out where there are none; `reward/<name>/failed`
    counts the others. Broken where a term is, and none of its scores was known.
    """
    values = np.zeros(len(responses), np.float32)
    failures = {}
    metrics = {}
    for name, weight, scorer in terms:
        scores = _with_known(scorer, responses, known.get(name, {}))
        values += np.float32(weight) * scores.values
        own = {index: f"{name} {reason}" for index, reason in scores.failures.items()}
        failures = own | failures
        if len(scores.failures) < len(responses):
            metrics[f"reward/{name}/mean"] = float(np.nanmean(scores.values))
        metrics[f"reward/{name}/failed"] = float(len(scores.failures))
    return Scores(values, dict(sorted(failures.items()))), metrics


def _with_known(
    scorer: Scorer, responses: Sequence[Response], known: Mapping[int, float]
) -> Scores:
    """Score the responses that have no known score, and join both."""
    rest = [index for index in range(len(responses)) if index not in known]
    try:
        found = scorer([responses[index] for index in rest]) if rest else as_scores([])
    except Broken as broken:
        if not known:
            raise
        found = broken.scores
    values = np.array([known.get(index, np.nan) for index in range(len(responses))], np.float32)
    values[rest] = found.values
    return Scores(values, {rest[index]: reason for index, reason in found.failures.items()})


def as_scores(results: Sequence[float | str]) -> Scores:
    """Return the scores of one result for each response: a number, or the reason of a failure.

    A number beyond float32 is a failure.
    """
    failures = {
        index: reason for index, result in enumerate(results) if (reason := failure(result))
    }
    values = [np.nan if index in failures else result for index, result in enumerate(results)]
    return Scores(np.array(values, np.float32), failures)


def failure(result: float | str) -> str:
    """Say why a result is no score; empty where it is one."""
    if isinstance(result, str):
        return result
    # NaN is not <= LARGEST either.
    return "" if abs(result) <= LARGEST else f"gave {result}, which is no finite float32"


def refuse_broken(name: str, scores: Scores) -> None:
    """Raise Broken, with the first reason, where every response failed.

    It is for a reward that has never given a number: one that has may fail on a whole batch and
    still not be broken.
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

    A relative path is looked up in the current folder, then in the repository. ValueError or
    FileNotFoundError says in one sentence what is wrong: the form, the file, the import, the name,
    or that it is no function.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"Reward {spec!r} must look like path/to/file.py:function or package.module:function."
        )
    module = (
        _load_file(place, spec)
        if place.endswith(".py")
        else _load(spec, lambda: importlib.import_module(place))
    )
    reward = getattr(module, name, None)
    if reward is None:
        raise ValueError(f"Reward {spec!r}: {place} defines no {name!r}.")
    if not callable(reward):
        raise ValueError(f"Reward {spec!r} is of type {type(reward).__name__}, not a function.")
    return cast(Reward, reward)


def _load_file(place: str, spec: str) -> types.ModuleType:
    """Load the Python file at `place`, of the current folder or of the repository."""
    candidates = [
        folder / pathlib.Path(place).expanduser() for folder in (pathlib.Path.cwd(), REPOSITORY)
    ]
    path = next((path.resolve() for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"Reward {spec!r}: there is no file {place} in {candidates[0].parent} or {REPOSITORY}."
        )
    return _load(spec, lambda: _execute(path))


def _execute(path: pathlib.Path) -> types.ModuleType:
    """Run a Python file as a module of its own.

    It is registered because dataclasses look their module up.
    """
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(spec: str, load: Callable[[], types.ModuleType]) -> types.ModuleType:
    """Call `load`, and say of which reward it was where it fails."""
    try:
        return load()
    except Exception as error:  # The user's file may raise anything.
        raise ValueError(
            f"Reward {spec!r} cannot be imported: {type(error).__name__}: {error}."
        ) from error
