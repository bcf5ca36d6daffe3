"""Make the key-value cache, which holds committed slots only.

Uncommitted tokens live in a window (see `attention.cached`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from rlhf_jax.types import Cache, ModelConfig


def empty(config: ModelConfig, rows: int, slots: int, dtype: DTypeLike) -> Cache:
    """Return a cache of zeros: per layer k [B, G, D, T] and v [B, G, T, D]."""
    groups = config.num_kv_heads
    dim = config.head_dim
    return tuple(
        (jnp.zeros((rows, groups, dim, slots), dtype), jnp.zeros((rows, groups, slots, dim), dtype))
        for _ in range(config.num_layers)
    )
