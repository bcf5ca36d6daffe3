"""Read the call signature of a reward function from the names of its parameters.

    f(prompt, response, row) -> float            a response at a time
    f(prompt, responses, row) -> list of floats  all samples of a prompt
    f(completions, **columns) -> list of floats  all responses at once, as TRL calls its rewards

The names decide, in any order; a function may leave out unused ones. verl's names are alternatives
to those of the first form (`solution_str, ground_truth, data_source, extra_info`) and, in the
plural, of the last. Each function may be `async`; `results` defines the return values.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.results import Logged

# Columns that TRL passes under other names, or not at all.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# Parameters of TRL's rewards that only its own trainer can fill.
OF_TRAINER = ("trainer_state", "environments")
OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# verl keeps the correct answer in a column that holds a dict.
ANSWERS = "reward_model"


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


def signature_of(function: Callable[..., Any]) -> Signature:
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


def _parameters_of(function: Callable[..., Any]) -> Parameters:
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


def calls_of(form: Form, responses: Sequence[Response]) -> list[list[int]]:
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


class Arguments(NamedTuple):
    """Hold the arguments of a function."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    logged: Logged  # numbers that the call logs itself


def arguments(function: Callable[..., Any], form: Form, responses: Sequence[Response]) -> Arguments:
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
