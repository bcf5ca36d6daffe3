"""Blocks of token columns, so that the logits [B, T, V] of a batch never exist at one time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf_jax.mesh import ROW_AXES, Layout, model_shardings
from rlhf_jax.types import Array, Model

ArrayTree = TypeVar("ArrayTree")  # An array, or a pytree of them.


def split_columns(arrays: ArrayTree, tokens_at_a_time: int) -> ArrayTree:
    """Cut arrays [B, T, ...] into blocks [T / C, B, C, ...] of C columns, for `jax.lax.map`.

    Blocks are alike and have at most `tokens_at_a_time` tokens, but at least one column. After the
    last column stand zeros, which a mask among the arrays reads as False.
    """
    rows, slots = jax.tree.leaves(arrays)[0].shape[:2]
    count = -(-slots // max(1, min(tokens_at_a_time // rows, slots)))
    columns = -(-slots // count)

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


def map_columns(
    measure: Callable[..., ArrayTree], model: Model, arrays: Any, chunk: int, layout: Layout
) -> ArrayTree:
    """Compute measure(head, *block) of blocks of columns of arrays [B, T, ...]: [B, T, ...].

    `measure` is given what `logits` reads of the model, in float32, and blocks of about `chunk`
    tokens of each device. The head comes over its mesh axes once, and its gradient is summed on
    each device and goes back once: neither does so block by block.
    """
    tied = model.head is None
    head = dataclasses.replace(model, layers=(), norm=None, embed=model.embed if tied else None)

    def local(head: Model, arrays: Any) -> ArrayTree:
        """Measure one device's rows."""
        whole = jax.tree.map(_whole, head, specs)
        whole = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), whole)
        blocks = split_columns(arrays, chunk)
        out = jax.lax.map(lambda block: measure(whole, *block), blocks)
        return join_columns(out, jax.tree.leaves(arrays)[0].shape[1])

    if layout.mesh is None or layout.mesh.size == 1:
        specs = jax.tree.map(lambda leaf: PartitionSpec(), head)
        return local(head, arrays)
    shardings = model_shardings(head, layout)
    specs = jax.tree.map(_without_tensor, shardings)
    rows = PartitionSpec(ROW_AXES)
    # The vocabulary's axis is left to the compiler, which splits what `measure` computes.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, rows),
        out_specs=rows,
        axis_names=frozenset(ROW_AXES),
        check_vma=False,
    )(head, arrays)


def _whole(leaf: Array, spec: PartitionSpec) -> Array:
    """Gather a device's part of a weight over the mesh axes that split it."""
    for axis, names in enumerate(spec):
        if names is not None:
            leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
    return leaf


def _without_tensor(sharding: Any) -> PartitionSpec:
    """Return what splits a weight but the tensor axis."""
    return PartitionSpec(*(None if names == "tensor" else names for names in sharding.spec))
