"""Tree attention as a Mosaic kernel for TPUs; the meaning is in reference.py.

The grid is (rows, splits of a row's context, blocks of a split). A step reads one block of the keys
and values of all groups and takes it into an online softmax (Milakov and Gimelshein 2018); the last
step of a split adds the window. There are as many steps as the longest row wants. A shorter row
spends those it does not need on fetching the next row's first block. A context is split (flash
decoding, Dao et al. 2023) where there is one row with many blocks: for the two cores of a v4 or
v5p. A chip with one core pays for it by merging two small parts.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import LANES
from rlhf_jax.types import Array

TILE = 8
BLOCK_BYTES = 2 << 20  # of keys and values: at 2.7 TB/s twice what a grid step costs (0.35 us)
SCORE_BYTES = (
    2 << 20
)  # of a block's scores in float32; what is derived from them takes as much again, twice
BLOCK_SLOTS = 1024  # half a block is read in vain, on average
# two cores share the context of a single row, from so many blocks on
SPLITS = 2
SPLIT_BLOCKS = 8
MASKED = float(jnp.finfo(jnp.float32).min)


class Cut(NamedTuple):
    """How contexts are cut."""

    block: int  # slots of a grid step: a multiple of 128, or all
    splits: int  # parts of a row's context


def tree_attention(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
    interpret: bool = False,
) -> Array:
    """As `reference.tree_attention`; of a row only the blocks below its length are read, whatever
    lies beyond.

    float32 is multiplied at the highest precision. Where T is a multiple of 128 the cache is read
    where it lies, else XLA may copy it first. `interpret` runs the kernel on any hardware, slowly.
    """
    return attend(
        query,
        cache_k,
        cache_v,
        window_k,
        window_v,
        length,
        mask,
        cut_for(query, cache_k),
        interpret,
    )


def cut_for(query: Array, cache_k: Array) -> Cut:
    """The cut for query [B, Q, H, D] and cache_k [B, G, D, T]: blocks as large as the bounds above
    allow.
    """
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    slots = cache_k.shape[3]
    rows = math.prod(_tiles(count, heads // groups))
    fitting = min(
        BLOCK_BYTES // (2 * groups * dim * cache_k.dtype.itemsize),
        SCORE_BYTES // (4 * groups * rows),
    )
    block = min(max(min(fitting, BLOCK_SLOTS) // LANES, 1) * LANES, slots)
    return Cut(block, SPLITS if batch == 1 and slots >= SPLIT_BLOCKS * block else 1)


@functools.partial(jax.jit, static_argnames=("cut", "interpret"))
def attend(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
    cut: Cut,
    interpret: bool = False,
) -> Array:
    """`tree_attention` under a given cut."""
    chex.assert_rank(
        [query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3]
    )
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    ratio = heads // cache_k.shape[1]
    order = _order(count, ratio)
    folded = query.reshape(batch, count, groups, ratio, dim).transpose(order)  # [B, G, A, E, D]
    cache_v = cache_v if _slot_axis(dim) == 2 else cache_v.swapaxes(2, 3)
    # Or XLA may fetch a whole cache into VMEM, ahead of the kernel.
    cache = (
        [cache_k, cache_v]
        if interpret
        else [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (cache_k, cache_v)]
    )
    # A few tokens fill the rows of a tile better than its lanes: the window's keys are to lie as
    # its values do.
    out, *mass = _call(
        cut,
        interpret,
        length,
        folded,
        *cache,
        window_k.swapaxes(2, 3),
        window_v,
        _seen(mask, ratio),
    )
    if mass:
        out = (jax.nn.softmax(mass[0], axis=1) * out).sum(axis=1).astype(query.dtype)
    return out.reshape(folded.shape).transpose(np.argsort(order)).reshape(query.shape)


def _order(count: int, ratio: int) -> tuple[int, ...]:
    """The axes of [B, Q, G, H/G, D] that make [B, G, A, E, D]: a group has A times E query rows, E
    in whole tiles.
    """
    return (0, 2, 1, 3, 4) if count == 1 or ratio % TILE == 0 else (0, 2, 3, 1, 4)


def _tiles(count: int, ratio: int) -> tuple[int, int]:
    """A, and E with its padding."""
    apart, together = (count, ratio) if _order(count, ratio)[2] == 1 else (ratio, count)
    return apart, _round_up(together, TILE)


def _slot_axis(dim: int) -> int:
    """Where the slots of `cache_v` stand when it is read in place: XLA lays out what fills the
    lanes last.
    """
    return 2 if dim % LANES == 0 else 3


def _seen(mask: Array, ratio: int) -> Array:
    """[B, Q, W] for each row of scores, [B, A * E, W] int8; the same for all layers, so made
    once.
    """
    batch, count, width = mask.shape
    of_heads = jnp.broadcast_to(
        mask.astype(jnp.int8)[:, :, None, None], (batch, count, 1, ratio, width)
    )
    folded = of_heads.transpose(_order(count, ratio))[:, 0]  # [B, A, E, W]
    padded = jnp.pad(folded, ((0, 0), (0, 0), (0, -folded.shape[2] % TILE), (0, 0)))
    return padded.reshape(batch, -1, width)


def _call(cut: Cut, interpret: bool, length: Array, query: Array, *parts: Array) -> list[Array]:
    """Of each split the attention [B, S, G, A, E, D] and, of several, the log of its sum [B, S, G,
    A, E, 1].
    """
    batch, groups, apart, together, dim = query.shape
    tile = (groups, apart, _round_up(together, TILE))
    key, value, *window = parts
    widths = (dim,) if cut.splits == 1 else (dim, 1)
    dtype = query.dtype if cut.splits == 1 else jnp.float32
    blocks = pl.cdiv(pl.cdiv(jnp.max(length), cut.block), cut.splits)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, cut.splits, jnp.maximum(blocks, 1)),
        in_specs=[
            _at_row(*tile, dim),
            _at_block(key, 3, cut),
            _at_block(value, _slot_axis(dim), cut),
            *(_at_row(*part.shape[1:]) for part in window),
        ],
        out_specs=[_at_split(*tile, width) for width in widths],
        scratch_shapes=[
            pltpu.VMEM((groups, tile[1] * tile[2], width), jnp.float32) for width in (1, 1, dim)
        ],
    )
    return pl.pallas_call(
        functools.partial(_kernel, cut=cut),
        grid_spec=spec,
        out_shape=[
            jax.ShapeDtypeStruct((batch, cut.splits, *query.shape[1:4], width), dtype)
            for width in widths
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(query, *parts),
        interpret=interpret,
        name="tree_attention",
    )(length, followers(length), query, *parts)


def _at_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda row, *_: (row, *[0] * len(shape)))


def _at_split(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec(
        (None, None, *shape), lambda row, split, *_: (row, split, *[0] * len(shape))
    )


def _at_block(cache: Array, axis: int, cut: Cut) -> pl.BlockSpec:
    def place(row, split, step, length, after):
        row, block = block_at(length, after, row, split, step, cut)
        return (row, *(block if at == axis else 0 for at in range(1, cache.ndim)))

    return pl.BlockSpec(
        (None, *(cut.block if at == axis else cache.shape[at] for at in range(1, cache.ndim))),
        place,
    )


def blocks_of(length: Array, split: Array, cut: Cut) -> tuple[Array, Array]:
    """The first block of a split of a row with `length`, and the one after its last; equal where it
    has none.
    """
    blocks = pl.cdiv(length, cut.block)
    each = pl.cdiv(blocks, cut.splits)
    return jnp.minimum(split * each, blocks), jnp.minimum((split + 1) * each, blocks)


def followers(length: Array) -> Array:
    """Of each row [B] the next one that is not empty; where none is left, the last one that is
    not.
    """
    rows = jnp.arange(length.size, dtype=jnp.int32)
    filled = length > 0
    ahead = jax.lax.cummin(jnp.where(filled, rows, length.size), reverse=True)
    ahead = jnp.append(ahead[1:], length.size)
    return jnp.where(ahead < length.size, ahead, jnp.max(jnp.where(filled, rows, 0)))


def block_at(
    length: Array, after: Array, row: Array, split: Array, step: Array, cut: Cut
) -> tuple[Array, Array]:
    """(row, block) of the cache that is in VMEM at a step of the grid, by `length` [B] and its
    `followers`.

    After a split's last block it is the next split's first, and after a row's last one its
    follower's first: fetched ahead, and not again while it stays. So none is fetched twice, and
    none past a length unless all rows are empty.
    """
    first, stop = blocks_of(length[row], split, cut)
    block = jnp.minimum(first + step, stop)
    follower = after[row]
    own = block < pl.cdiv(length[row], cut.block)
    last = jnp.maximum(pl.cdiv(length[follower], cut.block) - 1, 0)
    return jnp.where(own, row, follower), jnp.where(own, block, jnp.where(follower > row, 0, last))


def _kernel(
    length_ref,
    _,
    query_ref,
    key_ref,
    value_ref,
    window_k_ref,
    window_v_ref,
    seen_ref,
    *refs,
    cut: Cut,
):
    *out_refs, top_ref, total_ref, sum_ref = refs
    row, split, step = (pl.program_id(axis) for axis in range(3))
    query = query_ref[...].reshape(sum_ref.shape)
    first, stop = blocks_of(length_ref[row], split, cut)
    slot_axis = _slot_axis(query.shape[2]) - 1

    @pl.when(step == 0)
    def begin():
        # Above what masked scores are, so that these weigh nothing where nothing else is seen.
        top_ref[...] = jnp.full(top_ref.shape, MASKED / 2, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(first + step < stop)
    def read_block():
        rest = length_ref[row] - (first + step) * cut.block
        live = jax.lax.broadcasted_iota(jnp.int32, (1, 1, cut.block), 2) < rest
        slot = jax.lax.broadcasted_iota(jnp.int32, value_ref.shape, slot_axis)
        # Beyond the length there may be anything, and zero times anything need not be zero.
        value = jnp.where(slot < rest, value_ref[...], jnp.zeros((), value_ref.dtype))
        _take_in(
            _product(query, key_ref[...], 1), live, value, slot_axis, top_ref, total_ref, sum_ref
        )

    @pl.when(step == pl.num_programs(2) - 1)
    def end():
        seen = (seen_ref[...].astype(jnp.int32) > 0) & (split == 0)
        scores = _product(query, window_k_ref[...], 2)
        _take_in(scores, seen[None], window_v_ref[...], 1, top_ref, total_ref, sum_ref)
        # The best score weighs 1, so a sum below 1 is the empty one.
        total = jnp.maximum(total_ref[...], 1.0)
        results = (sum_ref[...] / total, top_ref[...] + jnp.log(total))
        for out_ref, result in zip(out_refs, results, strict=False):
            out_ref[...] = result.reshape(out_ref.shape).astype(out_ref.dtype)


def _take_in(
    scores: Array, seen: Array, value: Array, axis: int, top_ref, total_ref, sum_ref
) -> None:
    """Scores [G, N, X], those that are `seen`, and values, X on `axis`, into the running maximum
    and sums.
    """
    scores = jnp.where(seen, scores * sum_ref.shape[-1] ** -0.5, MASKED)
    top = jnp.maximum(top_ref[...], scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    decay = jnp.exp(top_ref[...] - top)
    top_ref[...] = top
    total_ref[...] = decay * total_ref[...] + weights.sum(axis=-1, keepdims=True)
    sum_ref[...] = decay * sum_ref[...] + _product(weights.astype(value.dtype), value, axis)


def _product(left: Array, right: Array, axis: int) -> Array:
    """Group by group: left [G, N, X] times right, X on `axis`, in float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((2,), (axis,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST
        if left.dtype == jnp.float32
        else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _cost(query: Array, key: Array, *parts: Array) -> pl.CostEstimate:
    """With full rows, because the compiler does not know their lengths."""
    scores = query.size // query.shape[-1] * (key.shape[-1] + parts[-1].shape[-1])
    return pl.CostEstimate(
        flops=4 * scores * query.shape[-1],
        transcendentals=scores,
        bytes_accessed=sum(part.size * part.dtype.itemsize for part in (query, query, key, *parts)),
    )


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
