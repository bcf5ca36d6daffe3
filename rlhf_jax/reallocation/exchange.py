"""Rows with their caches from one slice to another: `depart`, `send`, `arrive`. All leaves of a row go together.

Only the part of the caches that holds something travels, rounded up to a width of its own programs. Nothing is
computed again, and no row that stays is touched.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rlhf_jax.mesh import ROW_AXES, fitting, pin_rows, row_shardings, row_shards, row_spec
from rlhf_jax.types import Array, Cache, DecodeState

NARROWEST = 64  # token slots of a parcel: this many, or twice, four times ... as many


def width(tokens: int, slots: int) -> int:
    """Token slots of a parcel whose longest row has so many tokens."""
    return min(max(NARROWEST, 1 << (tokens - 1).bit_length()), slots)


def bytes_of(parcel: DecodeState) -> int:
    """What travels."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parcel))


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def depart(state: DecodeState, rows: Array, slots: int, mesh: Mesh | None = None) -> DecodeState:
    """Rows [R] of a state, cut to `slots` token slots.

    The rows may lie on any of the slice's devices: each gives its own, and a sum gathers R rows and no more.
    """
    cut = dataclasses.replace(
        state,
        tokens=state.tokens[:, :slots],
        cache=_cut(state.cache, slots),
        draft=state.draft and dataclasses.replace(state.draft, cache=_cut(state.draft.cache, slots)),
    )
    return jax.tree.map(lambda leaf: _pick(leaf, rows, mesh), cut)


def _cut(cache: Cache, slots: int) -> Cache:
    return tuple((key[..., :slots], value[:, :, :slots]) for key, value in cache)


def _pick(leaf: Array, rows: Array, mesh: Mesh | None) -> Array:
    if mesh is None or row_shards(mesh) == 1 or len(leaf) % row_shards(mesh):
        return jnp.take(leaf, rows, axis=0, mode="clip")
    spec = fitting(row_spec(leaf.ndim), leaf.shape, mesh)

    def own(part: Array) -> Array:
        place = rows - jax.lax.axis_index(ROW_AXES) * len(part)
        here = ((place >= 0) & (place < len(part))).reshape(-1, *(1,) * (part.ndim - 1))
        found = jnp.where(here, jnp.take(part, place, axis=0, mode="clip"), jnp.zeros((), part.dtype))
        summed = jax.lax.psum(found.astype(jnp.int32) if part.dtype == bool else found, ROW_AXES)
        return summed.astype(part.dtype)

    return jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(None, *spec[1:]))(leaf)


def send(parcel: DecodeState, mesh: Mesh | None) -> DecodeState:
    """The parcel on another slice of this process."""
    return parcel if mesh is None else jax.device_put(parcel, row_shardings(parcel, mesh))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def arrive(state: DecodeState, parcel: DecodeState, rows: Array, mesh: Mesh | None = None) -> DecodeState:
    """`state` with the parcel in its rows [R]. `state` is donated."""

    def write(old: Array, new: Array) -> Array:
        place = (rows, *(slice(0, size) for size in new.shape[1:]))
        return old.at[place].set(new)

    return pin_rows(jax.tree.map(write, state, parcel), mesh)
