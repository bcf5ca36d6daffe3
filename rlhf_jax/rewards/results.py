"""Convert the return values of a reward function: scores, or reasons of failures.

A score is a number: Python's, or a scalar of numpy, jax or torch. Further numbers are logged:
`(score, {"name": number})`, or a dict with a "score", as in verl.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.rewards.combination import LARGEST, RewardResult, Score, failure

MESSAGE = 200  # characters kept of an error in a call
TEXTS = str | bytes | bytearray | memoryview
# Names of a term's own metrics, and the prefix for a number with such a name.
TAKEN = ("mean", "failed", "")
OWN = "own/"


class Logged:
    """Collect the numbers that a call logs itself; several of one name are averaged."""

    def __init__(self):
        self._found: dict[str, list[float]] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a number; TRL calls this `log_metric`."""
        self._found.setdefault(metric_name(name), []).append(_number_or_nan(value))

    def means(self) -> dict[str, float]:
        """Return the mean of each name; NaN if any of its numbers is invalid."""
        return {name: sum(values) / len(values) for name, values in self._found.items()}


def results_of(alone: bool, value: Any, count: int, logged: Logged) -> list[RewardResult]:
    """Return one result for each of the `count` responses of a call, from the return value.

    alone: the function scores a response at a time, and so returns no list.
    """
    if alone:
        return [_result(value)]
    values = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(values, Sequence) and not isinstance(values, TEXTS)
    if not is_list or len(values) != count:
        size = f" of {len(values)}" if is_list else ""
        reason = f"gave a {type(values).__name__}{size} instead of a list of {count} floats"
        return [reason] * count
    # In TRL a reward that does not apply to a response is None, and adds nothing.
    items = [values[index] for index in range(count)]
    results = [_result(0.0 if item is None else item) for item in items]
    for index, result in enumerate(results):
        # The numbers are of the call, so they need a single score.
        if isinstance(result, Score) and not failure(result):
            results[index] = Score(result.value, {**result.numbers, **logged.means()})
            break
    return results


def raised(error: BaseException, row: Mapping[str, Any] | None = None) -> RewardResult:
    """Describe an exception of a function, and the row's columns if it missed one."""
    message = f"raised {type(error).__name__}: {one_line(error)}"
    columns = [*map(repr, row or ())]
    if isinstance(error, KeyError) and columns and one_line(error) not in columns:
        message += f" (the row has {', '.join(columns)[:MESSAGE]})"
    return message


def one_line(error: BaseException, longest: int = MESSAGE) -> str:
    """Return the text of an error, which may be long, multi-line, or raise itself."""
    try:
        text = str(error)
    except BaseException as another:  # the user's class may raise anything
        text = f"(its text raised {type(another).__name__})"
    return _printable(" ".join(text.split())[:longest])


def metric_name(name: object) -> str:
    """Return the name under which a further number is logged: its own, or an unused one.

    A name that would hide a metric of the run gets the prefix "own/", as does one that begins so.
    """
    text = _printable(str(name))
    hides = text in TAKEN or text.endswith("/failed") or text.startswith(OWN)
    return OWN + text if hides else text


def _result(value: Any) -> RewardResult:
    """Return a value, or one with numbers by name, as a score; never raise."""
    try:
        numbers: dict[Any, Any] = {}
        if isinstance(value, Mapping) and "score" in value:
            # verl keeps texts next to the score, too, for its tables.
            numbers = {key: one for key, one in value.items() if not isinstance(one, str)}
            value = numbers.pop("score", value["score"])
        elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            numbers = dict(value[1])
            value = value[0]
        number = _number(value)
        if isinstance(number, str):
            return number
        return Score(number, {metric_name(name): _number_or_nan(numbers[name]) for name in numbers})
    except BaseException as error:  # an object may raise anything on any access
        return raised(error)


def _number(value: Any) -> float | str:
    """Return a value as a float, or the reason why it is not one."""
    plain = value.tolist() if hasattr(value, "tolist") else value  # a scalar of some library
    if not isinstance(plain, numbers.Real | np.bool_):
        return f"gave a value of type {type(value).__name__} instead of one float"
    try:
        return float(plain)
    except OverflowError:
        return f"gave a number of type {type(value).__name__}, which is no finite float32"


def _number_or_nan(value: Any) -> float:
    """Return a value as a finite float32, or NaN: a further number fails alone."""
    try:
        number = _number(value)
    except BaseException:
        return math.nan
    return number if isinstance(number, float) and abs(number) <= LARGEST else math.nan


def _printable(text: str) -> str:
    """Return a text without lone surrogates, which files and screens refuse."""
    return text.encode("utf-8", "backslashreplace").decode()
