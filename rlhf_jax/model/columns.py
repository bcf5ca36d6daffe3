"""Blocks of token columns, so that the logits [B, T, V] of a batch never exist at one time."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array

ArrayTree = TypeVar("ArrayTree")  # An array, or a pytree of them.


def split_columns(arrays: ArrayTree, tokens_at_a_time: int) -> ArrayTree:
    """Cut arrays [B, T, ...] into blocks [T / C, B, C, ...] of C columns, for `jax.lax.map`.

    A block has about `tokens_at_a_time` tokens, and at least one column. After the last column
    stand zeros, which a mask among the arrays reads as False.
    """
    rows, slots = jax.tree.leaves(arrays)[0].shape[:2]
    columns = max(1, min(tokens_at_a_time // rows, slots))
    count = -(-slots // columns)

    def split(leaf: Array) -> jax.Array:
        padding = [(0, 0), (0, count * columns - slots)] + [(0, 0)] * (leaf.ndim - 2)
        blocks = jnp.pad(leaf, padding).reshape(rows, count, columns, *leaf.shape[2:])
        return jnp.moveaxis(blocks, 1, 0)

    return jax.tree.map(split, arrays)


def join_columns(blocks: ArrayTree, slots: int) -> ArrayTree:
    """Undo `split_columns`: blocks [T / C, B, C, ...] to arrays [B, T, ...], T being `slots`."""

    def join(leaf: Array) -> jax.Array:
        rows = leaf.shape[1]
        return jnp.moveaxis(leaf, 0, 1).reshape(rows, -1, *leaf.shape[3:])[:, :slots]

    return jax.tree.map(join, blocks)
