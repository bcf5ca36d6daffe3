"""Packed rounds: rows draft as far as their drafts promise, and only those nodes are verified, K a
row on average.

All but attention runs on K tokens a row, whichever row they are of; attention runs on the whole
grid of rows and nodes. A budget of drafts for all rows is AdaServe's (Li et al. 2025). Rows on one
device share one, so that nothing crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.mesh import pin_rows, row_shards
from rlhf_jax.types import Array, DecodeState


class BudgetShare(NamedTuple):
    """What each row had of the budget."""

    drafts: Array  # [B] int32
    short: Array  # [B] bool: there were more


@functools.partial(jax.jit, static_argnames=("nodes", "mesh"))
def allocate_budget(
    state: DecodeState,
    drafts: Array,
    confidence: Array,
    worth: Array,
    nodes: int,
    mesh: Mesh | None,
) -> tuple[Array, BudgetShare]:
    """The drafts [B, N] of which so many are left that a row has `nodes` on average, its root
    included; others are -1.

    drafts are chains. worth [CLASSES, N or more] float32 is the chance that a draft is accepted, by
    its row's class and its depth, falling with depth: the worthiest stay.
    """
    chex.assert_rank([drafts, worth], 2)
    rows, length = drafts.shape
    # of no draw of their own any use
    ends = state.length[:, None] + jnp.arange(length) + 1 >= state.limit[:, None]
    usable = (drafts >= 0) & ~ends & ~state.done[:, None]
    worth = jnp.where(usable, worth[confidence, :length], 0.0)
    budget = nodes * (rows // row_shards(mesh)) - _by_device(~state.done, mesh).sum(
        axis=1, dtype=jnp.int32
    )
    order = jnp.argsort(-_by_device(worth, mesh), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1).astype(jnp.int32)
    kept = usable & (rank < budget[:, None]).reshape(rows, length)
    spent = BudgetShare(kept.sum(axis=1, dtype=jnp.int32), ((drafts >= 0) & ~kept).any(axis=1))
    return pin_rows((jnp.where(kept, drafts, -1), spent), mesh)


class Packing(NamedTuple):
    """Where nodes stand: `source` in the grid, for each packed token; `place` among these, for each
    node.
    """

    source: Array  # [D, B/D * K] int32, for D devices that rows lie on
    place: Array  # [D, B/D * (N+1)] int32; that of the node before it where a node is not verified
    rows: int

    def pack(self, grid: Array) -> Array:
        """[B, N+1, ...] -> [B, K, ...]."""
        return self._take(grid, self.source)

    def unpack(self, packed: Array) -> Array:
        """[B, K, ...] -> [B, N+1, ...]; nodes that are not verified have an earlier one's values,
        of their own row.

        For the root of a row is verified, but where a row is done and reads nothing.
        """
        return self._take(packed, self.place)

    def attention(self, attend: Callable) -> Callable:
        """`attend` of the grid's nodes, for packed ones."""

        def packed(query: Array, key: Array, value: Array, memory):
            out, kept = attend(*map(self.unpack, (query, key, value)), memory)
            return self.pack(out), kept

        return packed

    def _take(self, values: Array, index: Array) -> Array:
        flat = values.reshape(len(index), -1, *values.shape[2:])
        index = index.reshape(*index.shape, *[1] * (flat.ndim - 2))
        return jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds").reshape(
            self.rows, -1, *values.shape[2:]
        )


def pack(verified: Array, nodes: int, mesh: Mesh | None) -> Packing:
    """That of the nodes `verified` [B, N+1] bool, of which there are at most `nodes` a row on
    average.
    """
    flat = _by_device(verified, mesh)
    size = nodes * (len(verified) // len(flat))
    source = jax.vmap(lambda own: jnp.nonzero(own, size=size, fill_value=0)[0])(flat)
    place = jnp.maximum(jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1, 0)
    return Packing(source.astype(jnp.int32), place, len(verified))


def _by_device(grid: Array, mesh: Mesh | None) -> Array:
    """[B, ...] -> [D, everything], of the rows of each device."""
    return grid.reshape(row_shards(mesh), -1)
