"""Allocate a budget of drafts to the likeliest ones, verify only those, and predict their tokens.

Rows draft as far as useful; K nodes per row are verified on average. All but attention runs on K
tokens per row, of whichever rows; attention runs on the whole grid of rows and nodes. A shared
budget of drafts for all rows is from AdaServe (Li et al. 2025). Rows on one device share a budget,
so that no data cross devices. `Ranking` and what follows it are the host's expectations of
such packed rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, NOTHING
from rlhf_jax.mesh import Layout, pin_rows
from rlhf_jax.types import Array

_LONGEST = trees.NODE_BUCKETS[-1] - 1  # Draft tokens of a chain.

# The gains without measurements [CLASSES, longest chain]: those of surer classes come first.
UNMEASURED = (np.arange(CLASSES, dtype=np.float32)[:, None] / CLASSES) ** np.arange(
    1, _LONGEST + 1, dtype=np.float32
)


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


class Ranking(NamedTuple):
    """Hold the n possible drafts of one row of each class, the likeliest first."""

    kind: np.ndarray  # [n] class
    # [n, 2 * CLASSES] expected accepted drafts, and drafts, of a row of each class
    gains: np.ndarray


def expected_gains(rates: np.ndarray) -> np.ndarray:
    """Return [CLASSES, longest chain] float32 chances that a draft of each depth is accepted.

    rates [CLASSES, DEPTHS] of rank 0; depths beyond the last use its rate.
    """
    depths = np.minimum(np.arange(_LONGEST), DEPTHS - 1)
    gains = np.cumprod(rates[:, depths], axis=1).astype(np.float32)
    gains[NOTHING] = 0.0
    return gains


def rank_drafts(expected_gain: np.ndarray) -> Ranking:
    """Rank drafts in the order in which the budget of a packed round takes them.

    expected_gain [CLASSES, length]: some columns of `expected_gains`.
    """
    likely = np.count_nonzero(expected_gain)
    order = np.argsort(-expected_gain, axis=None, kind="stable")[:likely]
    kind = order // expected_gain.shape[1]
    own = kind[:, None] == np.arange(CLASSES)
    gains = np.concatenate([own * expected_gain.ravel()[order, None], own], axis=1)
    return Ranking(kind, gains.astype(float))


def packed_tokens(
    ranking: Ranking, counts: np.ndarray, slots: int, nodes: np.ndarray, factor: float
) -> np.ndarray:
    """Return [CLASSES, S] expected tokens of a row by packed rounds of S budgets.

    counts [D, CLASSES]: live rows of each class on D devices; a class without rows gets the gain of
    its first row. slots: rows of the program; nodes [S]: average verified nodes per row; factor:
    accepted drafts over those that the ranking expects.
    """
    budgets = nodes[:, None] * (slots / len(counts)) - counts.sum(axis=1)  # [S, D] drafts
    wanted = counts[:, ranking.kind]
    left = budgets[..., None] - wanted.cumsum(axis=1)
    share = np.minimum(np.maximum(left / np.maximum(wanted, 1) + 1, 0), 1)
    gains = share @ ranking.gains  # [S, D, 2 * CLASSES]
    if len(counts) == 1:
        gains = gains[:, 0]
    else:
        weights = np.tile(counts + 1e-9, 2)
        gains = (gains * weights).sum(axis=1) / weights.sum(axis=0)
    return 1 + np.minimum(factor * gains[:, :CLASSES], gains[:, CLASSES:]).T
