"""Rows with their caches from one slice to another: `pack_rows`, `send` or `send_to_process`, `unpack_rows`. All of
a row goes together.

Only the part of the caches that holds something travels, rounded up to a width of its own programs.
Each device flattens what it has of the rows to a few pieces, as each takes a while to send, however
small; the device in its place on the other slice parts them again. Nothing is computed again, and
no row that stays is touched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.mesh import AXES, ROW_AXES, pin_rows, row_shardings
from rlhf_jax.types import Array, Cache, DecodeState

NARROWEST = 64  # token slots of a parcel: this many, or twice, four times ... as many
# bytes of a row in a piece, but for larger leaves: much fresh memory at once is slow on a CPU
PIECE = 1 << 22
# of a piece: it is repeated over the devices that rows lie on
PLACE = PartitionSpec("slices", "tensor")


@struct.dataclass
class RowPacket:
    """Rows that travel."""

    # [1, n] each: leaves of one dtype, one after the other; int32 for all that are no floats
    pieces: tuple[Array, ...]
    slots: int = struct.field(pytree_node=False)  # token slots of each row


def width(tokens: int, slots: int) -> int:
    """Token slots of a parcel whose longest row has so many tokens."""
    return min(max(NARROWEST, 1 << (tokens - 1).bit_length()), slots)


def bytes_of(packet: RowPacket) -> int:
    """What travels."""
    return sum(piece.nbytes for piece in packet.pieces)


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def pack_rows(state: DecodeState, rows: Array, slots: int, mesh: Mesh | None = None) -> RowPacket:
    """Rows [R] of a state, cut to `slots` token slots.

    The rows may lie on any of the slice's devices: each gives its own, and a sum gathers R rows and
    no more.
    """

    def give(held: DecodeState) -> tuple[Array, ...]:
        own = _own(rows, held, state)
        leaves = jax.tree.leaves(_cut(held, slots))
        pieces = tuple(
            _joined([_picked(leaves[one], own) for one in shared]) for shared in _shares(leaves)
        )
        return pieces if own is rows else jax.lax.psum(pieces, ROW_AXES)

    if mesh is None:
        return RowPacket(give(state), slots)
    return RowPacket(
        _on_each(give, mesh=mesh, in_specs=(_specs(state, mesh),), out_specs=PLACE)(state), slots
    )


def unpack_rows(
    state: DecodeState, packet: RowPacket, rows: Array, mesh: Mesh | None = None
) -> DecodeState:
    """`state` with the parcel in its rows [R]. `state` is donated."""
    return _put(state, packet, rows, _begins(state, packet.slots, mesh), mesh)


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def _begins(state: DecodeState, slots: int, mesh: Mesh | None) -> list[list[Array]]:
    """[] int32, where in its piece a row of each leaf begins: as data, so that one kernel does for
    all leaves alike.
    """

    def find(held: DecodeState) -> list[list[Array]]:
        leaves = jax.tree.leaves(_cut(held, slots))
        sizes = [[math.prod(leaves[one].shape[1:]) for one in shared] for shared in _shares(leaves)]
        return [list(map(jnp.int32, np.cumsum([0, *each[:-1]]))) for each in sizes]

    if mesh is None:
        return find(state)
    return _on_each(find, mesh=mesh, in_specs=(_specs(state, mesh),), out_specs=PartitionSpec())(
        state
    )


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _put(
    state: DecodeState, packet: RowPacket, rows: Array, begins: list[list[Array]], mesh: Mesh | None
) -> DecodeState:
    def put(held: DecodeState, pieces: tuple[Array, ...], begins: list[list[Array]]) -> DecodeState:
        own = _own(rows, held, state)
        cut = jax.tree.leaves(_cut(held, packet.slots))
        leaves, kind = jax.tree.flatten(held)
        for piece, places, shared in zip(pieces, begins, _shares(cut), strict=True):
            for one, begin in zip(shared, places, strict=True):
                shape = (len(rows), *cut[one].shape[1:])
                new = jax.lax.dynamic_slice(piece[0], (len(rows) * begin,), (math.prod(shape),))
                leaves[one] = _written(leaves[one], new.reshape(shape), own)
        return jax.tree.unflatten(kind, leaves)

    if mesh is None:
        return put(state, packet.pieces, begins)
    specs = _specs(state, mesh)
    place = _on_each(put, mesh=mesh, in_specs=(specs, PLACE, PartitionSpec()), out_specs=specs)
    return pin_rows(place(state, packet.pieces, begins), mesh)


# Unchecked: what is not split, in a state or a parcel, all devices that have it find to be the
# same.
_on_each = functools.partial(jax.shard_map, check_vma=False)


def _specs(state: DecodeState, mesh: Mesh) -> Any:
    return jax.tree.map(lambda place: place.spec, row_shardings(state, mesh))


def _own(rows: Array, held: DecodeState, state: DecodeState) -> Array:
    """Where rows of a state lie in what a device holds of it: past its end, those of other
    devices.
    """
    count = len(held.done)
    if count == len(state.done):
        return rows
    place = rows - jax.lax.axis_index(ROW_AXES) * count
    return jnp.where((place >= 0) & (place < count), place, count)


def _cut(state: DecodeState, slots: int) -> DecodeState:
    def cut(cache: Cache) -> Cache:
        return tuple((key[..., :slots], value[:, :, :slots]) for key, value in cache)

    draft = state.draft and dataclasses.replace(state.draft, cache=cut(state.draft.cache))
    return dataclasses.replace(
        state, tokens=state.tokens[:, :slots], cache=cut(state.cache), draft=draft
    )


def _shares(leaves: Sequence[Array]) -> list[list[int]]:
    """Which leaves share a piece, by their number."""
    found: dict[Any, list[list[int]]] = {}
    for one, leaf in enumerate(leaves):
        pieces = found.setdefault(_word(leaf), [[]])
        if sum(_bytes_of_row(leaves[other]) for other in pieces[-1]) + _bytes_of_row(leaf) > PIECE:
            pieces.append([])
        pieces[-1].append(one)
    return [piece for pieces in found.values() for piece in pieces if piece]


def _word(leaf: Array) -> Any:
    """The dtype that a leaf travels as."""
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.dtype(jnp.int32)


def _bytes_of_row(leaf: Array) -> int:
    return math.prod(leaf.shape[1:]) * _word(leaf).itemsize


def _picked(leaf: Array, rows: Array) -> Array:
    """Rows [R, ...], zeros for those past the end."""
    found = jnp.concatenate([jax.lax.dynamic_slice_in_dim(leaf, row, 1) for row in rows])
    return jnp.where(
        jnp.expand_dims(rows < len(leaf), range(1, leaf.ndim)), found, jnp.zeros((), leaf.dtype)
    )


def _joined(leaves: list[Array]) -> Array:
    """[1, n], all that each has, as one dtype."""
    return jnp.concatenate([leaf.astype(_word(leaf)).ravel() for leaf in leaves])[None]


def _written(old: Array, new: Array, rows: Array) -> Array:
    place = (rows, *(slice(0, size) for size in new.shape[1:]))
    return old.at[place].set(new.astype(old.dtype), mode="drop")


def send(packet: RowPacket, mesh: Mesh | None) -> RowPacket:
    """The parcel on another slice of this process."""
    return packet if mesh is None else jax.device_put(packet, NamedSharding(mesh, PLACE))


def send_to_process(
    packets: Sequence[RowPacket], here: Mesh, source: Mesh, target: Mesh
) -> RowPacket:
    """A parcel from one slice to another, of another process: both processes call this, in the same
    order.

    parcels: what this process has on the two slices: the one that departed, or on the target's side
    anything of its shape. Returns what lies on `here` afterwards, which has a meaning on the
    target. No other device takes part.
    """
    pair = Mesh(
        np.concatenate([source.devices, target.devices]), AXES, axis_types=source.axis_types
    )
    both = jax.tree.map(functools.partial(_on, pair), *packets)
    return jax.tree.map(functools.partial(_on, here), _passed(both, pair))


def _on(mesh: Mesh, *pieces: jax.Array) -> jax.Array:
    """[S, n], what a mesh of S slices holds of some pieces: no copy."""
    devices = set(mesh.devices.flat)
    shape = (len(mesh.devices), *pieces[0].shape[1:])
    parts = [
        shard.data
        for piece in pieces
        for shard in piece.addressable_shards
        if shard.device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PLACE), parts)


@functools.partial(jax.jit, static_argnames=("pair",))
def _passed(packets: RowPacket, pair: Mesh) -> RowPacket:
    """The first slice's pieces [2, n] on the second."""
    pass_on = functools.partial(jax.lax.ppermute, axis_name="slices", perm=[(0, 1)])
    return jax.shard_map(pass_on, mesh=pair, in_specs=PLACE, out_specs=PLACE)(packets)
