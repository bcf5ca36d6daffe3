"""Attend on Hopper (Mosaic GPU): flash-decoding over the window, masked, and then over the cache.

One thread block serves up to 192 query rows of one (row, group) over one part of its context. Keys
and values come through a ring of shared memory, fetched by the copy engine while earlier ones are
multiplied; the loop ends at the row's length, so nothing after it is read. Online softmax (Milakov
and Gimelshein 2018); the parts of a context are merged outside (Dao et al. 2023, "Flash-Decoding
for long-context inference").
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.arrays import LOWEST, check_ranks
from pallas_kernels.hopper import MULTIPROCESSORS, WARPGROUP_ROWS, across, rowwise, smem
from pallas_kernels.tree_attention.reference import by_group, by_token

# Cache slots fetched at a time.
CACHE_BLOCK = 64
# Slots of the cache's ring: two thread blocks of one warpgroup fit a multiprocessor, with one fetch
# of each in flight.
CACHE_SLOTS = 2
# Most warpgroups per ring; more would run out of registers.
WARPGROUPS = 3
# Thread blocks that an H100 runs at a time.
THREAD_BLOCKS = 2 * MULTIPROCESSORS
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Describe how one call is cut into thread blocks; static."""

    warpgroups: int  # of a thread block, WARPGROUP_ROWS query rows each
    tiles: int  # thread blocks that share a (row, group, part) by query rows
    parts: int  # of each row's context
    windows: int  # blocks of the window
    scale: float  # of the scores, for powers of two


class AttentionScratch(NamedTuple):
    """Hold the shared memory of a thread block and its barriers: references, or what to allocate.

    A is its warpgroups, S the ring's slots.
    """

    query: Any  # [A, WARPGROUP_ROWS, D]
    key: Any  # [S, D, CACHE_BLOCK]
    value: Any  # [S, CACHE_BLOCK, D]
    # [A, WARPGROUP_ROWS, W]: the window's mask, then weights in transfer from registers to the
    # matrix unit
    weight: Any
    ready: Any  # [A]: a warpgroup's queries and mask have arrived
    loaded: Any  # [S]: keys and values have arrived
    consumed: Any  # [S]: every warpgroup has read them
    cleared: Any  # the values after the length are zeros


class BlockWork(NamedTuple):
    """Describe a thread block's work: blocks of the window, then of the cache from `first` on."""

    windows: Array  # blocks of the window
    first: Array
    steps: Array  # blocks of window and cache
    length: Array  # of the row


@functools.partial(jax.jit, static_argnames="interpret")
def tree_attention(
    query: Array,
    cache_k: Array,
    cache_v: Array,
    window_k: Array,
    window_v: Array,
    length: Array,
    mask: Array,
    *,
    interpret: bool = False,
) -> Array:
    """Compute `reference.tree_attention` in bfloat16, for heads of 64 or 128; same shapes.

    Softmax and sums are float32. Raises ValueError for another dtype or another head dim. If T is a
    multiple of 64 the cache is read in place, else it is copied with padding. `interpret` needs jax
    0.12.
    """
    check_ranks([query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3])
    _, count, heads, dim = query.shape
    if query.dtype != jnp.bfloat16:
        raise ValueError(
            f"The kernel serves bfloat16, not {query.dtype}: Hopper's matrix units round float32."
        )
    if dim not in (64, 128):
        raise ValueError(
            f"A head dim of {dim} does not fit the kernel's tiles; it serves 64 and 128."
        )

    groups = cache_k.shape[1]
    plan = _plan(query.shape, cache_k.shape, window_k.shape[3])
    rows = plan.tiles * plan.warpgroups * WARPGROUP_ROWS
    grouped = _pad(by_group(query, groups), 2, rows)
    seen = _pad(jnp.tile(mask.astype(query.dtype), (1, heads // groups, 1)), 1, rows)
    attend = _kernel(plan, grouped.shape, interpret)
    parts, top, total = attend(
        length,
        grouped,
        _pad(cache_k, 3, CACHE_BLOCK),
        _pad(cache_v, 2, CACHE_BLOCK),
        _pad(window_k, 3, CACHE_BLOCK),
        _pad(window_v, 2, CACHE_BLOCK),
        _pad(seen, 2, CACHE_BLOCK),
    )

    # Parts of a context are merged by their maxima and sums [S, B, G, R].
    weight = jnp.exp2(top - jnp.max(top, axis=0))
    total = jnp.sum(total * weight, axis=0)[..., None]
    out = jnp.sum(parts * weight[..., None], axis=0) / jnp.where(total > 0, total, 1.0)
    out = out[:, :, : heads // groups * count]
    return by_token(out, query.shape).astype(query.dtype)


def _plan(query: tuple[int, ...], cache: tuple[int, ...], window: int) -> AttentionPlan:
    """Plan the call for a query, a cache of keys and a window of these shapes and this width."""
    batch, count, heads, dim = query
    groups = cache[1]
    slots = cache[3]
    tiles = pl.cdiv(heads // groups * count, WARPGROUP_ROWS)
    blocks = pl.cdiv(tiles, WARPGROUPS)
    # Each part has at least two blocks: with fewer its fixed costs dominate.
    wanted = pl.cdiv(THREAD_BLOCKS, batch * groups * blocks)
    return AttentionPlan(
        warpgroups=pl.cdiv(tiles, blocks),
        tiles=blocks,
        parts=min(wanted, pl.cdiv(slots, 2 * CACHE_BLOCK)),
        windows=pl.cdiv(window, CACHE_BLOCK),
        scale=dim**-0.5 * LOG2_E,
    )


def _pad(x: Array, axis: int, unit: int) -> Array:
    """Pad x with zeros to a multiple of `unit` along one axis."""
    slack = -x.shape[axis] % unit
    return jnp.pad(x, [(0, slack if at == axis else 0) for at in range(x.ndim)])


def _kernel(plan: AttentionPlan, query: tuple[int, ...], interpret: bool) -> Callable:
    """Return the kernel for query [B, G, R, D].

    It gives the parts' weighted sums [S, B, G, R, D], maxima (powers of two) and sums [S, B, G, R].
    """
    batch, groups, _, dim = query
    sums = jax.ShapeDtypeStruct((plan.parts, *query[:3]), jnp.float32)
    return plgpu.kernel(
        functools.partial(_attend, plan),
        out_type=(jax.ShapeDtypeStruct((*sums.shape, dim), jnp.float32), sums, sums),
        # Blocks that share keys and values run side by side.
        grid=(plan.tiles, plan.parts, groups, batch),
        grid_names=("tile", "part", "group", "row"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=AttentionScratch(
            query=smem(plan.warpgroups, WARPGROUP_ROWS, dim),
            key=smem(CACHE_SLOTS, dim, CACHE_BLOCK),
            value=smem(CACHE_SLOTS, CACHE_BLOCK, dim),
            weight=smem(plan.warpgroups, WARPGROUP_ROWS, plan.windows * CACHE_BLOCK),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=CACHE_SLOTS),
            consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=CACHE_SLOTS),
            cleared=plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(interpret),
    )


def _attend(
    plan: AttentionPlan,
    length: Ref,
    query: Ref,
    cache_k: Ref,
    cache_v: Ref,
    window_k: Ref,
    window_v: Ref,
    mask: Ref,
    out: Ref,
    top: Ref,
    total: Ref,
    *refs: Any,
) -> None:
    """Take one warpgroup's query rows over one part of one row's context."""
    scratch = AttentionScratch(*refs)
    row, group, part, me = (lax.axis_index(name) for name in ("row", "group", "part", "warpgroup"))
    first = (lax.axis_index("tile") * plan.warpgroups + me) * WARPGROUP_ROWS
    rows = pl.ds(first, WARPGROUP_ROWS)
    plgpu.copy_gmem_to_smem(query.at[row, group, rows], scratch.query.at[me], scratch.ready.at[me])
    plgpu.copy_gmem_to_smem(mask.at[row, rows], scratch.weight.at[me], scratch.ready.at[me])

    # The blocks of this part of the cache; the window goes to the last part, whose share is the
    # smallest.
    known = length[row]
    blocks = pl.cdiv(known, CACHE_BLOCK)
    share = pl.cdiv(blocks, plan.parts)
    windows = jnp.where(part == plan.parts - 1, plan.windows, 0)
    cached = jnp.clip(blocks - part * share, 0, share)
    work = BlockWork(windows, part * share, windows + cached, length=known)

    window = window_k.at[row, group], window_v.at[row, group]
    cache = cache_k.at[row, group], cache_v.at[row, group]
    fetch = functools.partial(_fetch, work, window, cache, scratch)

    @pl.when(me == 0)
    def fill_ring() -> None:
        """Start the first copies, one for each slot of the ring."""
        lax.fori_loop(0, jnp.minimum(work.steps, CACHE_SLOTS), lambda step, _: fetch(step), None)

    def visit(step: Array, carry: tuple[Array, ...], seen: Callable) -> tuple[Array, ...]:
        """Add one block of keys and values to the running sums."""
        slot = lax.rem(step, CACHE_SLOTS)
        plgpu.barrier_wait(scratch.loaded.at[slot])
        pl.when(me == 0)(lambda: _refill(work, scratch, fetch, step))
        carry = _online(plan, scratch, me, slot=slot, seen=seen(step), carry=carry)
        plgpu.barrier_arrive(scratch.consumed.at[slot])
        return carry

    plgpu.barrier_wait(scratch.ready.at[me])
    window_seen = functools.partial(_window_seen, scratch.weight.at[me])
    cache_seen = functools.partial(_cache_seen, work, scratch, me)
    # Weighted sum [rows, D], maximum (a power of two) and sum [rows] of no scores.
    nothing = jnp.zeros((WARPGROUP_ROWS, query.shape[-1]), jnp.float32)
    carry = (plgpu.layout_cast(nothing, plgpu.Layout.WGMMA), rowwise(LOWEST), rowwise(0.0))
    carry = lax.fori_loop(0, work.windows, functools.partial(visit, seen=window_seen), carry)
    carry = lax.fori_loop(
        work.windows, work.steps, functools.partial(visit, seen=cache_seen), carry
    )
    for ref, result in zip((out, top, total), carry, strict=True):
        ref[part, row, group, rows] = result


def _fetch(
    work: BlockWork,
    window: tuple[Ref, Ref],
    cache: tuple[Ref, Ref],
    scratch: AttentionScratch,
    step: Array,
) -> None:
    """Start the copies of one step's keys [D, block] and values [block, D] into its slot."""
    slot = lax.rem(step, CACHE_SLOTS)

    def copy(source: tuple[Ref, Ref], block: Array) -> None:
        """Copy one block of keys and values."""
        (key, value) = source
        at = pl.ds(block * CACHE_BLOCK, CACHE_BLOCK)
        plgpu.copy_gmem_to_smem(key.at[:, at], scratch.key.at[slot], scratch.loaded.at[slot])
        plgpu.copy_gmem_to_smem(value.at[at], scratch.value.at[slot], scratch.loaded.at[slot])

    pl.when(step < work.windows)(lambda: copy(window, step))
    pl.when(step >= work.windows)(lambda: copy(cache, work.first + step - work.windows))


def _refill(work: BlockWork, scratch: AttentionScratch, fetch: Callable, step: Array) -> None:
    """Fill the previous step's slot with the next fetch after those in flight."""
    coming = step + CACHE_SLOTS - 1

    @pl.when((step > 0) & (coming < work.steps))
    def fill() -> None:
        """Wait until every warpgroup has read the slot, and fetch into it."""
        plgpu.barrier_wait(scratch.consumed.at[lax.rem(coming, CACHE_SLOTS)])
        fetch(coming)


def _window_seen(mask: Ref, step: Array) -> Array:
    """Return which tokens of a window block each query row sees, [rows, block]."""
    block = mask.at[:, pl.ds(step * CACHE_BLOCK, CACHE_BLOCK)]
    return plgpu.layout_cast(block[...], plgpu.Layout.WGMMA) > 0


def _cache_seen(work: BlockWork, scratch: AttentionScratch, me: Array, step: Array) -> Array:
    """Return which slots of a cache block are below the length, [rows, block].

    The values of the others become zeros: they may be NaN, which a weight of zero would not remove.
    """
    left = work.length - (work.first + step - work.windows) * CACHE_BLOCK

    def clear() -> None:
        """Overwrite the values after the length, for all warpgroups."""
        value = scratch.value.at[lax.rem(step, CACHE_SLOTS)]
        slot = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=plgpu.Layout.WGMMA)
        kept = slot < left
        values = plgpu.layout_cast(value[...], plgpu.Layout.WGMMA)
        value[...] = jnp.where(kept, values, jnp.bfloat16(0))
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.cleared)

    @pl.when(left < CACHE_BLOCK)
    def clear_once() -> None:
        """Let the first warpgroup overwrite them, and the others wait."""
        pl.when(me == 0)(clear)
        plgpu.barrier_wait(scratch.cleared)

    return hopper.columns((WARPGROUP_ROWS, CACHE_BLOCK)) < left


def _online(
    plan: AttentionPlan,
    scratch: AttentionScratch,
    me: Array,
    *,
    slot: Array,
    seen: Array,
    carry: tuple[Array, ...],
) -> tuple[Array, Array, Array]:
    """Add a slot's keys and values, where `seen` [rows, block], to (sum, maximum, total)."""
    out, top, total = carry
    scores = _product((WARPGROUP_ROWS, CACHE_BLOCK), scratch.query.at[me], scratch.key.at[slot])
    scores = jnp.where(seen, scores * plan.scale, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - across(higher, scores.shape))
    fade = jnp.exp2(top - higher)
    weight = scratch.weight.at[me, :, pl.ds(0, CACHE_BLOCK)]
    weight[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    out = out * across(fade, out.shape)
    out = out + _product((WARPGROUP_ROWS, out.shape[1]), weight, scratch.value.at[slot])
    return out, higher, total * fade + jnp.sum(weights, axis=1)


def _product(shape: tuple[int, int], left: Ref, right: Ref) -> Array:
    """Multiply two references to shared memory, in float32 of this shape."""

    def multiply(accumulator: Any) -> Array:
        """Run the matrix instruction and wait for it."""
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
