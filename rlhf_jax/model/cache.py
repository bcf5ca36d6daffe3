"""The key-value cache: committed slots only. Uncommitted tokens live in a window (see attention.cached)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array, Cache, LayerCache, ModelConfig


def empty(config: ModelConfig, rows: int, slots: int, dtype) -> Cache:
    """A cache of zeros: per layer k [B, G, D, T] and v [B, G, T, D]."""
    groups, dim = config.num_kv_heads, config.head_dim
    return tuple(
        (jnp.zeros((rows, groups, dim, slots), dtype), jnp.zeros((rows, groups, slots, dim), dtype))
        for _ in range(config.num_layers)
    )


def commit(cache: Cache, window: Cache, path: Array, start: Array) -> Cache:
    """Write window entries path[B, J] of every layer to slots start[B] onwards, in place when donated.

    All J entries are written, whether accepted or not: those beyond the row's new length are written again by the
    next round. So every row needs J free slots behind its start.
    """
    return tuple(_commit_layer(old, new, path, start) for old, new in zip(cache, window, strict=True))


def _commit_layer(cache: LayerCache, window: LayerCache, path: Array, start: Array) -> LayerCache:
    key = jnp.take_along_axis(window[0], path[:, None, None, :], axis=3)
    value = jnp.take_along_axis(window[1], path[:, None, :, None], axis=2)
    write_key = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2))
    write_value = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1))
    return write_key(cache[0], key, start), write_value(cache[1], value, start)
