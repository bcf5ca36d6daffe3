"""Committing accepted tokens to the cache, in plain JAX: what the kernels must equal, bit for
bit.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.types import Array, Cache, LayerCache


def commit(cache: Cache, window: Cache, path: Array, start: Array) -> Cache:
    """Write window entries path[B, J] of every layer to slots start[B] onwards, in place when
    donated.

    Per layer the cache is k [B, G, D, T] and v [B, G, T, D], the window k [B, G, D, W] and v [B, G,
    W, D]; path (each in [0, W)) and start are int32. All J entries are written, whether accepted or
    not: those beyond the row's new length are written again by the next round. So every row needs J
    free slots behind its start.
    """
    chex.assert_rank([path, start], [2, 1])
    return tuple(
        _commit_layer(old, new, path, start) for old, new in zip(cache, window, strict=True)
    )


def _commit_layer(cache: LayerCache, window: LayerCache, path: Array, start: Array) -> LayerCache:
    key = jnp.take_along_axis(window[0], path[:, None, None, :], axis=3)
    value = jnp.take_along_axis(window[1], path[:, None, :, None], axis=2)
    write_key = jax.vmap(
        lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2)
    )
    write_value = jax.vmap(
        lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
    )
    return write_key(cache[0], key, start), write_value(cache[1], value, start)
