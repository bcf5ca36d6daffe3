"""Check values of a config; each failure raises one clear sentence."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from rlhf_jax.config.schema import DICTS, Config, flat
from rlhf_jax.runtime.foreign import has_surrogate

# Keys whose values are lists of names: files, folders or registered objects.
NAMING_KEYS = (
    "sinks",
    "data.mixture",
    "reward.functions",
    "reward.models",
    "reward.preference_models",
    "generation.drafters",
    "model.families",
)


def require(holds: bool, sentence: str) -> None:
    """Raise ValueError with the sentence unless `holds` is true."""
    if not holds:
        raise ValueError(sentence)


def require_one_of(config: Config, name: str, known: Sequence[str]) -> None:
    """Raise ValueError unless the value of the dotted key `name` is one of the known ones."""
    value = operator.attrgetter(name)(config)
    require(value in known, f"{name} is {value!r}; it must be one of {', '.join(known)}.")


def require_positive(config: Config, *names: str) -> None:
    """Raise ValueError unless the values of these dotted keys are above 0."""
    for name in names:
        value = operator.attrgetter(name)(config)
        require(value > 0, f"{name} is {value}; it must be above 0.")


def require_not_negative(config: Config, *names: str) -> None:
    """Raise ValueError unless the values of these dotted keys are 0 or above."""
    for name in names:
        value = operator.attrgetter(name)(config)
        require(value >= 0, f"{name} is {value}; it must be 0 or above.")


def require_share(config: Config, name: str) -> None:
    """Raise ValueError unless the value of the dotted key `name` lies in 0 .. 1."""
    value = operator.attrgetter(name)(config)
    require(0 <= value <= 1, f"{name} is {value}; it must lie in 0 .. 1.")


def require_even_split(whole: int, parts: int, what: str, by: str) -> None:
    """Raise ValueError unless `whole` rows, named `what`, split into `parts`, named `by`."""
    below = whole - whole % parts
    nearest = [str(size) for size in (below, below + parts) if size > 0]
    require(
        whole > 0 and whole % parts == 0,
        f"The {whole} {what} cannot be split evenly by {by} = {parts}; change one of them, as the"
        f" first to {' or '.join(nearest)}.",
    )


def require_texts(config: Config) -> None:
    """Raise ValueError if a name in a config is not a text, before anything looks it up.

    Texts with a lone surrogate are refused, too.
    """
    values = flat(config)
    for key in NAMING_KEYS:
        for name in values[key]:
            _require_text(name, f"{key} has")
    for key in DICTS:
        for name in values[key]:
            _require_text(name, f"{key} has a name")
    for name, spec in values["reward.metrics"].items():
        _require_text(spec, f"reward.metrics has for {name!r}")
    for key, value in values.items():
        require(
            not has_surrogate(value), f"{key} has half a character (a lone surrogate); take it out."
        )


def _require_text(value: object, where: str) -> None:
    """Raise ValueError unless a value is a text."""
    kind = type(value).__name__
    require(isinstance(value, str), f"{where} {value!r} of type {kind}; give a text.")
