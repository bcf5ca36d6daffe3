"""Commit accepted tokens to the cache in plain JAX; the kernels must equal it, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arrays import Cache, check_ranks


def commit(cache: Cache, window: Cache, path: Array, start: Array) -> Cache:
    """Write window entries path[B, J] of every layer to slots start[B] onwards.

    Per layer the cache is k [B, G, D, T] and v [B, G, T, D], the window k [B, G, D, W] and v [B, G,
    W, D]; path (each in [0, W)) and start are int32. All J entries are written, whether accepted or
    not: those beyond the row's new length are overwritten by the next round. So every row needs J
    free slots after its start. A donated cache is changed in place.
    """
    check_ranks([path, start], [2, 1])
    # Over the rows: without their axis the slots of keys are axis 2, those of values axis 1.
    write_key = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=2))
    write_value = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=1))

    layers = []
    for (old_key, old_value), (new_key, new_value) in zip(cache, window, strict=True):
        key = jnp.take_along_axis(new_key, path[:, None, None, :], axis=3)
        value = jnp.take_along_axis(new_value, path[:, None, :, None], axis=2)
        layers.append((write_key(old_key, key, start), write_value(old_value, value, start)))
    return tuple(layers)
