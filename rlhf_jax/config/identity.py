"""What of a config makes a run what it is, and must not change under its checkpoints."""

from __future__ import annotations

from typing import Any

from rlhf_jax.config.schema import Config, flat

# What may change between a checkpoint and the run that goes on from it: keys, or how they begin.
FREE_KEYS = (
    "workdir",
    "steps",
    "dry_run",
    "watchdog_seconds",
    "compilation_cache",
    "checkpoint.",
    "mesh.",
    "kernels.",
    "reward.workers",
    "reward.seconds",
    "generation.max_rows",
    "generation.min_rows",
    "generation.reallocate",
    "generation.fuse_inference",
    "training.microbatch_rows",
    "training.remat",
)


def binding_settings(config: Config) -> dict[str, Any]:
    """Return the values that make a run what it is, by dotted key."""
    return {key: value for key, value in flat(config).items() if not key.startswith(FREE_KEYS)}
