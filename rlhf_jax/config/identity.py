"""Define which values of a config must not change between a checkpoint and its resumption."""

from __future__ import annotations

from typing import Any

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.runtime.extensions import file_digest, is_of_file

# Keys, or prefixes of keys, that may change when a run is resumed.
FREE_KEYS = (
    "workdir",
    "steps",
    "dry_run",
    "profile",
    "stop_at",
    "sinks",
    "watchdog_seconds",
    "heartbeat_seconds",
    "compilation_cache",
    "checkpoint.",
    "mesh.",
    "kernels.",
    "reward.workers",
    "reward.concurrency",
    "reward.seconds",
    "reward.max_failed",
    "generation.max_rows",
    "generation.min_rows",
    "generation.reallocate",
    "generation.fuse_inference",
    "training.microbatch_rows",
    "training.microbatch_tokens",
    "training.max_skipped",
    "training.pipelined",
    "training.remat",
)


def plan_name(config: Config) -> str | None:
    """Return an identifier of a config's plan: its name, or the file's digest."""
    if config.plan.endswith(".json"):
        return file_digest(config.plan)
    if config.training.pipelined and not config.plan:
        return "pipelined"
    return config.plan or None  # as in checkpoints from before there were plans


def binding_settings(config: Config) -> dict[str, Any]:
    """Return the values that identify a run, by dotted key, and its own code by digest."""
    binding = {key: value for key, value in flat(config).items() if not key.startswith(FREE_KEYS)}
    binding["plan"] = plan_name(config)
    binding["training.aggregate"] = derived.aggregate_name(config)
    return binding | {f"the code of {spec}": digest for spec, digest in own_code(config).items()}


def own_code(config: Config) -> dict[str, str]:
    """Return the digest of the file of each FILE.py:NAME in a config, by that name.

    Errors are those of reading the files.
    """
    digests = {}
    for value in flat(config).values():
        several = value.values() if isinstance(value, dict) else value
        specs = several if isinstance(value, (dict, list, tuple)) else [value]
        specs_of_code = [spec for spec in specs if isinstance(spec, str) and is_of_file(spec)]
        digests |= {spec: file_digest(spec.rpartition(":")[0]) for spec in specs_of_code}
    return digests
