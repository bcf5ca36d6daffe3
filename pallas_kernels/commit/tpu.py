"""Commit accepted tokens to the cache on a TPU, by one call for all layers.

The cache is changed in place, and only tiles around the slots of accepted tokens are moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import Cache, check_ranks
from pallas_kernels.shapes import LANES

# Vector memory for tiles and windows, in bytes; it bounds the layers processed at a time.
BUFFER_BYTES = 16 * 2**20
# The kernel's limit of vector memory in bytes, including the compiler's needs.
COMMIT_VMEM_BYTES = 40 * 2**20


class Leaves(NamedTuple):
    """Hold keys or values of all layers, with the axis of their slots; arrays or references."""

    axis: int  # 3: the slots are in lanes; 2: in rows
    cache: tuple[Any, ...]  # [B, G, D, T] or [B, G, T, D]
    # [B, G, W, D]: a few tokens fill the rows of a tile better than its lanes
    window: tuple[Any, ...]

    @property
    def unit(self) -> int:
        """Return the slots of a tile, which is 32 bytes high if they are in rows."""
        return LANES if self.axis == 3 else 32 // self.cache[0].dtype.itemsize


class Buffers(NamedTuple):
    """Hold vector memory of one row's tiles in C layers, and semaphores of its copies.

    As allocated each has a leading 2, for even and odd rows.
    """

    tiles: Ref  # [C, tiles, G, D, LANES] or [C, tiles, G, unit, D]
    window: Ref  # [C, G, W, D]
    incoming: Ref  # []
    outgoing: Ref  # []


def commit(
    cache: Cache, window: Cache, path: Array, start: Array, *, interpret: Any = False
) -> Cache:
    """Write window entries path [B, J] int32 of every layer to slots start [B] int32 onwards.

    It equals `reference.commit` of bfloat16 (D even) or float32, bit for bit, except for signalling
    NaNs. Per layer the cache is k [B, G, D, T] and v [B, G, T, D], the window k [B, G, D, W] and
    v [B, G, W, D], with W at most 128: ValueError for more. Of each row it reads and writes the
    tiles that hold its J slots, of keys 128 slots and of values 32 bytes' worth, while the next row
    is in transfer. It works in place if the cache is donated and T is a multiple of 128: any other
    cache is padded, a copy that XLA's layout of such an array would cost as well. `interpret`
    (True, or the parameters of Pallas' TPU interpreter) runs it on any hardware, slowly.
    """
    check_ranks([path, start, *jax.tree.leaves((cache, window))], [2, 1] + [4] * (4 * len(cache)))
    dim, slots = cache[0][0].shape[2:]
    tokens = window[0][0].shape[3]
    if tokens > LANES:
        raise ValueError(
            f"The window has {tokens} tokens; this kernel gathers from at most {LANES}."
        )
    # As in `dynamic_update_slice`: from the end if negative, and never beyond it.
    first = jnp.clip(jnp.where(start < 0, start + slots, start), 0, slots - path.shape[1])
    padding = -slots % LANES
    if padding:
        of_keys = ((0, 0), (0, 0), (0, 0), (0, padding))
        of_values = ((0, 0), (0, 0), (0, padding), (0, 0))
        padded = tuple((jnp.pad(key, of_keys), jnp.pad(value, of_values)) for key, value in cache)
        done = commit(padded, window, path, first, interpret=interpret)
        return tuple((key[..., :slots], value[:, :, :slots]) for key, value in done)

    (keys, values), (new_keys, new_values) = (zip(*of, strict=True) for of in (cache, window))
    new_keys = tuple(leaf.swapaxes(2, 3) for leaf in new_keys)  # as `Leaves.window`
    if dim % LANES == 0:
        lanes = Leaves(3, keys, new_keys)
        rows = Leaves(2, values, new_values)
        done = _commit_leaves(lanes, rows, path, start=first, interpret=interpret)
        return tuple(zip(*done, strict=True))
    # XLA lays out values narrower than a tile with the slots last: they are then moved like keys.
    values_as_keys = tuple(leaf.swapaxes(2, 3) for leaf in values)
    both = Leaves(3, keys + values_as_keys, new_keys + new_values)
    done, _ = _commit_leaves(both, Leaves(2, (), ()), path, start=first, interpret=interpret)
    return tuple(
        (key, value.swapaxes(2, 3))
        for key, value in zip(done[: len(cache)], done[len(cache) :], strict=True)
    )


def _commit_leaves(
    lanes: Leaves, rows: Leaves, path: Array, *, start: Array, interpret: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the cache leaves of both kinds after the call.

    Starts are inside, and T is a multiple of LANES.
    """
    cache = (lanes.cache, rows.cache)
    window = (lanes.window, rows.window)
    anywhere = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), (cache, window))
    # Rows are halved if that gives the two cores of a chip the same work.
    cores = 2 if start.shape[0] % 2 == 0 else 1
    # Tiles move both ways, as many as J slots touch on average, and the window comes in.
    moved = 0
    for leaves in (lanes, rows):
        for old, new in zip(leaves.cache, leaves.window, strict=True):
            touched = leaves.unit + path.shape[1] - 1
            numbers = 2 * touched * old.size // old.shape[leaves.axis] + new.size
            moved += numbers * old.dtype.itemsize

    return pl.pallas_call(
        functools.partial(_kernel, start.shape[0] // cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(cores,), in_specs=anywhere, out_specs=anywhere[0]
        ),
        # Left to choose, XLA brings a whole leaf into vector memory for the call, and back.
        out_shape=jax.tree.map(lambda leaf: pltpu.HBM(leaf.shape, leaf.dtype), cache),
        input_output_aliases={2 + leaf: leaf for leaf in range(len(jax.tree.leaves(cache)))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=COMMIT_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="commit",
    )(start, path, cache, window)


def _kernel(
    count: int,
    start: Ref,
    path: Ref,
    _: Any,
    window: tuple[tuple[Ref, ...], tuple[Ref, ...]],
    lane_cache: tuple[Ref, ...],
    row_cache: tuple[Ref, ...],
) -> None:
    """Commit `count` rows, in as many leaves at a time as fit vector memory.

    start [B] and path [B, J] int32 are in scalar memory. `_` are the input caches, whose memory the
    outputs, `lane_cache` and `row_cache`, have.
    """
    # Computed out here: Pallas' plain interpreter does not support it in the scopes and loops
    # below.
    first = pl.program_id(0) * count
    for leaves in (Leaves(3, lane_cache, window[0]), Leaves(2, row_cache, window[1])):
        if not leaves.cache:
            continue
        old = leaves.cache[0]
        new = leaves.window[0]
        unit = leaves.unit
        tile = [unit if at == leaves.axis else size for at, size in enumerate(old.shape)]
        tiles = pl.cdiv(path.shape[1] + unit - 1, unit)
        shapes = ((tiles, *tile[1:]), new.shape[1:])
        # An array takes whole tiles of 32 bytes by LANES numbers.
        taken = 0
        for *outer, height, width in shapes:
            tile_rows = pl.cdiv(height * old.dtype.itemsize, 32) * 32
            taken += math.prod(outer) * tile_rows * pl.cdiv(width, LANES) * LANES
        fitting = max(1, BUFFER_BYTES // (2 * taken))

        for low in range(0, len(leaves.cache), fitting):
            part = Leaves(leaves.axis, *(of[low : low + fitting] for of in leaves[1:]))
            layers = len(part.cache)
            buffers = [pltpu.VMEM((2, layers, *shape), old.dtype) for shape in shapes]
            semaphores = [pltpu.SemaphoreType.DMA((2,))] * 2
            # With the others: Pallas' plain interpreter of jax 0.12 has no separate scope in a
            # loop.
            wide = [pltpu.VMEM(shape, jnp.float32) for shape in shapes] if part.axis == 2 else []
            commit_rows = functools.partial(_commit_rows, part, first, count, start, path)
            pl.run_scoped(commit_rows, *buffers, *semaphores, *wide)


def _commit_rows(
    leaves: Leaves, first: Array, count: int, start: Ref, path: Ref, *refs: Ref
) -> None:
    """Commit `count` rows from `first` on, each while its neighbours are in transfer.

    Row `step` begins to fill the buffers that row `step - 2` has left, row `step - 1` is changed
    meanwhile. `refs` are the buffers and, for slots in rows, a tile and a window in 32 bits.
    """
    buffers = Buffers(*refs[:4])
    wide = refs[4:]

    def at(place: Array) -> tuple[Array, Buffers, list[tuple], list[tuple]]:
        """Return a row, its buffers, and its copies: (whether needed, memory, buffer)."""
        row = first + place
        mine = Buffers(*(both.at[lax.rem(place, 2)] for both in buffers))
        tiles = list(_tiles(leaves, mine.tiles, row, start=start[row], entries=path.shape[1]))
        windows = [
            (True, leaf.at[row], mine.window.at[layer]) for layer, leaf in enumerate(leaves.window)
        ]
        return row, mine, tiles, windows

    def run(step: Array, _: None) -> None:
        """Wait for one row's results, fetch a second row and change a third."""

        @pl.when(step >= 2)
        def free() -> None:
            """Wait until the buffers are free."""
            _, mine, tiles, _ = at(step - 2)
            for needed, memory, buffer in tiles:
                pl.when(needed)(pltpu.make_async_copy(buffer, memory, mine.outgoing).wait)

        @pl.when(step < count)
        def fetch() -> None:
            """Start filling the buffers."""
            _, mine, tiles, windows = at(step)
            for needed, memory, buffer in tiles + windows:
                pl.when(needed)(pltpu.make_async_copy(memory, buffer, mine.incoming).start)

        @pl.when((step >= 1) & (step <= count))
        def change() -> None:
            """Write the accepted entries into the tiles, and send those back."""
            row, mine, tiles, windows = at(step - 1)
            for needed, memory, buffer in tiles + windows:
                pl.when(needed)(pltpu.make_async_copy(memory, buffer, mine.incoming).wait)
            change_tiles = _change_lanes if leaves.axis == 3 else _change_rows
            change_tiles(mine, row, start[row], path, *wide)
            for needed, memory, buffer in tiles:
                pl.when(needed)(pltpu.make_async_copy(buffer, memory, mine.outgoing).start)

    lax.fori_loop(0, count + 2, run, None)


def _tiles(
    leaves: Leaves, buffer: Ref, row: Array, *, start: Array, entries: int
) -> Iterator[tuple[Any, Ref, Ref]]:
    """Yield for each tile whether it holds one of the J slots, its place in memory, its buffer."""
    unit = leaves.unit
    for tile in range(buffer.shape[1]):
        first = _aligned(start, unit) + tile * unit
        index: list[Any] = [row, slice(None), slice(None), slice(None)]
        index[leaves.axis] = pl.ds(first, unit)
        for layer, leaf in enumerate(leaves.cache):
            needed = tile == 0 or first < start + entries
            yield needed, leaf.at[tuple(index)], buffer.at[layer, tile]


def _aligned(slot: Array, unit: int) -> Array:
    """Return the first slot of the tile that contains a slot."""
    return pl.multiple_of(lax.div(slot, unit) * unit, unit)


def _change_lanes(mine: Buffers, row: Array, start: Array, path: Ref) -> None:
    """Write a row's accepted entries by a gather along lanes.

    No value, NaN or other, touches another. start []: the first slot of row `row`.
    """
    (layers, tiles, groups) = mine.tiles.shape[:3]
    entries = path.shape[1]
    lanes = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    padding = ((0, LANES - mine.window.shape[2]), (0, 0))
    for tile in range(tiles):
        first = _aligned(start, LANES) + tile * LANES
        entry = first + lanes - start
        node = jnp.zeros_like(lanes)
        for step in range(entries):
            node = jnp.where(entry == step, path[row, step], node)

        def change(
            layer: Array, _: None, tile: int = tile, entry: Array = entry, node: Array = node
        ) -> None:
            """Change one tile of one layer."""
            fresh = (entry >= 0) & (entry < entries)
            for group in range(groups):
                # Tokens in lanes, as words [D / 2, LANES] of two bfloat16, since lanes can be
                # selected only in 32-bit words.
                window = jnp.pad(mine.window[layer, group], padding).T
                columns = pltpu.bitcast(window, jnp.uint32)
                taken = jnp.take_along_axis(columns, jnp.broadcast_to(node, columns.shape), axis=1)
                old = pltpu.bitcast(mine.tiles[layer, tile, group], jnp.uint32)
                new = jnp.where(fresh, taken, old)
                mine.tiles[layer, tile, group] = pltpu.bitcast(new, mine.tiles.dtype)

        @pl.when(tile == 0 or first < start + entries)
        def change_layers(change: Callable = change) -> None:
            """Change the tile in all layers."""
            lax.fori_loop(0, layers, change, None)


def _change_rows(
    mine: Buffers, row: Array, start: Array, path: Ref, wide_tiles: Ref, wide_window: Ref
) -> None:
    """Write a row's accepted entries one by one, in 32 bits and back, which is exact.

    Of 32 bits alone single rows can be addressed.
    """
    unit = mine.tiles.shape[3]
    place = start - _aligned(start, unit)

    def change(layer: Array, _: None) -> None:
        """Change the tiles of one layer."""
        wide_tiles[...] = mine.tiles[layer].astype(jnp.float32)
        wide_window[...] = mine.window[layer].astype(jnp.float32)
        for step in range(path.shape[1]):
            tile = lax.div(place + step, unit)
            at = lax.rem(place + step, unit)
            wide_tiles[tile, :, pl.ds(at, 1), :] = wide_window[:, pl.ds(path[row, step], 1), :]
        mine.tiles[layer] = wide_tiles[...].astype(mine.tiles.dtype)

    lax.fori_loop(0, mine.tiles.shape[0], change, None)
