"""Move a model's weights from the layout they have to another, on the same or on other devices.

Layers go one at a time, in the dtype they shall have, so that beside the old weights and the new
there is one layer. One program serves all layers, and nothing goes through the host.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from rlhf_jax.mesh import Layout, model_shardings, pin_weights
from rlhf_jax.placement.recut import Recut, fill, recut_local
from rlhf_jax.placement.route import Leg, Placing, Route, Traffic, find_route, part_shape, traffic
from rlhf_jax.types import Layer, Model

T = TypeVar("T")

# The arrays that stand for one leaf: itself, or one for each piece that a device sends or gets.
Pieces = tuple[jax.Array, ...]


def transfer(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return a model as a layout has it, in `dtype` if that is not None; layers stay stacked.

    What is there already stays as it is. Of shapes it is shapes.
    """
    if isinstance(model.norm, jax.ShapeDtypeStruct):
        return _as_shapes(model, layout, dtype)
    if is_in_place(model, layout, dtype):
        return model
    found = transfer_ends(model, layout, dtype)
    layers = transfer_layers(model, layout, dtype)
    if not isinstance(model.layers, Layer):
        return dataclasses.replace(found, layers=tuple(layers))
    stacked = None
    for index, layer in enumerate(layers):
        if stacked is None:
            stacked = _empty(layer, depth=model.config.num_layers, layout=layout)
        stacked = _write(stacked, layer, np.int32(index), layout=layout)
    return dataclasses.replace(found, layers=typed(Layer, stacked))


def transfer_layers(
    model: Model, layout: Layout, dtype: DTypeLike | None = None
) -> Iterator[Layer]:
    """Return the layers one by one, unrolled, each as a layout has it once it is asked for."""
    if not isinstance(model.layers, Layer):
        for layer in model.layers:
            yield move(layer, _places(layer, layout), dtype)
        return
    places = _places(_one_layer(model.layers), layout)
    for index in range(model.config.num_layers):
        yield move(model.layers, places, dtype, index=index)


def transfer_ends(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return a model whose embedding, norm and head are as a layout has them, one after another."""
    places = _places(dataclasses.replace(model, layers=()), layout)
    moved = {}
    for name in ("embed", "norm", "head"):
        leaf = getattr(model, name)
        place = None if places is None else getattr(places, name)
        moved[name] = None if leaf is None else move(leaf, place, dtype)
    return dataclasses.replace(model, **moved)


def is_in_place(tree: Any, layout: Layout, dtype: DTypeLike | None = None) -> bool:
    """Say whether all weights lie as a layout has them, in `dtype` if that is not None."""
    return _lies(tree, _places(tree, layout), dtype)


def bytes_moved(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> Traffic:
    """Count the bytes that go from device to device when a model comes to a layout."""
    parts: list[tuple[Any, int]] = [(dataclasses.replace(model, layers=()), 1), (model.layers, 1)]
    if isinstance(model.layers, Layer):
        parts[1] = (_one_layer(model.layers), model.config.num_layers)
    needed = 0
    received = 0
    for part, times in parts:
        places = jax.tree.leaves(model_shardings(part, layout))
        for leaf, place in zip(jax.tree.leaves(part), places, strict=True):
            ends = (_placing(leaf.sharding, leaf.ndim), _placing(place, leaf.ndim))
            entries = traffic(leaf.shape, *ends)
            size = jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize * times
            needed += entries.needed * size
            received += entries.received * size
    return Traffic(needed, received)


def move(tree: T, places: Any, dtype: DTypeLike | None = None, index: int | None = None) -> T:
    """Return a tree of arrays of one mesh at `places`, a sharding for each leaf, in `dtype`.

    index: of one layer of a tree of stacked layers, whose places are then those of a layer alone.
    Places are None where nothing is held to a place.
    """
    dtype = None if dtype is None else jnp.dtype(dtype)
    number = None if index is None else np.int32(index)
    if places is None:
        return _take(tree, number, dtype=dtype)
    if index is None and _lies(tree, places, dtype):
        return tree
    shapes = jax.tree.leaves(tree if index is None else _one_layer(tree))
    ends = jax.tree.leaves(places)
    routes = [
        find_route(one.shape, _placing(one.sharding, one.ndim), _placing(end, one.ndim))
        for one, end in zip(shapes, ends, strict=True)
    ]
    leaves, treedef = jax.tree.flatten(tree)
    firsts = [route.first for route in routes]
    moved = _run_legs([(leaf,) for leaf in leaves], firsts, dtype=dtype, index=number)
    moved = _arrive(moved, routes)
    found = [_relabel(leaf, end) for (leaf,), end in zip(moved, ends, strict=True)]
    return jax.tree.unflatten(treedef, found)


def _run_legs(
    leaves: Sequence[Pieces],
    legs: Sequence[Leg],
    dtype: jnp.dtype | None = None,
    index: np.int32 | None = None,
) -> list[Pieces]:
    """Run one leg of each leaf; those over the same grid are one program."""
    found: dict[int, Pieces] = {}
    grids = [_grid_mesh(leg.recuts[0].sizes, leg.devices) for leg in legs]
    for grid in dict.fromkeys(grids):
        own = [place for place, one in enumerate(grids) if one == grid]
        given = []
        for place in own:
            sharding = NamedSharding(grid, _spec(legs[place], stacked=index is not None))
            given.append(tuple(_relabel(piece, sharding) for piece in leaves[place]))
        program = tuple(legs[place] for place in own)
        moved = _run(given, index, legs=program, grid=grid, dtype=dtype)
        found |= dict(zip(own, moved, strict=True))
    return [found[place] for place in range(len(legs))]


@functools.partial(jax.jit, static_argnames=("legs", "grid", "dtype"))
def _run(
    leaves: list[Pieces],
    index: jax.Array | None,
    legs: tuple[Leg, ...],
    grid: Mesh,
    dtype: jnp.dtype | None,
) -> list[Pieces]:
    """Take one layer of leaves where there is an index, cast them, and run their legs."""
    found = []
    for pieces, leg in zip(leaves, legs, strict=True):
        run = jax.shard_map(
            functools.partial(_run_local, leg=leg, dtype=dtype, names=grid.axis_names[:-1]),
            mesh=grid,
            in_specs=(_spec(leg, stacked=index is not None), PartitionSpec()),
            out_specs=_spec(leg, outgoing=True),
            check_vma=False,
        )
        found.append(run(pieces, index))
    return found


def _run_local(
    pieces: Pieces,
    index: jax.Array | None,
    leg: Leg,
    dtype: jnp.dtype | None,
    names: tuple[str, ...],
) -> Pieces:
    """Run one leg of one leaf on one device: from its part or pieces to its part or pieces."""
    if index is not None:
        pieces = tuple(jax.lax.dynamic_index_in_dim(one, index, keepdims=False) for one in pieces)
    if dtype is not None:
        pieces = tuple(piece.astype(dtype) for piece in pieces)
    x = _entered(pieces, leg)
    for recut in leg.recuts:
        x = recut_local(x.reshape(_view(leg, recut)), recut, names)
    shape = part_shape(leg, outgoing=True)
    if leg.leaves is None:
        return (x.reshape(shape),)
    places = [leg.recuts[-1].places[digit] for digit in leg.leaves]
    parts = jnp.moveaxis(x, places, range(len(places)))
    return tuple(parts.reshape(-1, 1, *shape))


def _entered(pieces: Pieces, leg: Leg) -> jax.Array:
    """Return a device's part of a leaf, put together where it has come in pieces."""
    if leg.enters is None:
        return pieces[0]
    recut = leg.recuts[0]
    counts = [recut.radices[digit] for digit in leg.enters]
    parts = jnp.stack(pieces).reshape(*counts, *_view(leg, recut, pieces=leg.enters))
    return fill(parts, [recut.places[digit] for digit in leg.enters])


def _view(leg: Leg, recut: Recut, pieces: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the shape of a device's part with an axis for each digit, of length 1 if it is split.

    Behind its digits each dimension has an axis of what is never split.
    """
    held = enumerate(recut.source)
    view = []
    for size, sizes in zip(leg.shape, recut.digits, strict=True):
        for radix in sizes:
            digit, axis = next(held)
            view.append(radix if axis is None and digit not in pieces else 1)
        view.append(size // math.prod(sizes))
    return tuple(view)


def _arrive(moved: list[Pieces], routes: Sequence[Route]) -> list[Pieces]:
    """Send the pieces of leaves that go to other devices, and run their second legs there."""
    going = {place: route.second for place, route in enumerate(routes) if route.second is not None}
    pieces = []
    receivers = []
    for place, leg in going.items():
        held = [
            {one.device.id: one.data for one in leaf.addressable_shards} for leaf in moved[place]
        ]
        for receiver, own in zip(leg.devices, routes[place].crossing, strict=True):
            pieces += [held[number][sender] for sender, number in own]
            receivers += [_device(receiver)] * len(own)
    sent = iter(jax.device_put(pieces, receivers))
    arrived = []
    for place, leg in going.items():
        by_receiver = [[next(sent) for _ in own] for own in routes[place].crossing]
        sharding = NamedSharding(_grid_mesh(leg.recuts[0].sizes, leg.devices), _spec(leg))
        shape = (len(leg.devices), *part_shape(leg))
        found = [
            jax.make_array_from_single_device_arrays(shape, sharding, list(parts))
            for parts in zip(*by_receiver, strict=True)
        ]
        arrived.append(tuple(found))
    found = dict(zip(going, _run_legs(arrived, list(going.values())), strict=True))
    return [found.get(place, leaf) for place, leaf in enumerate(moved)]


def _spec(leg: Leg, *, stacked: bool = False, outgoing: bool = False) -> PartitionSpec:
    """Return how the arrays of a leaf are split over the mesh of its leg's grid."""
    recut = leg.recuts[-1 if outgoing else 0]
    names = _names(len(recut.sizes))
    if (leg.leaves if outgoing else leg.enters) is not None:
        return PartitionSpec(names)
    held = iter(recut.target if outgoing else recut.source)
    split = []
    for sizes in recut.digits:
        own = [next(held) for _ in sizes]
        split.append(tuple(names[axis] for axis in own if axis is not None))
    return PartitionSpec(*([None] if stacked else []), *split)


def _names(axes: int) -> tuple[str, ...]:
    return tuple(f"axis_{number}" for number in range(axes))


@functools.lru_cache(maxsize=256)
def _grid_mesh(sizes: tuple[int, ...], devices: tuple[int, ...]) -> Mesh:
    """Return the mesh of a grid, with one more axis of size 1, as a mesh has at least one."""
    places = np.array([_device(number) for number in devices]).reshape(*sizes, 1)
    return Mesh(places, (*_names(len(sizes)), "one"))


@functools.cache
def _device(number: int) -> Any:
    """Return the device that has an id."""
    return next(device for device in jax.devices() if device.id == number)


def _relabel(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array that says otherwise where its parts lie, on all of its devices or some.

    The parts stay, and share their buffers.
    """
    if leaf.sharding == sharding:
        return leaf
    devices = sharding.device_set
    parts = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


@functools.lru_cache(maxsize=4096)
def _placing(sharding: Sharding, rank: int) -> Placing:
    """Return in numbers where a sharding lays a leaf of some rank."""
    if not isinstance(sharding, NamedSharding):
        assert isinstance(sharding, SingleDeviceSharding), "Weights lie on a mesh or one device."
        (device,) = sharding.device_set
        return Placing((device.id,), (1,), split=((),) * rank)
    mesh = typed(Mesh, sharding.mesh)
    spec = (*sharding.spec, *(None,) * rank)[:rank]
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    split = tuple(tuple(mesh.axis_names.index(name) for name in own) for own in axes)
    devices = tuple(device.id for device in mesh.devices.flat)
    return Placing(devices, mesh.devices.shape, split)


def _places(tree: Any, layout: Layout) -> Any:
    return None if layout.mesh is None else model_shardings(tree, layout)


def _lies(tree: Any, places: Any, dtype: DTypeLike | None) -> bool:
    """Say whether leaves lie at their places, where there are some, in `dtype` if not None."""
    leaves = jax.tree.leaves(tree)
    if dtype is not None and any(leaf.dtype != dtype for leaf in leaves):
        return False
    pairs = [] if places is None else zip(leaves, jax.tree.leaves(places), strict=True)
    return all(leaf.sharding.is_equivalent_to(place, leaf.ndim) for leaf, place in pairs)


def _one_layer(layers: T) -> T:
    """Return the shapes of one of stacked layers, which lies where they do."""

    def one(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        place = leaf.sharding
        if isinstance(place, NamedSharding):
            assert not place.spec[:1] or place.spec[0] is None, "Layers are never split."
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)

    return jax.tree.map(one, layers)


def _as_shapes(model: Model, layout: Layout, dtype: DTypeLike | None) -> Model:
    """Return the shapes of a model that a layout has, in `dtype` if that is not None."""
    if dtype is not None:
        model = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), model)
    if layout.mesh is None:
        return model
    places = model_shardings(model, layout)
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), model, places)


@functools.partial(jax.jit, static_argnames=("dtype",))
def _take(tree: T, index: jax.Array | None, dtype: jnp.dtype | None) -> T:
    """Return a tree, or one layer of a stacked one, in `dtype` if that is not None."""

    def take(leaf: jax.Array) -> jax.Array:
        if index is not None:
            leaf = jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
        return leaf if dtype is None else leaf.astype(dtype)

    return jax.tree.map(take, tree)


@functools.partial(jax.jit, static_argnames=("depth", "layout"))
def _empty(layer: Layer, depth: int, layout: Layout) -> Layer:
    """Return stacked layers of zeros, of the shape of `depth` like `layer`."""
    empty = jax.tree.map(lambda leaf: jnp.zeros((depth, *leaf.shape), leaf.dtype), layer)
    return pin_weights(empty, layout)


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnums=0)
def _write(stacked: Layer, layer: Layer, index: jax.Array, layout: Layout) -> Layer:
    """Write a layer in place into stacked ones."""
    update = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return pin_weights(jax.tree.map(update, stacked, layer), layout)
