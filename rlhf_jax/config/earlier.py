"""Read configs of earlier versions."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from typing import Any

from rlhf_jax.config import default
from rlhf_jax.config.algorithms import ALGORITHMS, named
from rlhf_jax.config.schema import EARLIER, Config, flat
from rlhf_jax.losses.advantages import ESTIMATORS


def settled(config: Config) -> Config:
    """Return a config with current keys and the options of its algorithm.

    The argument is not changed. Options that both algorithms have keep a changed value. A warning
    names keys of earlier versions that were translated, and options that have no effect.
    """
    current = copy.deepcopy(config)
    given = {}
    for name, usual in EARLIER.items():
        section, _, key = name.rpartition(".")
        held = config.get(section, {}) if section else config
        if (value := held.get(key, usual)) != usual:
            given[name] = value
    changes = translated(given)
    name = changes.pop("algorithm.name", config.algorithm.name)
    options = named(name).defaults()
    section = {key: value for key, value in config.algorithm.items() if key != "name"}
    if section.keys() != options.keys():
        usual = default().algorithm
        section = {key: value for key, value in section.items() if usual.get(key) != value}
    section |= {key.removeprefix("algorithm."): value for key, value in changes.items()}
    unused = section.keys() - options.keys()
    with current.unlocked():
        current.algorithm = Config({"name": name, **options})
        current.algorithm.update({key: section[key] for key in section if key in options})
        for key in EARLIER:
            _remove(current, key)
    current.lock()
    if given:
        read = {"algorithm.name": name} | changes
        now = ", ".join(f"{key} = {value!r}" for key, value in read.items())
        warnings.warn(
            f"{', '.join(given)}: keys of an earlier version, read as {now}.", stacklevel=2
        )
    if unused:
        keys = ", ".join(f"algorithm.{key}" for key in sorted(unused))
        warnings.warn(f"{keys}: no option of the algorithm {name!r}, left out.", stacklevel=2)
    return current


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate values of EARLIER's keys to current keys, with the algorithm's name.

    ValueError for an objective from a file, which is not an algorithm.
    """
    objective = values.get("objective", "reward")
    if objective == "distill":
        return {"algorithm.name": "distill"}
    if objective != "reward":
        raise ValueError(
            f"objective is {objective!r}, a key of an earlier version; what a run learns is an"
            " algorithm now: describe it as docs/how-to/algorithm.md says, and name it by"
            " algorithm.name."
        )
    renamed = {}
    for name, value in values.items():
        if name != "objective":
            renamed[f"algorithm.{name.rpartition('.')[2]}"] = value
    estimator = renamed.get("algorithm.estimator", "grpo")
    ESTIMATORS.require(estimator)
    if ESTIMATORS[estimator].needs_critic:
        renamed["algorithm.name"] = "ppo"
    if estimator in ("grpo", "gae") and "algorithm.estimator" in renamed:
        renamed["algorithm.estimator"] = ""  # the algorithm's own
    return renamed


def identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a checkpoint of an earlier version by today's keys.

    A key that was not there yet has its default, by which a run is as it was before.
    """
    kept = {name: value for name, value in saved.items() if name not in EARLIER}
    if "objective" in saved:
        found = translated({name: value for name, value in saved.items() if name in EARLIER})
        kept |= {"algorithm.name": "grpo"} | found
    if "algorithm.name" not in kept:
        return kept
    return defaults_of(kept["algorithm.name"]) | kept


def defaults_of(algorithm: str) -> dict[str, Any]:
    """Return every key's default as JSON has it, without the options of an algorithm of a file."""
    config = default(algorithm) if algorithm in ALGORITHMS else default()
    return json.loads(json.dumps(flat(config)))


def _remove(config: Config, name: str) -> None:
    """Remove a key of an earlier version from a config, and its section if empty."""
    section, _, key = name.rpartition(".")
    held = config.get(section, Config()) if section else config
    if key in held:
        del held[key]
    if section and section in config and not config[section]:
        del config[section]
