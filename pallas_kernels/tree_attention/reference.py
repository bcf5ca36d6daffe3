"""Attend from the nodes of a draft tree to a row's cache and to its own window, in plain JAX."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels.arrays import check_ranks


def tree_attention(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
) -> Array:
    """Attend from Q new tokens of each row to its cache and to uncommitted tokens.

    query [B, Q, H, D], the nodes of a tree; cache_k [B, G, D, T] and cache_v [B, G, T, D], of which
    the first `length` [B] int32 slots are valid; window_k [B, G, D, W] and window_v [B, G, W, D];
    mask [B, Q, W] bool: the tokens of the window that a query sees. Head h reads group h // (H /
    G), scores are scaled by D**-0.5, and their softmax is float32. Returns [B, Q, H, D] in the
    query's dtype; a query that sees nothing gives zeros. Here the values beyond a row's length must
    be finite (their weight is zero; replacing them would cost a fifth to a half more on a CPU).
    """
    check_ranks([query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3])
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    slots = cache_k.shape[3]
    grouped = by_group(query, groups)
    live = jnp.arange(slots, dtype=jnp.int32)[None, :] < length[:, None]
    seen = jnp.concatenate([jnp.broadcast_to(live[:, None], (batch, count, slots)), mask], axis=-1)
    seen = jnp.tile(seen[:, None], (1, 1, heads // groups, 1))

    score = functools.partial(jnp.matmul, grouped, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([score(cache_k), score(window_k)], axis=-1)
    scores = jnp.where(seen, scores * dim**-0.5, -jnp.inf)
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    # The best score weighs 1, so a sum below 1 is that of a query that sees nothing.
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1.0)
    weights = weights.astype(cache_v.dtype)

    out = weights[..., :slots] @ cache_v + weights[..., slots:] @ window_v
    return by_token(out, query.shape).astype(query.dtype)


def by_group(query: Array, groups: int) -> Array:
    """Place queries [B, Q, H, D] that read the same keys side by side: [B, G, H/G * Q, D]."""
    batch, count, heads, dim = query.shape
    grouped = query.reshape(batch, count, groups, heads // groups, dim).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(batch, groups, -1, dim)


def by_token(out: Array, shape: tuple[int, ...]) -> Array:
    """Undo `by_group`: return [B, Q, H, D]."""
    batch, count, heads, dim = shape
    groups = out.shape[1]
    out = out.reshape(batch, groups, heads // groups, count, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(shape)
