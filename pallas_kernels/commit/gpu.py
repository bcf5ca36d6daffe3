"""Commit accepted tokens to the cache on Hopper (Mosaic GPU), by one call for all layers.

The cache is changed in place, and only the slots of accepted tokens are touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.arrays import Cache, check_ranks


@functools.partial(jax.jit, static_argnames="interpret")
def commit(
    cache: Cache, window: Cache, path: Array, start: Array, *, interpret: bool = False
) -> Cache:
    """Compute `reference.commit`, bit for bit, for heads of a multiple of 64.

    It works in place if the cache is donated. A thread block serves one layer, row and group. It
    moves a key's D numbers from column to column, a value's from row to row, and touches no other
    slot. Raises ValueError for other heads. `interpret` needs jax 0.12.
    """
    check_ranks([path, start, *jax.tree.leaves((cache, window))], [2, 1] + [4] * (4 * len(cache)))
    (rows, groups, dim, slots) = cache[0][0].shape
    entries = path.shape[1]
    if dim % hopper.WARPGROUP_ROWS:
        raise ValueError(
            f"A head dim of {dim} does not fit the kernel's tiles; it serves multiples of"
            f" {hopper.WARPGROUP_ROWS}."
        )
    # As in `dynamic_update_slice`: from the end if negative, and never beyond it.
    first = jnp.clip(jnp.where(start < 0, start + slots, start), 0, slots - entries)
    leaves, structure = jax.tree.flatten(cache)
    kept = [jax.new_ref(leaf) for leaf in leaves]
    run: Callable = pl.kernel(
        functools.partial(_kernel, len(cache)),
        mesh=plgpu.Mesh(grid=(groups, len(cache), rows), grid_names=("group", "layer", "row")),
        compiler_params=plgpu.CompilerParams(),
        interpret=hopper.interpretation(interpret, off=False),
        name="commit",
    )
    run(first, path, *jax.tree.leaves(window), *kept)
    return jax.tree.unflatten(structure, [jax.freeze(ref) for ref in kept])


def _kernel(layers: int, start: Ref, path: Ref, *leaves: Ref) -> None:
    """Move the accepted keys and values of one layer, row and group.

    `leaves` are the window's keys and values, layer by layer, then the cache's.
    """
    group, layer, row = (lax.axis_index(name) for name in ("group", "layer", "row"))
    for number in range(layers):
        new, old = (leaves[at : at + 2] for at in (2 * number, 2 * (layers + number)))
        pl.when(layer == number)(
            functools.partial(_move_layer, row, group, path, start[row], window=new, cache=old)
        )


def _move_layer(
    row: Array,
    group: Array,
    path: Ref,
    start: Array,
    *,
    window: tuple[Ref, ...],
    cache: tuple[Ref, ...],
) -> None:
    """Move the accepted keys [D, .] and values [., D] of one row and group."""

    def move(entry: Array, _: None) -> None:
        """Move the key and the value of one entry of the path."""
        node = path[row, entry]
        slot = start + entry
        key = hopper.load(window[0].at[row, group, :, node])
        hopper.store(cache[0].at[row, group, :, slot], key)
        value = hopper.load(window[1].at[row, group, node])
        hopper.store(cache[1].at[row, group, slot], value)

    lax.fori_loop(0, path.shape[1], move, None)
