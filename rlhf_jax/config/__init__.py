"""Describe a run: its keys and defaults, the command line, and what follows from them."""

from __future__ import annotations

from rlhf_jax.config.algorithms import named
from rlhf_jax.config.schema import DEFAULTS, EARLIER, Config, flat

__all__ = ["Config", "default", "flat"]


def default(algorithm: str = "grpo") -> Config:
    """Return every key of a run with its default, locked.

    A config file changes values and adds no keys. algorithm: a value of `config.algorithm.name`,
    whose options are keys, too; ValueError if there is none of this name.
    """
    config = Config(DEFAULTS)
    config.algorithm = Config({"name": algorithm, **named(algorithm).defaults()})
    for name, value in EARLIER.items():
        section, _, key = name.rpartition(".")
        if section and section not in config:
            config[section] = Config()
        (config[section] if section else config)[key] = value
    config.lock()
    return config
