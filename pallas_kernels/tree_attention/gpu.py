"""Tree attention on Hopper (Mosaic GPU): flash-decoding over the window, masked, and then over the
cache.

One thread block serves up to 192 query rows of one (row, group) over one part of its context. Keys
and values come through a ring of shared memory, fetched by the copy engine while earlier ones are
multiplied; the loop ends at the row's length, so nothing behind it is read. Online softmax (Milakov
and Gimelshein 2018); the parts of a context are merged outside (Dao et al. 2023, "Flash-Decoding
for long-context inference").
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import LOWEST, TILE, across, rowwise, smem
from rlhf_jax.types import Array

BLOCK = 64  # cache slots fetched at a time
# slots of the ring: two thread blocks of one warpgroup fit a multiprocessor, one fetch of each in
# flight
STAGES = 2
WARPGROUPS = 3  # that share one ring; more would not leave them registers
PLACES = 2 * 132  # thread blocks that an H100 runs at a time
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut into thread blocks; static."""

    warpgroups: int  # of a thread block, `TILE` query rows each
    tiles: int  # thread blocks that share a (row, group, part) by query rows
    parts: int  # of each row's context
    windows: int  # blocks of the window
    scale: float  # of the scores, for powers of two


def unsupported(query: Array) -> str | None:
    """Why this kernel cannot serve query [B, Q, H, D], in one sentence; None where it can."""
    if query.dtype != jnp.bfloat16:
        return (
            f"The kernel serves bfloat16, not {query.dtype}: Hopper's matrix units round float32."
        )
    if query.shape[-1] not in (64, 128):
        return f"A head dim of {query.shape[-1]} does not fit the kernel's tiles; it serves 64 and 128."
    return None


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
    """`reference.tree_attention` in bfloat16, D 64 or 128; same shapes. Softmax and sums are
    float32.

    Raises ValueError with the sentence of `unsupported`. Where T is a multiple of 64 the cache is
    read where it lies, else it is copied with padding. `interpret` needs jax 0.12.
    """
    chex.assert_rank(
        [query, cache_k, cache_v, window_k, window_v, length, mask], [4, 4, 4, 4, 4, 1, 3]
    )
    if reason := unsupported(query):
        raise ValueError(reason)
    batch, count, heads, dim = query.shape
    groups = cache_k.shape[1]
    plan = _plan(query.shape, cache_k.shape, window_k.shape[3])
    rows = plan.tiles * plan.warpgroups * TILE
    grouped = query.reshape(batch, count, groups, heads // groups, dim).transpose(0, 2, 3, 1, 4)
    grouped = _pad_to(grouped.reshape(batch, groups, -1, dim), 2, rows)
    seen = _pad_to(jnp.tile(mask.astype(query.dtype), (1, heads // groups, 1)), 1, rows)
    cache = _pad(cache_k, 3, BLOCK), _pad(cache_v, 2, BLOCK)
    window = _pad(window_k, 3, BLOCK), _pad(window_v, 2, BLOCK)
    attend = _kernel(plan, grouped.shape, interpret)
    out = _merge(*attend(length, grouped, *cache, *window, _pad(seen, 2, BLOCK)))
    out = out[:, :, : heads // groups * count].reshape(batch, groups, heads // groups, count, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _plan(query: tuple[int, ...], cache: tuple[int, ...], window: int) -> Plan:
    batch, count, heads, dim = query
    groups = cache[1]
    slots = cache[3]
    tiles = pl.cdiv(heads // groups * count, TILE)
    blocks = pl.cdiv(tiles, WARPGROUPS)
    # Each part has two blocks at least: below that its fixed costs outweigh them.
    parts = min(pl.cdiv(PLACES, batch * groups * blocks), pl.cdiv(slots, 2 * BLOCK))
    return Plan(pl.cdiv(tiles, blocks), blocks, parts, pl.cdiv(window, BLOCK), dim**-0.5 * LOG2_E)


def _pad_to(x: Array, axis: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - x.shape[axis] if at == axis else 0) for at in range(x.ndim)])


def _pad(x: Array, axis: int, unit: int) -> Array:
    return _pad_to(x, axis, pl.cdiv(x.shape[axis], unit) * unit)


def _merge(out: Array, top: Array, total: Array) -> Array:
    """Parts' weighted sums [S, B, G, R, D], maxima (powers of two) and sums [S, B, G, R] -> [B, G,
    R, D].
    """
    weight = jnp.exp2(top - jnp.max(top, axis=0))
    total = jnp.sum(total * weight, axis=0)[..., None]
    return jnp.sum(out * weight[..., None], axis=0) / jnp.where(total > 0, total, 1.0)


class Scratch(NamedTuple):
    """Shared memory of a thread block and its barriers; A is its warpgroups, S the stages."""

    query: Any  # [A, TILE, D]
    key: Any  # [S, D, BLOCK]
    value: Any  # [S, BLOCK, D]
    # [A, TILE, W]: the window's mask, then weights on their way from registers to the matrix unit
    weight: Any
    asked: Any  # [A]: a warpgroup's queries and mask are here
    loaded: Any  # [S]: keys and values are here
    consumed: Any  # [S]: every warpgroup has read them
    cleared: Any  # what lies behind the length is zeros


class Work(NamedTuple):
    """What a thread block has to do: so many blocks of the window, then the cache from block
    `first` on.
    """

    windows: Array
    first: Array
    steps: Array
    length: Array


def _kernel(plan: Plan, query: tuple[int, ...], interpret: bool) -> Callable:
    """The kernel for query [B, G, R, D]; gives what `_merge` takes."""
    batch, groups, _, dim = query
    sums = jax.ShapeDtypeStruct((plan.parts, *query[:3]), jnp.float32)
    return plgpu.kernel(
        functools.partial(_attend, plan),
        out_type=(jax.ShapeDtypeStruct((*sums.shape, dim), jnp.float32), sums, sums),
        grid=(
            plan.tiles,
            plan.parts,
            groups,
            batch,
        ),  # what shares keys and values runs side by side
        grid_names=("tile", "part", "group", "row"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=Scratch(
            query=smem(plan.warpgroups, TILE, dim),
            key=smem(STAGES, dim, BLOCK),
            value=smem(STAGES, BLOCK, dim),
            weight=smem(plan.warpgroups, TILE, plan.windows * BLOCK),
            asked=plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=STAGES),
            cleared=plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(interpret),
    )


def _attend(
    plan, length, query, cache_k, cache_v, window_k, window_v, mask, out, top, total, *scratch
):
    """One warpgroup: its `TILE` query rows over one part of one row's context."""
    scratch = Scratch(*scratch)
    row, group, part, me = (lax.axis_index(name) for name in ("row", "group", "part", "warpgroup"))
    rows = pl.ds((lax.axis_index("tile") * plan.warpgroups + me) * TILE, TILE)
    plgpu.copy_gmem_to_smem(query.at[row, group, rows], scratch.query.at[me], scratch.asked.at[me])
    plgpu.copy_gmem_to_smem(mask.at[row, rows], scratch.weight.at[me], scratch.asked.at[me])
    work = _work(plan, length[row], part)
    window = window_k.at[row, group], window_v.at[row, group]
    cache = cache_k.at[row, group], cache_v.at[row, group]
    fetch = functools.partial(_fetch, work, window, cache, scratch)

    @pl.when(me == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(work.steps, STAGES), lambda step, _: fetch(step), None)

    def visit(step, carry, seen: Callable):
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(scratch.loaded.at[slot])
        pl.when(me == 0)(lambda: _refill(work, scratch, fetch, step))
        carry = _online(plan, scratch, me, slot, seen(step), carry)
        plgpu.barrier_arrive(scratch.consumed.at[slot])
        return carry

    plgpu.barrier_wait(scratch.asked.at[me])
    in_window = functools.partial(
        visit, seen=functools.partial(_window_seen, scratch.weight.at[me])
    )
    in_cache = functools.partial(visit, seen=functools.partial(_cache_seen, work, scratch, me))
    carry = lax.fori_loop(0, work.windows, in_window, _nothing(query.shape[-1]))
    carry = lax.fori_loop(work.windows, work.steps, in_cache, carry)
    for ref, result in zip((out, top, total), carry, strict=True):
        ref[part, row, group, rows] = result


def _work(plan: Plan, length: Array, part: Array) -> Work:
    blocks = pl.cdiv(length, BLOCK)
    share = pl.cdiv(blocks, plan.parts)
    cached = jnp.clip(blocks - part * share, 0, share)
    # The window goes to the last part, whose share is the smallest.
    windows = jnp.where(part == plan.parts - 1, plan.windows, 0)
    return Work(windows, part * share, windows + cached, length)


def _fetch(work: Work, window: tuple, cache: tuple, scratch: Scratch, step: Array) -> None:
    """Start the copies of one step's keys [D, BLOCK] and values [BLOCK, D] into its slot."""
    slot = lax.rem(step, STAGES)

    def copy(source: tuple, block: Array) -> None:
        (key, value) = source
        at = pl.ds(block * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(key.at[:, at], scratch.key.at[slot], scratch.loaded.at[slot])
        plgpu.copy_gmem_to_smem(value.at[at], scratch.value.at[slot], scratch.loaded.at[slot])

    pl.when(step < work.windows)(lambda: copy(window, step))
    pl.when(step >= work.windows)(lambda: copy(cache, work.first + step - work.windows))


def _refill(work: Work, scratch: Scratch, fetch: Callable, step: Array) -> None:
    """Fill the slot of the step before with what comes after those in flight."""
    coming = step + STAGES - 1

    @pl.when((step > 0) & (coming < work.steps))
    def _():
        plgpu.barrier_wait(scratch.consumed.at[lax.rem(coming, STAGES)])
        fetch(coming)


def _nothing(dim: int) -> tuple[Array, Array, Array]:
    """Weighted sum [TILE, D], maximum (a power of two) and sum [TILE] of no scores."""
    out = plgpu.layout_cast(jnp.zeros((TILE, dim), jnp.float32), plgpu.Layout.WGMMA)
    return out, rowwise(LOWEST), rowwise(0.0)


def _window_seen(mask, step: Array) -> Array:
    block = mask.at[:, pl.ds(step * BLOCK, BLOCK)]
    return plgpu.layout_cast(block[...], plgpu.Layout.WGMMA) > 0


def _cache_seen(work: Work, scratch: Scratch, me: Array, step: Array) -> Array:
    """Which slots of a cache block lie below the length [TILE, BLOCK]; the values of the others
    become zeros.
    """
    left = work.length - (work.first + step - work.windows) * BLOCK

    @pl.when(left < BLOCK)
    def _():
        pl.when(me == 0)(lambda: _clear(scratch, lax.rem(step, STAGES), left))
        plgpu.barrier_wait(scratch.cleared)

    return _iota((TILE, BLOCK), 1) < left


def _clear(scratch: Scratch, slot: Array, left: Array) -> None:
    """For all warpgroups: what lies behind the length may be NaN, which a weight of zero would not
    undo.
    """
    value = scratch.value.at[slot]
    kept = _iota(value.shape, 0) < left
    value[...] = jnp.where(kept, plgpu.layout_cast(value[...], plgpu.Layout.WGMMA), jnp.bfloat16(0))
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.cleared)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _online(
    plan: Plan, scratch: Scratch, me: Array, slot: Array, seen: Array, carry
) -> tuple[Array, Array, Array]:
    """Add the keys and values of a slot, where `seen` [TILE, BLOCK], to the running (sum, maximum,
    total).
    """
    out, top, total = carry
    scores = _product((TILE, BLOCK), scratch.query.at[me], scratch.key.at[slot])
    scores = jnp.where(seen, scores * plan.scale, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - across(higher, scores.shape))
    fade = jnp.exp2(top - higher)
    weight = scratch.weight.at[me, :, pl.ds(0, BLOCK)]
    weight[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    out = out * across(fade, out.shape)
    out = out + _product(out.shape, weight, scratch.value.at[slot])
    return out, higher, total * fade + jnp.sum(weights, axis=1)


def _product(shape: tuple[int, int], left, right) -> Array:
    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
