"""Call a function that scores responses: its form, its arguments and its results.

    f(prompt, response, row) -> float            a response at a time
    f(prompt, responses, row) -> list of floats  all samples of a prompt
    f(completions, **columns) -> list of floats  all responses at once, as TRL calls its rewards

The names of the parameters decide, in any order; a function may leave out unused ones. verl's names
are alternatives to those of the first form (`solution_str, ground_truth, data_source, extra_info`)
and, in the plural, of the last. Each function may be `async`.

A score is a number: Python's, or a scalar of numpy, jax or torch. Further numbers are logged:
`(score, {"name": number})`, or a dict with a "score", as in verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.rewards.combination import LARGEST, Response, Reward, RewardResult, Score, failure

# Columns that TRL passes under other names, or not at all.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# Parameters of TRL's rewards that only its own trainer can fill.
OF_TRAINER = ("trainer_state", "environments")
OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# verl keeps the correct answer in a column that holds a dict.
ANSWERS = "reward_model"
MESSAGE = 200  # characters kept of an error in a call
TEXTS = str | bytes | bytearray | memoryview
# Names of a term's own metrics, and the prefix for a number with such a name.
TAKEN = ("mean", "failed", "")
OWN = "own/"


class Form(enum.StrEnum):
    """Define how many responses a call has."""

    ONE = "one"
    GROUP = "group"
    BATCH = "batch"


# The parameters of each form by name; the last also has columns.
NAMES = {
    Form.ONE: ("prompt", "response", "row", *OF_VERL),
    Form.GROUP: ("prompt", "responses", "row"),
    Form.BATCH: (
        *("prompts", "completions", "completion_ids", "log_metric", "log_extra"),
        *(f"{name}s" for name in OF_VERL),
    ),
}
CHOICE = (
    "prompt, response, row (a response at a time), prompt, responses, row (a prompt's),"
    " completions, prompts, completion_ids, log_metric, log_extra and columns of the prompts (all,"
    " as TRL has it), or verl's solution_str, ground_truth, data_source, extra_info"
)


class Signature(NamedTuple):
    """Describe the signature of a function."""

    form: Form
    is_async: bool
    columns: tuple[str, ...] = ()  # of the prompts, required by it


class Parameters(NamedTuple):
    """Hold the named parameters of a function, and whether it takes others."""

    named: dict[str, inspect.Parameter]
    any_position: bool
    any_name: bool

    @property
    def required(self) -> list[str]:
        """Return the names of parameters without a default."""
        return [name for name, one in self.named.items() if one.default is one.empty]


def signature_of(function: Reward) -> Signature:
    """Read a function's signature; without any names it takes a response at a time.

    Raises ValueError if it has a parameter without a default that no call could fill.
    """
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    parameters = _parameters_of(function)
    form = _form_of(parameters)
    unknown = [name for name in parameters.required if name not in NAMES[form]]
    columns = []
    if form is Form.BATCH:
        columns = [name for name in unknown if name not in (*NOT_COLUMNS, *OF_TRAINER)]
        unknown = [name for name in unknown if name not in columns]
    if unknown:
        called = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"Reward {called!r} has a parameter {unknown[0]!r}, which no call of it fills: a"
            f" function of reward.functions may name {CHOICE}; rename it, or give it a default."
        )
    plural = "s" if form is Form.BATCH else ""
    for name in ("data_source", "ground_truth"):
        columns += [name] if f"{name}{plural}" in parameters.required else []
    return Signature(form, is_async, tuple(columns))


def _parameters_of(function: Reward) -> Parameters:
    """Read the parameters of a function; a builtin has none of these names."""
    if inspect.isbuiltin(function):
        return Parameters({}, any_position=True, any_name=False)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return Parameters({}, any_position=True, any_name=False)
    kinds = {one.kind for one in parameters.values()}
    positions = inspect.Parameter.VAR_POSITIONAL
    names = inspect.Parameter.VAR_KEYWORD
    named = {name: one for name, one in parameters.items() if one.kind not in (positions, names)}
    return Parameters(named, positions in kinds, names in kinds)


def _form_of(parameters: Parameters) -> Form:
    """Choose the form that matches a function's names.

    A function with only column names that takes all names is TRL's.
    """
    names = set(parameters.named)
    if names & set(NAMES[Form.BATCH]):
        return Form.BATCH
    if "responses" in names:
        return Form.GROUP
    alone = parameters.any_name and not parameters.any_position
    return Form.BATCH if alone and not names & set(NAMES[Form.ONE]) else Form.ONE


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


class Arguments(NamedTuple):
    """Hold the arguments of a function."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    logged: Logged  # numbers that the call logs itself


def arguments(function: Reward, form: Form, responses: Sequence[Response]) -> Arguments:
    """Return the arguments of a function of this form, for the responses of one call."""
    parameters = _parameters_of(function)
    logged = Logged()
    verl = _verl(form, responses)
    if form is Form.BATCH:
        ours = _of_batch(responses, logged, parameters.required)
    else:
        first = responses[0]
        texts = [response.response for response in responses]
        scored = {"response": texts[0]} if form is Form.ONE else {"responses": texts}
        ours = {"prompt": first.prompt, **scored, "row": first.row}
    if not parameters.named and parameters.any_position:
        return Arguments(tuple(ours.values()), {}, logged)

    values = verl | ours
    alone = [name for name, one in parameters.named.items() if one.kind is one.POSITIONAL_ONLY]
    positional = [values.get(name, parameters.named[name].default) for name in alone]
    named = {name: values[name] for name in parameters.named if name in values}
    if parameters.any_name:
        named |= verl if set(verl) & set(parameters.named) else ours
    named = {name: value for name, value in named.items() if name not in alone}
    return Arguments(tuple(positional), named, logged)


def _of_batch(
    responses: Sequence[Response], logged: Logged, required: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of a call of all responses, by TRL's names; each column is a list.

    A row without a column has None there, also if no row of the call has it.
    """
    rows = [response.row for response in responses]
    names = dict.fromkeys([*(name for row in rows for name in row), *required])
    columns = {
        name: [_cell(row, name) for row in rows]
        for name in names
        if name not in (*NOT_COLUMNS, *NAMES[Form.BATCH])
    }
    texts: list[Any] = [response.response for response in responses]
    if isinstance(rows[0].get("prompt"), list):  # the response to a chat is a message
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [row.get("prompt", one.prompt) for row, one in zip(rows, responses, strict=True)]
    return columns | {
        "prompts": prompts,
        "completions": texts,
        "completion_ids": [response.tokens for response in responses],
        "log_metric": logged.add,
        "log_extra": lambda column, values: None,  # a table of texts, which is not shown
    }


def _verl(form: Form, responses: Sequence[Response]) -> dict[str, Any]:
    """Return the arguments of verl's `compute_score` for a call; all responses' in the plural.

    Source: NaiveRewardManager and BatchRewardManager in verl/workers/reward_manager.
    """
    of_rollout = {"num_turns": None, "rollout_reward_scores": {}}
    arguments_of = [
        {
            "data_source": _cell(response.row, "data_source"),
            "solution_str": response.response,
            "ground_truth": _cell(response.row, "ground_truth"),
            "extra_info": {**(response.row.get("extra_info") or {}), **of_rollout},
        }
        for response in responses
    ]
    if form is not Form.BATCH:
        return arguments_of[0]
    return {f"{name}s": [one[name] for one in arguments_of] for name in OF_VERL}


def _cell(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's value in a column; the correct answer may be where verl keeps it."""
    if name == "ground_truth" and name not in row:
        return (row.get(ANSWERS) or {}).get(name)
    return row.get(name)


def call(reward: Reward, form: Form, responses: Sequence[Response]) -> list[RewardResult]:
    """Return the result of each response in a call of a plain function, whatever it raises."""
    try:
        with forks_end():
            given = arguments(reward, form, responses)
            value = reward(*given.positional, **given.named)
            return results_of(form, value, len(responses), given.logged)
    except BaseException as error:
        return [raised(error, responses[0].row)] * len(responses)


async def call_async(
    reward: Reward, form: Form, responses: Sequence[Response], seconds: float
) -> list[RewardResult] | None:
    """Return the result of each response in a call of an async function; None on timeout.

    Whatever the function raises is caught within its task: there CancelledError is its own doing,
    while SystemExit and KeyboardInterrupt would end the loop.
    """

    async def answer() -> list[RewardResult]:
        try:
            with forks_end():
                given = arguments(reward, form, responses)
                value = await reward(*given.positional, **given.named)
                return results_of(form, value, len(responses), given.logged)
        except BaseException as error:
            return [raised(error, responses[0].row)] * len(responses)

    task = asyncio.ensure_future(answer())
    done, _ = await asyncio.wait([task], timeout=seconds if math.isfinite(seconds) else None)
    if not done:
        task.cancel()  # not awaited: it may refuse to end
        return None
    if task.cancelled():  # it was cancelled, but returned all the same
        return [raised(asyncio.CancelledError())] * len(responses)
    return task.result()


@contextlib.contextmanager
def forks_end() -> Iterator[None]:
    """End a process that was forked within the context when it leaves that.

    It would otherwise answer as its parent does, and take the next calls.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


def results_of(form: Form, value: Any, count: int, logged: Logged) -> list[RewardResult]:
    """Return one result for each of the `count` responses of a call, from the return value.

    A function that scores a response at a time returns no list.
    """
    if form is Form.ONE:
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
