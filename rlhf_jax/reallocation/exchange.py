"""Rows with their caches from one slice to another: `depart`, `send` or `across`, `arrive`. All of a row goes together.

Only the part of the caches that holds something travels, rounded up to a width of its own programs. Nothing is
computed again, and no row that stays is touched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.mesh import AXES, ROW_AXES, fitting, pin_rows, row_shards, row_spec
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
    parcel = jax.tree.map(lambda leaf: _pick(leaf, rows, mesh), cut)
    return parcel if mesh is None else jax.lax.with_sharding_constraint(parcel, _places(parcel, mesh))


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


def _parcel_spec(leaf: Array, mesh: Mesh) -> PartitionSpec:
    """Where a parcel lies on a slice: whole rows, caches over tensor as the state's."""
    return PartitionSpec(None, *fitting(row_spec(leaf.ndim), leaf.shape, mesh)[1:])


def _places(parcel: DecodeState, mesh: Mesh) -> DecodeState:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _parcel_spec(leaf, mesh)), parcel)


def send(parcel: DecodeState, mesh: Mesh | None) -> DecodeState:
    """The parcel on another slice of this process."""
    return parcel if mesh is None else jax.device_put(parcel, _places(parcel, mesh))


def across(parcels: Sequence[DecodeState], here: Mesh, source: Mesh, target: Mesh) -> DecodeState:
    """A parcel from one slice to another, of another process: both processes call this, in the same order.

    parcels: what this process has on the two slices: the one that departed, or on the target's side anything of its
    shape. Returns what lies on `here` afterwards, which has a meaning on the target. No other device takes part.
    """
    pair = Mesh(np.concatenate([source.devices, target.devices]), AXES, axis_types=source.axis_types)
    both = jax.tree.map(functools.partial(_on_pair, pair), *parcels)
    return jax.tree.map(functools.partial(_part_of, here), _passed(both, pair))


def _on_pair(pair: Mesh, *leaves: jax.Array) -> jax.Array:
    """[2 R, ...], a slice's part each: no copy."""
    shape, sharding = leaves[0].shape, NamedSharding(pair, _pair_spec(leaves[0], pair))
    parts = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays((2 * shape[0], *shape[1:]), sharding, parts)


def _pair_spec(leaf: Array, pair: Mesh) -> PartitionSpec:
    return PartitionSpec("slices", *_parcel_spec(leaf, pair)[1:])


@functools.partial(jax.jit, static_argnames=("pair",), donate_argnames=("parcels",))
def _passed(parcels: DecodeState, pair: Mesh) -> DecodeState:
    """The first slice's parcels [2 R, ...] on the second: leaves alike in one piece, as each piece waits for both."""
    leaves, kind = jax.tree.flatten(parcels)
    specs = [_pair_spec(leaf, pair) for leaf in leaves]
    alike: dict[Any, list[int]] = {}
    for place, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        alike.setdefault((leaf.dtype, frozenset(spec) - {None}), []).append(place)

    def pass_on(*parts: Array) -> tuple[Array, ...]:
        found = list(parts)
        for places in alike.values():
            piece = jnp.concatenate([parts[place].ravel() for place in places])
            piece = jax.lax.ppermute(piece, axis_name="slices", perm=[(0, 1)])
            ends = np.cumsum([parts[place].size for place in places])
            for place, end in zip(places, ends.tolist(), strict=True):
                found[place] = piece[end - parts[place].size : end].reshape(parts[place].shape)
        return tuple(found)

    passed = jax.shard_map(pass_on, mesh=pair, in_specs=tuple(specs), out_specs=tuple(specs))(*leaves)
    return jax.tree.unflatten(kind, passed)


def _part_of(here: Mesh, leaf: jax.Array) -> jax.Array:
    devices, shape = set(here.devices.flat), (leaf.shape[0] // 2, *leaf.shape[1:])
    parts = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
    parts = parts if leaf.size else [part[: shape[0]] for part in parts]  # of nothing each device has the whole
    place = NamedSharding(here, _parcel_spec(jax.ShapeDtypeStruct(shape, leaf.dtype), here))
    return jax.make_array_from_single_device_arrays(shape, place, parts)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def arrive(state: DecodeState, parcel: DecodeState, rows: Array, mesh: Mesh | None = None) -> DecodeState:
    """`state` with the parcel in its rows [R]. `state` is donated."""

    def write(old: Array, new: Array) -> Array:
        place = (rows, *(slice(0, size) for size in new.shape[1:]))
        return old.at[place].set(new)

    return pin_rows(jax.tree.map(write, state, parcel), mesh)
