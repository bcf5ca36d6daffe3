"""Move rows with their caches from one slice to another.

`pack_rows` makes a packet of rows, `send` or `send_to_process` transfers it to the other slice, and
`unpack_rows` writes it into the state there. Only the used part of the caches travels, rounded up
to a bucket. Each device flattens its part of the rows into a few pieces, as each transfer has
a fixed cost; the corresponding device on the other slice splits them again. Nothing is recomputed,
and rows that stay are not touched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.cache.state import DecodeState, rows_in, rows_out
from rlhf_jax.mesh import (
    AXES,
    AXIS_TYPES,
    ONE_DEVICE,
    ROW_AXES,
    Layout,
    on_each,
    pin_rows,
    row_shardings,
)
from rlhf_jax.types import Array

# Bytes of a row in a piece, except for larger leaves: allocating much memory at once is slow on a
# CPU. Chosen by benchmarks/moves.py.
PIECE_BYTES = 1 << 22
# The cache length of a packet in tokens: this one, or twice, four times ... as much.
_SHORTEST = 64
# Sharding of a piece on a slice: repeated over the devices of the rows.
_PIECE_SPEC = PartitionSpec("slices", "tensor")


@struct.dataclass
class RowPacket:
    """Hold rows in transfer."""

    # [1, n] each: leaves of one dtype, concatenated; int32 for all but narrow floats
    pieces: tuple[jax.Array, ...]
    cache_length: int = struct.field(pytree_node=False)  # of each row, in tokens

    @property
    def nbytes(self) -> int:
        """Return the bytes to transfer."""
        return sum(piece.nbytes for piece in self.pieces)


def packet_length(tokens: int, cache_length: int) -> int:
    """Return the cache length of a packet for a longest row of this many tokens.

    cache_length: that of the state, which the packet's does not exceed.
    """
    return min(max(_SHORTEST, 1 << (tokens - 1).bit_length()), cache_length)


@functools.partial(jax.jit, static_argnames=("cache_length", "layout"))
def pack_rows(
    state: DecodeState, rows: Array, cache_length: int, layout: Layout = ONE_DEVICE
) -> RowPacket:
    """Pack rows [R] int32 of a state, cut to a length in tokens.

    The rows may be on any of the slice's devices: each contributes its own, and a sum gathers
    exactly R rows.
    """

    def give(held: DecodeState) -> tuple[jax.Array, ...]:
        own = _own(rows, held, state)
        leaves = jax.tree.leaves(rows_out(held, own, cache_length))
        pieces = []
        for shared in _shares(leaves):
            flat = [_recast(leaves[one], _sent_dtype(leaves[one])).ravel() for one in shared]
            pieces.append(jnp.concatenate(flat)[None])
        return tuple(pieces) if own is rows else jax.lax.psum(tuple(pieces), ROW_AXES)

    if layout.mesh is None:
        return RowPacket(give(state), cache_length)
    give_all = on_each(give, layout, (_specs(state, layout),), _PIECE_SPEC)
    return RowPacket(give_all(state), cache_length)


def unpack_rows(
    state: DecodeState, packet: RowPacket, rows: Array, layout: Layout = ONE_DEVICE
) -> DecodeState:
    """Return `state`, which is donated, with the packet in its rows [R] int32."""
    begins = _begins(state, packet.cache_length, layout)
    return _put(state, packet, rows, begins=begins, layout=layout)


@functools.partial(jax.jit, static_argnames=("cache_length", "layout"))
def _begins(state: DecodeState, cache_length: int, layout: Layout) -> list[list[jax.Array]]:
    """Find the start of a row of each leaf in its piece, [] int32 each.

    These are data, so that one kernel serves all leaves alike.
    """

    def find(held: DecodeState) -> list[list[jax.Array]]:
        leaves = jax.tree.leaves(_shapes_out(held, 1, cache_length))
        sizes = [[math.prod(leaves[one].shape[1:]) for one in shared] for shared in _shares(leaves)]
        return [list(map(jnp.int32, np.cumsum([0, *each[:-1]]))) for each in sizes]

    if layout.mesh is None:
        return find(state)
    return on_each(find, layout, (_specs(state, layout),), PartitionSpec())(state)


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("state",))
def _put(
    state: DecodeState, packet: RowPacket, rows: Array, begins: list[list[Array]], layout: Layout
) -> DecodeState:
    """Write the packet into rows of a state; begins: from `_begins`."""

    def put(held: DecodeState, pieces: tuple[Array, ...], begins: list[list[Array]]) -> DecodeState:
        own = _own(rows, held, state)
        leaves, kind = jax.tree.flatten(_shapes_out(held, len(rows), packet.cache_length))
        for piece, places, shared in zip(pieces, begins, _shares(leaves), strict=True):
            for one, begin in zip(shared, places, strict=True):
                leaf = leaves[one]
                new = jax.lax.dynamic_slice(piece[0], (len(rows) * begin,), (leaf.size,))
                leaves[one] = _recast(new.reshape(leaf.shape), leaf.dtype)
        return rows_in(held, own, jax.tree.unflatten(kind, leaves))

    if layout.mesh is None:
        return put(state, packet.pieces, begins)
    specs = _specs(state, layout)
    place = on_each(put, layout, (specs, _PIECE_SPEC, PartitionSpec()), specs)
    return pin_rows(place(state, packet.pieces, begins), layout)


def _specs(state: DecodeState, layout: Layout) -> DecodeState:
    """Return the partition of each leaf of a state."""
    return jax.tree.map(lambda place: place.spec, row_shardings(state, layout))


def _own(rows: Array, held: DecodeState, state: DecodeState) -> Array:
    """Return the local indices of rows of a state on a device.

    Those of other devices are past its end.
    """
    count = len(held.done)
    if count == len(state.done):
        return rows
    place = rows - jax.lax.axis_index(ROW_AXES) * count
    return jnp.where((place >= 0) & (place < count), place, count)


def _shapes_out(held: DecodeState, count: int, cache_length: int) -> DecodeState:
    """Return the shapes of some rows of a device's part of a state, cut to this length."""
    return jax.eval_shape(
        lambda held: rows_out(held, np.zeros(count, np.int32), cache_length), held
    )


def _shares(leaves: Sequence[Array]) -> list[list[int]]:
    """Return the leaves that share a piece, by number: of one dtype, and few bytes per row."""
    by_dtype: dict[
        np.dtype, list[tuple[list[int], int]]
    ] = {}  # (leaves, bytes) of each piece, by dtype
    for one, leaf in enumerate(leaves):
        dtype = _sent_dtype(leaf)
        count = math.prod(leaf.shape[1:]) * dtype.itemsize
        pieces = by_dtype.setdefault(dtype, [([], 0)])
        shared, held = pieces[-1]
        if held + count > PIECE_BYTES:
            pieces.append(([one], count))
        else:
            pieces[-1] = ([*shared, one], held + count)
    return [shared for pieces in by_dtype.values() for shared, _ in pieces if shared]


def _sent_dtype(leaf: Array) -> np.dtype:
    """Return the dtype in which a leaf travels: its own if a narrow float, else int32.

    So a float32 temperature needs no separate piece next to bfloat16 caches.
    """
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.dtype if narrow else jnp.dtype(jnp.int32)


def _recast(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
    """Bitcast a leaf to its dtype of transfer or back."""
    if jnp.float32 in (leaf.dtype, dtype):
        return jax.lax.bitcast_convert_type(leaf, dtype)
    return leaf.astype(dtype)


def send(packet: RowPacket, layout: Layout) -> RowPacket:
    """Return the packet on another slice of this process."""
    return packet if layout.mesh is None else jax.device_put(packet, _place(layout))


def send_to_process(
    packets: Sequence[RowPacket], here: Layout, source: Layout, target: Layout
) -> RowPacket:
    """Send a packet to a slice of another process; both processes call this.

    They do so in the same order. packets: this process's packets on the two slices: the packed one,
    or on the target's side any of its shape. Returns the contents of `here` afterwards, meaningful
    on the target. No other device takes part.
    """
    devices = np.concatenate([source.devices, target.devices])
    pair = dataclasses.replace(source, mesh=Mesh(devices, AXES, axis_types=AXIS_TYPES))
    both = jax.tree.map(functools.partial(_on, pair), *packets)
    return jax.tree.map(functools.partial(_on, here), _passed(both, pair))


def _on(layout: Layout, *pieces: jax.Array) -> jax.Array:
    """Return some pieces [S, n] of a layout of S slices, without a copy."""
    devices = set(layout.devices.flat)
    shape = (len(layout.devices), *pieces[0].shape[1:])
    parts = [
        shard.data
        for piece in pieces
        for shard in piece.addressable_shards
        if shard.device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, _place(layout), parts)


@functools.partial(jax.jit, static_argnames=("pair",))
def _passed(packets: RowPacket, pair: Layout) -> RowPacket:
    """Return the first slice's pieces [2, n] on the second."""
    pass_on = functools.partial(jax.lax.ppermute, axis_name="slices", perm=[(0, 1)])
    return jax.shard_map(pass_on, mesh=pair.mesh, in_specs=_PIECE_SPEC, out_specs=_PIECE_SPEC)(
        packets
    )


def _place(layout: Layout) -> NamedSharding:
    """Return the sharding of a packet's pieces on a slice."""
    assert layout.mesh is not None
    return NamedSharding(layout.mesh, _PIECE_SPEC)
