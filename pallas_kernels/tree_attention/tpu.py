"""Attend from the nodes of a draft tree on TPUs (Mosaic); defined in reference.py.

The grid is (rows, splits of a row's context, blocks of a split). A step reads one block of the keys
and values of all groups and adds it to an online softmax (Milakov and Gimelshein 2018); the last
step of a split adds the window. The number of steps is that of the longest row. A shorter row
spends the surplus on fetching the next row's first block. A context is split (flash decoding, Dao
et al. 2023) if there is one row with many blocks: for the two cores of a v4 or v5p. A chip with one
core pays for it by merging two small parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import check_ranks
from pallas_kernels.shapes import LANES

# Query rows fill tiles of this many.
SUBLANES = 8
# Most bytes of a block of keys and values: at 2.7 TB/s that is twice the cost of a grid step (0.35
# us).
CACHE_BLOCK_BYTES = 2 << 20
# Most bytes of a block's scores in float32; derived arrays take as much again, twice.
SCORE_BYTES = 2 << 20
# Most slots of a block: half a block is read in vain, on average.
BLOCK_SLOTS = 1024
# Blocks from which on two cores share the context of a single row.
SPLITS = 2
SPLIT_BLOCKS = 8
# The score of invisible tokens: finite, so that differences are.
MASKED = float(jnp.finfo(jnp.float32).min)


class Cut(NamedTuple):
    """Hold the sizes of a cut of contexts."""

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
    """Compute `reference.tree_attention`, reading only a row's blocks below its length.

    Anything may be beyond it. float32 is multiplied at the highest precision. If T is a multiple of
    128 the cache is read in place, else XLA may copy it first. `interpret` runs the kernel on any
    hardware, slowly.
    """
    cut = cut_for(query, cache_k)
    return attend(query, cache_k, cache_v, window_k, window_v, length, mask, cut, interpret)


def cut_for(query: Array, cache_k: Array) -> Cut:
    """Choose the cut for query [B, Q, H, D] and cache_k [B, G, D, T].

    Blocks are as large as the bounds above allow.
    """
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    slots = cache_k.shape[3]
    ratio = heads // groups
    # The query rows of a group, E in whole tiles.
    apart, together = (count, ratio) if _order(count, ratio)[2] == 1 else (ratio, count)
    rows = apart * pl.cdiv(together, SUBLANES) * SUBLANES
    fitting = min(
        CACHE_BLOCK_BYTES // (2 * groups * dim * cache_k.dtype.itemsize),
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
    """Compute `tree_attention` under a given cut."""
    check_ranks([query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3])
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    ratio = heads // groups
    order = _order(count, ratio)
    folded = query.reshape(batch, count, groups, ratio, dim).transpose(order)  # [B, G, A, E, D]
    cache = [cache_k, cache_v if _slot_axis(dim) == 2 else cache_v.swapaxes(2, 3)]
    if not interpret:
        # Otherwise XLA may fetch a whole cache into VMEM, ahead of the kernel.
        cache = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache]
    # A few tokens fill the rows of a tile better than its lanes: the window's keys are laid out
    # like its values.
    window_k = window_k.swapaxes(2, 3)
    # The mask [B, Q, W] for each row of scores, [B, A * E, W] int8. It is the same for all layers,
    # so it is made once.
    width = mask.shape[2]
    of_heads = jnp.broadcast_to(
        mask.astype(jnp.int8)[:, :, None, None], (batch, count, 1, ratio, width)
    )
    seen = of_heads.transpose(order)[:, 0]  # [B, A, E, W]
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, -seen.shape[2] % SUBLANES), (0, 0)))
    seen = seen.reshape(batch, -1, width)
    out, *mass = _call(cut, interpret, length, folded, *cache, window_k, window_v, seen)
    if mass:
        out = (jax.nn.softmax(mass[0], axis=1) * out).sum(axis=1).astype(query.dtype)
    return out.reshape(folded.shape).transpose(np.argsort(order)).reshape(query.shape)


def followers(length: Array) -> Array:
    """Return for each row [B] the next one that is not empty; at the end, the last such one."""
    rows = jnp.arange(length.size, dtype=jnp.int32)
    filled = length > 0
    ahead = lax.cummin(jnp.where(filled, rows, length.size), reverse=True)
    ahead = jnp.append(ahead[1:], length.size)
    last = jnp.max(jnp.where(filled, rows, 0))
    return jnp.where(ahead < length.size, ahead, last)


def block_at(
    length: Array, after: Array, row: Array, split: Array, step: Array, cut: Cut
) -> tuple[Array, Array]:
    """Return (row, block) of the cache that is in VMEM at a step of the grid.

    `after` is the `followers` of `length` [B]. After a split's last block it is the next split's
    first, and after a row's last one its follower's first: fetched ahead, and not again while it
    stays. So none is fetched twice, and none past a length unless all rows are empty.
    """
    first, stop = _split_blocks(length[row], split, cut)
    block = jnp.minimum(first + step, stop)
    follower = after[row]
    own = block < pl.cdiv(length[row], cut.block)
    last = jnp.maximum(pl.cdiv(length[follower], cut.block) - 1, 0)
    return jnp.where(own, row, follower), jnp.where(own, block, jnp.where(follower > row, 0, last))


def _split_blocks(length: Array, split: Array, cut: Cut) -> tuple[Array, Array]:
    """Return a split's first block, and the one after its last; equal if it has none."""
    blocks = pl.cdiv(length, cut.block)
    each = pl.cdiv(blocks, cut.splits)
    return jnp.minimum(split * each, blocks), jnp.minimum((split + 1) * each, blocks)


def _order(count: int, ratio: int) -> tuple[int, ...]:
    """Return the axes of [B, Q, G, H/G, D] that make [B, G, A, E, D].

    A group has A times E query rows, E in whole tiles.
    """
    return (0, 2, 1, 3, 4) if count == 1 or ratio % SUBLANES == 0 else (0, 2, 3, 1, 4)


def _slot_axis(dim: int) -> int:
    """Return the axis of the slots of `cache_v` when it is read in place.

    XLA puts last the axis that fills the lanes.
    """
    return 2 if dim % LANES == 0 else 3


def _call(cut: Cut, interpret: bool, length: Array, query: Array, *parts: Array) -> list[Array]:
    """Return the attention of each split [B, S, G, A, E, D].

    With several splits also the log of each sum, [B, S, G, A, E, 1].
    """
    batch, groups, apart, together, dim = query.shape
    whole = pl.cdiv(together, SUBLANES) * SUBLANES  # query rows in whole tiles
    key, value, *window = parts
    widths = (dim,) if cut.splits == 1 else (dim, 1)
    dtype = query.dtype if cut.splits == 1 else jnp.float32
    blocks = pl.cdiv(pl.cdiv(jnp.max(length), cut.block), cut.splits)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, cut.splits, jnp.maximum(blocks, 1)),
        in_specs=[
            _at_grid(1, groups, apart, whole, dim),
            _at_block(key, 3, cut),
            _at_block(value, _slot_axis(dim), cut),
            *(_at_grid(1, *part.shape[1:]) for part in window),
        ],
        out_specs=[_at_grid(2, groups, apart, whole, width) for width in widths],
        scratch_shapes=[
            pltpu.VMEM((groups, apart * whole, width), jnp.float32) for width in (1, 1, dim)
        ],
    )
    # With full rows, because the compiler does not know their lengths.
    scores = query.size // dim * (key.shape[-1] + window[-1].shape[-1])
    cost = pl.CostEstimate(
        flops=4 * scores * dim,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (query, query, *parts)),
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
        cost_estimate=cost,
        interpret=interpret,
        name="tree_attention",
    )(length, followers(length), query, *parts)


def _at_grid(axes: int, *shape: int) -> pl.BlockSpec:
    """Describe an array whose parts of this shape are indexed by the grid's first axes."""
    return pl.BlockSpec((*[None] * axes, *shape), lambda *at: (*at[:axes], *[0] * len(shape)))


def _at_block(cache: Array, axis: int, cut: Cut) -> pl.BlockSpec:
    """Describe a cache whose row, and block along `axis`, are chosen by `block_at`."""

    def place(
        row: Array, split: Array, step: Array, length: Array, after: Array
    ) -> tuple[Array | int, ...]:
        """Return the block's index at one step of the grid."""
        row, block = block_at(length, after, row, split=split, step=step, cut=cut)
        return (row, *(block if at == axis else 0 for at in range(1, cache.ndim)))

    sizes = (cut.block if at == axis else cache.shape[at] for at in range(1, cache.ndim))
    return pl.BlockSpec((None, *sizes), place)


def _kernel(
    length: Ref,
    _: Ref,
    query: Ref,
    key: Ref,
    value: Ref,
    window_k: Ref,
    window_v: Ref,
    window_seen: Ref,
    *refs: Ref,
    cut: Cut,
) -> None:
    """Take one block of one split of a row into the running maximum and sums."""
    *outs, top, total, weighted = refs
    row, split, step = (pl.program_id(axis) for axis in range(3))
    rows = query[...].reshape(weighted.shape)
    first, stop = _split_blocks(length[row], split, cut)
    slot_axis = _slot_axis(rows.shape[2]) - 1
    take_in = functools.partial(_take_in, top, total, weighted)

    @pl.when(step == 0)
    def begin() -> None:
        """Start the sums of a split."""
        # Above masked scores, so that these weigh nothing if nothing else is seen.
        top[...] = jnp.full(top.shape, MASKED / 2, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    @pl.when(first + step < stop)
    def read_block() -> None:
        """Add a block of the cache, up to the row's length."""
        rest = length[row] - (first + step) * cut.block
        live = lax.broadcasted_iota(jnp.int32, (1, 1, cut.block), 2) < rest
        slot = lax.broadcasted_iota(jnp.int32, value.shape, slot_axis)
        # Anything may be beyond the length, and zero times it need not be zero.
        values = jnp.where(slot < rest, value[...], jnp.zeros((), value.dtype))
        take_in(_product(rows, key[...], 1), seen=live, value=values, axis=slot_axis)

    @pl.when(step == pl.num_programs(2) - 1)
    def end() -> None:
        """Add the window, to the first split, and write the results."""
        seen = (window_seen[...].astype(jnp.int32) > 0) & (split == 0)
        take_in(_product(rows, window_k[...], 2), seen=seen[None], value=window_v[...], axis=1)
        # The best score weighs 1, so a sum below 1 is the empty one.
        sums = jnp.maximum(total[...], 1.0)
        results = (weighted[...] / sums, top[...] + jnp.log(sums))
        for out, result in zip(outs, results, strict=False):
            out[...] = result.reshape(out.shape).astype(out.dtype)


def _take_in(
    top: Ref, total: Ref, weighted: Ref, scores: Array, *, seen: Array, value: Array, axis: int
) -> None:
    """Add scores [G, N, X] that are `seen`, and values, X on `axis`, to the running sums."""
    scores = jnp.where(seen, scores * weighted.shape[-1] ** -0.5, MASKED)
    highest = jnp.maximum(top[...], scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    decay = jnp.exp(top[...] - highest)
    top[...] = highest
    total[...] = decay * total[...] + weights.sum(axis=-1, keepdims=True)
    weighted[...] = decay * weighted[...] + _product(weights.astype(value.dtype), value, axis)


def _product(left: Array, right: Array, axis: int) -> Array:
    """Multiply group by group: left [G, N, X] times right, X on `axis`, in float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left,
        right,
        (((2,), (axis,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
