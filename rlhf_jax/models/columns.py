"""Process blocks of token columns, so that the logits [B, T, V] of a batch never exist at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rlhf_jax.mesh import ROW_AXES, Layout
from rlhf_jax.models.shardings import model_shardings, pin_weights
from rlhf_jax.types import Array, Model

ArrayTree = TypeVar("ArrayTree")  # An array, or a pytree of them.


def split_columns(arrays: ArrayTree, tokens_at_a_time: int) -> ArrayTree:
    """Cut arrays [B, T, ...] into blocks [T / C, B, C, ...] of C columns, for `jax.lax.map`.

    Blocks are equal and have at most `tokens_at_a_time` tokens, but at least one column. The last
    block is padded with zeros, which a mask among the arrays reads as False.
    """
    rows, slots = jax.tree.leaves(arrays)[0].shape[:2]
    count, columns = _blocks(rows, slots, tokens_at_a_time)

    def split(leaf: Array) -> jax.Array:
        padding = [(0, 0), (0, count * columns - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2)
        blocks = jnp.pad(leaf, padding).reshape(len(leaf), count, columns, *leaf.shape[2:])
        return jnp.moveaxis(blocks, 1, 0)

    return jax.tree.map(split, arrays)


def _blocks(rows: int, slots: int, tokens_at_a_time: int) -> tuple[int, int]:
    """Return the number of blocks, and of columns in each."""
    count = -(-slots // max(1, min(tokens_at_a_time // rows, slots)))
    return count, -(-slots // count)


def join_columns(blocks: ArrayTree, slots: int) -> ArrayTree:
    """Undo `split_columns`: blocks [T / C, B, C, ...] to arrays [B, T, ...], T being `slots`."""

    def join(leaf: Array) -> jax.Array:
        rows = leaf.shape[1]
        return jnp.moveaxis(leaf, 0, 1).reshape(rows, -1, *leaf.shape[3:])[:, :slots]

    return jax.tree.map(join, blocks)


def map_tokens(
    measure: Callable[..., ArrayTree],
    model: Model,
    arrays: Any,
    chunk: int,
    layout: Layout,
    head_dtype: DTypeLike | None = None,
    wanted: Array | None = None,
) -> ArrayTree:
    """Compute measure(head, *block) of blocks of tokens of arrays [B, T, ...]: [B, T, ...].

    A block without a `wanted` token [B, T] bool gives zeros, on a CPU at no cost. `measure` gets
    the head for `logits`, and at most `chunk` tokens of one row shard at a time, [C, ...]. Each
    shard gathers the head once, before its blocks; the head's gradient is summed on each device,
    and scattered once after them. head_dtype: the dtype of that sum and of the head passed to
    `measure`; None for the head's own, if nothing is differentiated by it.
    """
    tied = model.head is None
    head = dataclasses.replace(model, layers=(), norm=None, embed=model.embed if tied else None)
    head = pin_weights(head, layout)
    if head_dtype is not None:
        head = jax.tree.map(lambda leaf: leaf.astype(head_dtype), head)
    heads = _copy_to_shards(head, layout)
    shards = layout.row_shards
    rows, slots = jax.tree.leaves(arrays)[0].shape[:2]
    lines = jax.tree.map(lambda leaf: leaf.reshape(shards, -1, *leaf.shape[2:]), arrays)
    blocks = split_columns(lines, chunk * shards)

    def of_block(block: Any) -> ArrayTree:
        return jax.vmap(measure)(heads, *block)

    def of_wanted(given: tuple[Any, Array]) -> ArrayTree:
        block, is_wanted = given
        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_block, block))
        return jax.lax.cond(is_wanted, of_block, lambda _: nothing, block)

    # Checkpointed, else each block would keep its logits for the backward pass, and a branch the
    # head. A branch costs a further gradient of the head, and XLA's partitioner for GPUs puts its
    # results on every device; so it is only for a CPU, which is slow in products.
    if wanted is None or layout.platform != "cpu":
        out = jax.lax.map(jax.checkpoint(of_block), blocks)
    else:
        each = split_columns(jnp.asarray(wanted).reshape(shards, -1), chunk * shards)
        out = jax.lax.map(jax.checkpoint(of_wanted), (blocks, each.any(axis=(1, 2))))
    joined = join_columns(out, rows * slots // shards)
    return jax.tree.map(lambda leaf: leaf.reshape(rows, slots, *leaf.shape[2:]), joined)


def count_mapped(wanted: np.ndarray, chunk: int, layout: Layout) -> int:
    """Count the tokens that `map_tokens` computes for the `wanted` ones [B, T]."""
    lines = wanted.reshape(layout.row_shards, -1)
    count, columns = _blocks(*lines.shape, chunk * layout.row_shards)
    if layout.platform == "cpu":
        starts = range(0, count * columns, columns)
        count = sum(bool(lines[:, start : start + columns].any()) for start in starts)
    return count * columns * len(lines)


def _copy_to_shards(head: Model, layout: Layout) -> Model:
    """Return weights with a leading axis of row shards, each a whole copy except over `tensor`."""
    if layout.row_shards == 1:
        return jax.tree.map(lambda leaf: leaf[None], head)

    def copy(leaf: Array, place: NamedSharding) -> Array:
        """Gather a weight's dimensions over the axes of rows."""
        whole = [None if names != "tensor" else names for names in place.spec]

        def gather(part: Array) -> Array:
            for axis, names in enumerate(place.spec):
                if names and names != "tensor":
                    part = jax.lax.all_gather(part, names, axis=axis, tiled=True)
            return part[None]

        return jax.shard_map(
            gather, mesh=layout.mesh, in_specs=place.spec, out_specs=PartitionSpec(ROW_AXES, *whole)
        )(leaf)

    return jax.tree.map(copy, head, model_shardings(head, layout))
