"""Make and split arrays whose parts are on several processes, or on others alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding


@functools.lru_cache(maxsize=4096)
def owners_of(sharding: Sharding) -> tuple[int, ...]:
    """Return the ranks of the processes whose devices have a part of an array, in order."""
    return tuple(sorted({device.process_index for device in sharding.device_set}))


def place_parts(leaf: Any, sharding: Sharding) -> jax.Array:
    """Place this process's parts of a host array, which all processes have."""
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )


def counted_up(number: Any) -> jax.Array:
    """Increment a [] int32 that every process reads; no device computes anything."""
    return place_parts(np.asarray(number) + np.int32(1), number.sharding)


def parts_elsewhere(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array none of whose parts are on this process's devices."""
    assert leaf.sharding is not None, "A shape that is held to no place lies nowhere else."
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def shard_on(array: jax.Array, device: Any) -> jax.Array:
    """Return a device's part of an array as an array; the device may be another rank's."""
    here = [shard.data for shard in array.addressable_shards if shard.device == device]
    shape = array.sharding.shard_shape(array.shape)
    alone = SingleDeviceSharding(device)
    return jax.make_array_from_single_device_arrays(shape, alone, here, dtype=array.dtype)


def send_shards(array: Any, place: NamedSharding) -> Any:
    """Send each shard of an array to its device in another, equally split sharding.

    All processes that have shards before or after call it in one order. A shape gives a shape.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=place)
    if array.sharding == place:
        return array
    if {*owners_of(array.sharding), *owners_of(place)} == {jax.process_index()}:
        return jax.device_put(array, place)
    source = [shard_on(array, device) for device in array.sharding.mesh.devices.flat]
    sent = send_pieces(source, list(cast(Mesh, place.mesh).devices.flat))
    here = [part for part in sent if part.is_fully_addressable]
    return jax.make_array_from_single_device_arrays(array.shape, place, here, dtype=array.dtype)


def send_pieces(pieces: Sequence[jax.Array], devices: Sequence[Any]) -> list[jax.Array]:
    """Send arrays of one device each to other devices.

    Every process names all pieces, in one order; it takes part in those it sends or receives. A
    piece that another process sends itself is an array without parts here.
    """
    rank = jax.process_index()
    sent = []
    for piece, device in zip(pieces, devices, strict=True):
        (owner,) = owners_of(piece.sharding)
        if owner == device.process_index != rank:
            there = SingleDeviceSharding(device)
            shape = jax.ShapeDtypeStruct(piece.shape, piece.dtype, sharding=there)
            sent.append(parts_elsewhere(shape))
        else:
            sent.append(None)
    crossing = [place for place, piece in enumerate(sent) if piece is None]
    arrived = jax.device_put([pieces[n] for n in crossing], [devices[n] for n in crossing])
    for place, piece in zip(crossing, arrived, strict=True):
        sent[place] = piece
    return sent
