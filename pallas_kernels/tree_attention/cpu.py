"""Attend on CPUs, reading only blocks of a long cache that hold tokens; defined in reference.py.

A loop over the blocks below each row's length, with an online softmax (Milakov and Gimelshein
2018). XLA runs the loop on one core, and a product over the whole cache on all of them, so it pays
if few blocks hold tokens; both ways are in the program, which counts these.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arrays import LOWEST, check_ranks
from pallas_kernels.tree_attention import reference

TURN_SLOTS = 128  # of a block: one iteration of the loop reads it
# Shorter caches are read whole: an iteration costs more than it saves.
LEAST_SLOTS = 768
# The loop runs if at most one block in this many holds tokens: above two fifths, at one query per
# row, and above one half, at five, it is slower (two cores, benchmarks/live_cache.py).
ONE_LIVE_IN = 3


def tree_attention(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
) -> Array:
    """Compute `reference.tree_attention`, to within rounding.

    The values beyond a row's length must be finite, as there.
    """
    check_ranks([query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3])
    whole = reference.tree_attention
    slots = cache_k.shape[3]
    if slots < LEAST_SLOTS:
        return whole(query, cache_k, cache_v, window_k, window_v, length, mask)
    live = (-(-length // TURN_SLOTS)).sum(dtype=jnp.int32)
    few = live * ONE_LIVE_IN <= len(query) * (slots // TURN_SLOTS)
    return lax.cond(
        few, over_live_blocks, whole, query, cache_k, cache_v, window_k, window_v, length, mask
    )


class _Sums(NamedTuple):
    """Hold an online softmax: weighted values [..., N, D], weights and best scores [..., N, 1]."""

    values: Array
    weight: Array
    top: Array


def over_live_blocks(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
) -> Array:
    """Compute `tree_attention` by the loop."""
    rows, groups, dim, slots = cache_k.shape
    grouped = reference.by_group(query, groups)
    seen = jnp.tile(mask[:, None], (1, 1, query.shape[2] // groups, 1))
    nothing = _Sums(
        jnp.zeros(grouped.shape, jnp.float32),
        jnp.zeros((*grouped.shape[:3], 1), jnp.float32),
        jnp.full((*grouped.shape[:3], 1), LOWEST, jnp.float32),
    )
    sums = _add(nothing, grouped, window_k, value=window_v, seen=seen)

    # Iteration t takes block `block[t]` of row `row[t]`.
    blocks = -(-length // TURN_SLOTS)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    turns = jnp.arange(rows * -(-slots // TURN_SLOTS), dtype=jnp.int32)
    row = jnp.searchsorted(ends, turns, side="right").astype(jnp.int32)
    block = turns - (ends - blocks)[row]
    zero = jnp.int32(0)

    def take_in(turn: Array, sums: _Sums) -> _Sums:
        """Add one block of one row to its sums."""
        at = row[turn]
        first = block[turn] * TURN_SLOTS
        # The last block of a cache that is not a multiple of blocks begins earlier.
        start = jnp.minimum(first, slots - TURN_SLOTS)
        slot = start + jnp.arange(TURN_SLOTS, dtype=jnp.int32)
        key = lax.dynamic_slice(cache_k, (at, zero, zero, start), (1, groups, dim, TURN_SLOTS))
        value = lax.dynamic_slice(cache_v, (at, zero, start, zero), (1, groups, TURN_SLOTS, dim))
        mine = _Sums(*(lax.dynamic_index_in_dim(part, at) for part in sums))
        queries = lax.dynamic_index_in_dim(grouped, at)
        seen = (slot >= first) & (slot < length[at])
        mine = _add(mine, queries, key, value=value, seen=seen)
        return _Sums(
            *(
                lax.dynamic_update_index_in_dim(all_rows, new, at, 0)
                for all_rows, new in zip(sums, mine, strict=True)
            )
        )

    sums = lax.fori_loop(0, ends[-1], take_in, sums)
    # The best score weighs 1, so a sum below 1 is that of a query that sees nothing.
    out = sums.values / jnp.maximum(sums.weight, 1.0)
    return reference.by_token(out.astype(cache_v.dtype), query.shape).astype(query.dtype)


def _add(sums: _Sums, query: Array, key: Array, *, value: Array, seen: Array) -> _Sums:
    """Add keys [B, G, D, S] and their values [B, G, S, D] to the sums of queries."""
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, product(query, key) * query.shape[3] ** -0.5, -jnp.inf)
    top = jnp.maximum(sums.top, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    fade = jnp.exp(sums.top - top)
    return _Sums(
        sums.values * fade + product(weights.astype(value.dtype), value),
        sums.weight * fade + weights.sum(axis=-1, keepdims=True),
        top,
    )
