"""Committing accepted tokens to the cache on a TPU: one call for all layers, in place, tiles around
the slots only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import LANES
from rlhf_jax.types import Array, Cache

BUFFERS = 16 * 2**20  # bytes of vector memory for the tiles and windows of as many layers as fit
VECTOR_MEMORY = 40 * 2**20  # with what the compiler wants


class Leaves(NamedTuple):
    """Keys or values of all layers, with the slots in lanes (axis 3) or in rows (axis 2)."""

    cache: tuple[Any, ...]  # [B, G, D, T] or [B, G, T, D]
    window: tuple[
        Any, ...
    ]  # [B, G, W, D]: a few tokens fill the rows of a tile better than its lanes


class Buffers(NamedTuple):
    """Vector memory of one row's tiles in C layers, and semaphores of what has come and what has
    gone.

    As allocated each has a leading 2, for even and odd rows.
    """

    tiles: Any  # [C, tiles, G, D, LANES] or [C, tiles, G, unit, D]
    window: Any  # [C, G, W, D]
    come: Any  # []
    gone: Any  # []


def commit(
    cache: Cache, window: Cache, path: Array, start: Array, *, interpret: Any = False
) -> Cache:
    """`reference.commit`, equal to the bit but for signalling NaNs, of bfloat16 (D even) or
    float32.

    The window has at most 128 tokens. Of each row it reads and writes the tiles that hold the J
    slots, of keys 128 slots and of values 32 bytes' worth, while the next row is on its way. In
    place where the cache is donated and T is a multiple of 128: any other cache is padded, a copy
    that XLA's layout of such an array would cost as well. Raises ValueError for a window that is
    too wide. `interpret` (True, or the parameters of Pallas' TPU interpreter) runs it on any
    hardware, slowly.
    """
    chex.assert_rank(
        [path, start, *jax.tree.leaves((cache, window))], [2, 1] + [4] * (4 * len(cache))
    )
    dim, slots, width = *cache[0][0].shape[2:], window[0][0].shape[3]
    if width > LANES:
        raise ValueError(
            f"The window has {width} tokens; this kernel gathers from at most {LANES}."
        )
    # As `dynamic_update_slice` has it: from the end if negative, and never beyond it.
    first = jnp.clip(jnp.where(start < 0, start + slots, start), 0, slots - path.shape[1])
    slack = -slots % LANES
    if slack:
        padded = tuple((_pad(key, 3, slack), _pad(value, 2, slack)) for key, value in cache)
        done = commit(padded, window, path, first, interpret=interpret)
        return tuple((key[..., :slots], value[:, :, :slots]) for key, value in done)
    (keys, values), (new_keys, new_values) = (zip(*of, strict=True) for of in (cache, window))
    new_keys = tuple(leaf.swapaxes(2, 3) for leaf in new_keys)
    if dim % LANES == 0:
        done = _commit_leaves(
            Leaves(keys, new_keys), Leaves(values, new_values), path, first, interpret
        )
        return tuple(zip(*done, strict=True))
    # XLA lays values narrower than a tile out with the slots last: there they are moved as keys
    # are.
    turned = tuple(leaf.swapaxes(2, 3) for leaf in values)
    both = Leaves(keys + turned, new_keys + new_values)
    done, _ = _commit_leaves(both, Leaves((), ()), path, first, interpret)
    return tuple(
        (key, value.swapaxes(2, 3))
        for key, value in zip(done[: len(cache)], done[len(cache) :], strict=True)
    )


def _pad(x: Array, axis: int, count: int) -> Array:
    return jnp.pad(x, [(0, count if at == axis else 0) for at in range(x.ndim)])


def _commit_leaves(lanes: Leaves, rows: Leaves, path: Array, start: Array, interpret: Any):
    """The cache leaves of both kinds after the call, for starts inside and T a multiple of
    LANES.
    """
    cache = (lanes.cache, rows.cache)
    window = (lanes.window, rows.window)
    anywhere = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), (cache, window))
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(_cores(start),), in_specs=anywhere, out_specs=anywhere[0]
        ),
        # Where it may choose, XLA brings a whole leaf into vector memory for the call, and back.
        out_shape=jax.tree.map(lambda leaf: pltpu.HBM(leaf.shape, leaf.dtype), cache),
        input_output_aliases={2 + leaf: leaf for leaf in range(len(jax.tree.leaves(cache)))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VECTOR_MEMORY
        ),
        cost_estimate=_cost(lanes, rows, path.shape[1]),
        interpret=interpret,
        name="commit",
    )(start, path, cache, window)


def _cores(start) -> int:
    """Rows are halved where that gives the two cores of a chip the same work."""
    return 2 if start.shape[0] % 2 == 0 else 1


def _cost(lanes: Leaves, rows: Leaves, entries: int) -> pl.CostEstimate:
    """Bytes moved: tiles both ways, as many as J slots touch on average, and the window."""
    total = 0
    for axis, leaves in ((3, lanes), (2, rows)):
        for cache, window in zip(*leaves, strict=True):
            touched = _unit(axis, cache.dtype) + entries - 1
            total += (
                2 * touched * cache.size // cache.shape[axis] + window.size
            ) * cache.dtype.itemsize
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=total)


def _unit(axis: int, dtype) -> int:
    """Slots of a tile."""
    return LANES if axis == 3 else 32 // dtype.itemsize


def _kernel(start, path, _, window, lane_cache, row_cache) -> None:
    # Asked for out here: in the scopes and loops below, Pallas' plain interpreter does not know it.
    first = pl.program_id(0) * (start.shape[0] // _cores(start))
    for axis, *leaves in ((3, lane_cache, window[0]), (2, row_cache, window[1])):
        if leaves[0]:
            _commit_axis(axis, Leaves(*leaves), first, start, path)


def _commit_axis(axis: int, leaves: Leaves, first, start, path) -> None:
    """As many leaves as fit, then the next ones."""
    (cache, *_), (window, *_), entries = *leaves, path.shape[1]
    unit = _unit(axis, cache.dtype)
    tile = [unit if at == axis else size for at, size in enumerate(cache.shape)]
    shapes = ((pl.cdiv(entries + unit - 1, unit), *tile[1:]), window.shape[1:])
    dtype = cache.dtype
    fitting = max(1, BUFFERS // (2 * sum(_padded_bytes(shape, dtype.itemsize) for shape in shapes)))
    for low in range(0, len(leaves.cache), fitting):
        part = Leaves(*(leaf[low : low + fitting] for leaf in leaves))
        buffers = [pltpu.VMEM((2, len(part.cache), *shape), dtype) for shape in shapes]
        semaphores = [pltpu.SemaphoreType.DMA((2,))] * 2
        # With the others: in a loop, Pallas' plain interpreter of jax 0.12 knows no scope of its
        # own.
        wide = [pltpu.VMEM(shape, jnp.float32) for shape in shapes] if axis == 2 else []
        pl.run_scoped(
            functools.partial(_commit_rows, axis, part, first, start, path),
            *buffers,
            *semaphores,
            *wide,
        )


def _padded_bytes(shape: tuple[int, ...], size: int) -> int:
    """What an array takes in vector memory: whole tiles."""
    *outer, rows, lanes = shape
    return math.prod(outer) * pl.cdiv(rows * size, 32) * 32 * pl.cdiv(lanes, LANES) * LANES


def _commit_rows(
    axis: int, leaves: Leaves, first, start, path, tiles, window, come, gone, *wide
) -> None:
    """Row `step` begins to fill the buffers that row `step - 2` has left, row `step - 1` is changed
    meanwhile.
    """
    count = start.shape[0] // _cores(start)
    buffers = Buffers(tiles, window, come, gone)

    def at(place):
        row = first + place
        mine = Buffers(*(both.at[jax.lax.rem(place, 2)] for both in buffers))
        tiles = list(_tiles(axis, leaves.cache, mine.tiles, row, start[row], path.shape[1]))
        windows = [
            (True, leaf.at[row], mine.window.at[layer]) for layer, leaf in enumerate(leaves.window)
        ]
        return row, mine, tiles, windows

    def run(step, _):
        @pl.when(step >= 2)
        def free():
            _, mine, tiles, _ = at(step - 2)
            for needed, memory, buffer in tiles:
                pl.when(needed)(pltpu.make_async_copy(buffer, memory, mine.gone).wait)

        @pl.when(step < count)
        def fetch():
            _, mine, tiles, windows = at(step)
            for needed, memory, buffer in tiles + windows:
                pl.when(needed)(pltpu.make_async_copy(memory, buffer, mine.come).start)

        @pl.when((step >= 1) & (step <= count))
        def change():
            row, mine, tiles, windows = at(step - 1)
            for needed, memory, buffer in tiles + windows:
                pl.when(needed)(pltpu.make_async_copy(memory, buffer, mine.come).wait)
            (_change_lanes if axis == 3 else _change_rows)(mine, row, start[row], path, *wide)
            for needed, memory, buffer in tiles:
                pl.when(needed)(pltpu.make_async_copy(buffer, memory, mine.gone).start)

    jax.lax.fori_loop(0, count + 2, run, None)


def _tiles(axis: int, cache, buffer, row, start, entries: int) -> Iterator[tuple]:
    """Of each tile: whether it holds one of the J slots, the tile in memory, the tile in the
    buffer.
    """
    unit = _unit(axis, buffer.dtype)
    for tile in range(buffer.shape[1]):
        first = _aligned(start, unit) + tile * unit
        index: list[Any] = [row, slice(None), slice(None), slice(None)]
        index[axis] = pl.ds(first, unit)
        for layer, leaf in enumerate(cache):
            yield (
                tile == 0 or first < start + entries,
                leaf.at[tuple(index)],
                buffer.at[layer, tile],
            )


def _aligned(slot, unit: int):
    return pl.multiple_of(jax.lax.div(slot, unit) * unit, unit)


def _change_lanes(mine: Buffers, row, start, path) -> None:
    """A gather along lanes: no value, NaN or other, touches another."""
    (layers, tiles, groups) = mine.tiles.shape[:3]
    entries = path.shape[1]
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    for tile in range(tiles):
        first = _aligned(start, LANES) + tile * LANES
        entry = first + lanes - start
        node = jnp.zeros_like(lanes)
        for step in range(entries):
            node = jnp.where(entry == step, path[row, step], node)

        def change(layer, _, tile=tile, entry=entry, node=node):
            fresh = (entry >= 0) & (entry < entries)
            for group in range(groups):
                columns = _columns(mine.window[layer, group])
                taken = jnp.take_along_axis(columns, jnp.broadcast_to(node, columns.shape), axis=1)
                new = jnp.where(
                    fresh, taken, pltpu.bitcast(mine.tiles[layer, tile, group], jnp.uint32)
                )
                mine.tiles[layer, tile, group] = pltpu.bitcast(new, mine.tiles.dtype)

        @pl.when(tile == 0 or first < start + entries)
        def _(change=change):
            jax.lax.fori_loop(0, layers, change, None)


def _columns(x: Array) -> Array:
    """x [W, D], tokens in lanes, as words [D / 2, LANES] of two bfloat16: of words alone lanes can
    be chosen.
    """
    return pltpu.bitcast(jnp.pad(x, ((0, LANES - x.shape[0]), (0, 0))).T, jnp.uint32)


def _change_rows(mine: Buffers, row, start, path, wide_tiles, wide_window) -> None:
    """Entry by entry, in 32 bits, of which alone single rows can be addressed, and back: exact."""
    unit = mine.tiles.shape[3]
    place = start - _aligned(start, unit)

    def change(layer, _):
        wide_tiles[...] = mine.tiles[layer].astype(jnp.float32)
        wide_window[...] = mine.window[layer].astype(jnp.float32)
        for step in range(path.shape[1]):
            tile = jax.lax.div(place + step, unit)
            at = jax.lax.rem(place + step, unit)
            wide_tiles[tile, :, pl.ds(at, 1), :] = wide_window[:, pl.ds(path[row, step], 1), :]
        mine.tiles[layer] = wide_tiles[...].astype(mine.tiles.dtype)

    jax.lax.fori_loop(0, mine.tiles.shape[0], change, None)
