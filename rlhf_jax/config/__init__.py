"""A run's config: its keys and defaults, the command line, what makes it valid, the memory it takes."""

from rlhf_jax.config.schema import Config, default, flat

__all__ = ["Config", "default", "flat"]
