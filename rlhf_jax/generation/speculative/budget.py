"""Allocate a budget of drafts to the likeliest ones, and verify only those, packed.

Rows draft as far as useful; K nodes per row are verified on average. All but attention runs on K
tokens per row, of whichever rows; attention runs on the whole grid of rows and nodes. A shared
budget of drafts for all rows is from AdaServe (Li et al. 2025). Rows on one device share a budget,
so that no data cross devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.mesh import Layout, pin_rows
from rlhf_jax.types import Array


class BudgetShare(NamedTuple):
    """Hold each row's share of a round's budget."""

    drafts: Array  # [B] int32
    short: Array  # [B] bool: it had more drafts than the budget kept


@functools.partial(jax.jit, static_argnames=("nodes", "layout"))
def allocate_budget(
    state: DecodeState,
    drafts: Array,
    confidence: Array,
    expected_gain: Array,
    nodes: int,
    layout: Layout,
) -> tuple[jax.Array, BudgetShare]:
    """Keep the likeliest drafts [B, N], `nodes` per row on average; others become -1.

    The root of a row is one of its nodes. drafts are chains. expected_gain [CLASSES, N or more]
    float32 is the chance that a draft is accepted, by its row's class confidence[B] and its depth,
    falling with depth: the drafts of the highest chance stay.
    """
    chex.assert_rank([drafts, expected_gain], 2)
    rows, length = drafts.shape
    # The last token of a row needs no draft, for the target draws it anyway.
    ends = state.length[:, None] + jnp.arange(length) + 1 >= state.limit[:, None]
    usable = (drafts >= 0) & ~ends & ~state.done[:, None]
    gain = jnp.where(usable, expected_gain[confidence, :length], 0.0)

    # Rows on one device share a budget.
    devices = layout.row_shards
    live = (~state.done).reshape(devices, -1).sum(axis=1, dtype=jnp.int32)
    budget = nodes * (rows // devices) - live
    order = jnp.argsort(-gain.reshape(devices, -1), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1).astype(jnp.int32)
    kept = usable & (rank < budget[:, None]).reshape(rows, length)
    share = BudgetShare(kept.sum(axis=1, dtype=jnp.int32), jnp.any((drafts >= 0) & ~kept, axis=1))
    return pin_rows((jnp.where(kept, drafts, -1), share), layout)


class Packing(NamedTuple):
    """Hold the places of verified nodes: `source` by packed token, `place` by grid node."""

    source: Array  # [D, B/D * K] int32 place in the grid, for D devices of rows
    # [D, B/D * (N+1)] int32 place among the packed; for an unverified node that of an earlier one.
    place: Array
    rows: int

    def pack(self, grid: Array) -> jax.Array:
        """Take the verified nodes of [B, N+1, ...], as [B, K, ...]."""
        return self._take(grid, self.source)

    def unpack(self, packed: Array) -> jax.Array:
        """Spread [B, K, ...] over the grid, [B, N+1, ...].

        Unverified nodes have the values of an earlier one of their own row, as the root of a row is
        verified unless the row is done, which reads nothing.
        """
        return self._take(packed, self.place)

    def attention(self, attend: Callable) -> Callable:
        """Return the attention of packed nodes, by `attend` of the grid's."""

        def attend_packed(query: Array, key: Array, value: Array, memory: tuple):
            out, kept = attend(*map(self.unpack, (query, key, value)), memory)
            return self.pack(out), kept

        return attend_packed

    def _take(self, values: Array, index: Array) -> jax.Array:
        """Take values [B, X, ...] at index [D, B/D * Y] within each device, as [B, Y, ...]."""
        flat = values.reshape(len(index), -1, *values.shape[2:])
        index = index.reshape(*index.shape, *[1] * (flat.ndim - 2))
        taken = jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds")
        return taken.reshape(self.rows, -1, *values.shape[2:])


def pack(verified: Array, nodes: int, layout: Layout) -> Packing:
    """Return the packing of the nodes `verified` [B, N+1] bool.

    There must be at most `nodes` a row on average, on each device.
    """
    devices = layout.row_shards
    flat = verified.reshape(devices, -1)
    size = nodes * (len(verified) // devices)
    source = jax.vmap(lambda own: jnp.nonzero(own, size=size, fill_value=0)[0])(flat)
    place = jnp.maximum(jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1, 0)
    return Packing(source.astype(jnp.int32), place, len(verified))
