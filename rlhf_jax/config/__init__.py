"""Describe a run: its keys and defaults, the command line, what is valid, the memory it takes."""

from rlhf_jax.config.defaults import default
from rlhf_jax.config.schema import Config, flat

__all__ = ["Config", "default", "flat"]
