"""How a reward function wants to be called, read from the names of its parameters.

    f(prompt, response, row) -> float            a response at a time
    f(prompt, responses, row) -> list of floats  all samples of a prompt
    f(completions, **columns) -> list of floats  all responses at once, as TRL calls its rewards

Each may be `async`, and a float may be `(float, {"name": number})`, whose numbers are logged.
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from rlhf_jax.rewards.combination import Response, RewardResult, Score

# Columns that TRL gives under other names, or not at all.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# What metrics call the term's own figures.
TAKEN = ("mean", "failed")


class Form(enum.StrEnum):
    """Say how many responses a call has."""

    ONE = "one"
    GROUP = "group"
    BATCH = "batch"


class Signature(NamedTuple):
    """Describe how a function is called."""

    form: Form
    is_async: bool


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read how a function wants to be called; one that says nothing takes a response at a time."""
    called = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(called)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return Signature(Form.ONE, is_async)
    kinds = {one.kind for one in parameters.values()}
    if "completions" in parameters or kinds == {inspect.Parameter.VAR_KEYWORD}:
        return Signature(Form.BATCH, is_async)
    form = Form.GROUP if "responses" in parameters else Form.ONE
    return Signature(form, is_async)


def calls_of(form: Form, responses: Sequence[Response]) -> list[list[int]]:
    """Split responses into calls: for each the indices of those that it scores."""
    if form is Form.ONE:
        return [[index] for index in range(len(responses))]
    if form is Form.BATCH:
        return [list(range(len(responses)))] if responses else []
    groups: dict[int, list[int]] = {}
    for index, response in enumerate(responses):
        groups.setdefault(response.group, []).append(index)
    return list(groups.values())


class EarlyCalls:
    """Put responses that finish one by one into calls of a form, as soon as one is whole."""

    def __init__(self):
        self._unfinished: dict[tuple[int, ...], dict[int, Response]] = {}  # by siblings

    def add(
        self, form: Form, key: int, response: Response, siblings: tuple[int, ...]
    ) -> list[tuple[int, Response]]:
        """Return the keys and responses of the call that this response makes whole, or nothing.

        siblings: the keys of all samples of its prompt, in the order in which they were asked for.
        A call of all responses is never whole here, as nobody says which is the last.
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
        """Forget calls that are not whole."""
        self._unfinished.clear()


class Arguments(NamedTuple):
    """Hold what a function is called with."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    logged: dict[str, float]  # numbers that the call logs by itself


def arguments(function: Callable[..., Any], form: Form, responses: Sequence[Response]) -> Arguments:
    """Return what a function of this form is called with, for the responses of one call."""
    first = responses[0]
    if form is Form.ONE:
        return Arguments((first.prompt, first.response, first.row), {}, {})
    texts: list[Any] = [response.response for response in responses]
    if form is Form.GROUP:
        return Arguments((first.prompt, texts, first.row), {}, {})

    rows = [response.row for response in responses]
    logged: dict[str, float] = {}
    columns = {
        name: [row.get(name) for row in rows] for name in first.row if name not in NOT_COLUMNS
    }
    if isinstance(first.row.get("prompt"), list):  # a chat is answered by a message
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [row.get("prompt", one.prompt) for row, one in zip(rows, responses, strict=True)]
    named = columns | {
        "prompts": prompts,
        "completions": texts,
        "completion_ids": [response.tokens for response in responses],
        "log_metric": lambda name, value: logged.update({name: float(value)}),
        "log_extra": lambda name, values: None,
    }
    parameters = inspect.signature(function).parameters
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        named = {name: value for name, value in named.items() if name in parameters}
    return Arguments((), named, logged)


def results_of(
    form: Form, value: Any, count: int, logged: Mapping[str, float]
) -> list[RewardResult]:
    """Return one result for each response of a call, from what the function gave."""
    if form is Form.ONE:
        return [_result(value)]
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        size = f" of {len(value)}" if isinstance(value, Sequence) else ""
        reason = f"gave a {type(value).__name__}{size} instead of a list of {count} floats"
        return [reason] * count
    # In TRL a reward that does not apply to a response is None, and adds nothing.
    results = [_result(0.0 if one is None else one) for one in value]
    if logged and isinstance(results[0], Score):
        results[0] = Score(results[0].value, {**results[0].numbers, **logged})
    return results


def _result(value: Any) -> RewardResult:
    """Return a value, or a pair of it and numbers by name, as a score."""
    own: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, own = value
    for number in (value, *own.values()):
        if not isinstance(number, numbers.Real | np.bool_):
            return f"gave a value of type {type(number).__name__} instead of one float"
    for name in own:
        if not isinstance(name, str) or name in TAKEN:
            return f"gave a number named {name!r}, which is taken or no text; rename it"
    return Score(float(cast(float, value)), {name: float(own[name]) for name in own})
