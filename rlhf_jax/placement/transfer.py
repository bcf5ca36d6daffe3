"""Move a model's weights to another layout, on the same or on other devices.

Layers go one at a time, already in their new dtype, so that the peak is one layer above the old and
new weights. One program serves all layers, and nothing goes through the host. Idle models may wait
in the memory of their hosts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from rlhf_jax.mesh import Layout, on_slice
from rlhf_jax.models.families.family import END_WEIGHTS
from rlhf_jax.models.shardings import model_shardings, pin_weights
from rlhf_jax.placement.program import (
    ReshardProgram,
    copy_over,
    reshard_programs,
    run_steps,
    send_across,
)
from rlhf_jax.placement.reshard_path import BytesMoved, ReshardPath, find_path, traffic
from rlhf_jax.placement.reshard_step import Placing, ReshardStep
from rlhf_jax.types import Layer, Model

# Kinds of memory, by JAX's names: where models wait, and where they work.
_ASIDE = "pinned_host"
_AT_WORK = "device"

T = TypeVar("T")


def transfer(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return a model in a layout, in `dtype` if that is not None; layers stay stacked.

    Parts in place stay. Shapes give shapes.
    """
    if isinstance(model.norm, jax.ShapeDtypeStruct):
        return move(model, _places(model, layout), dtype)
    if is_in_place(model, layout, dtype):
        return model
    moved = transfer_ends(model, layout, dtype)
    layers = transfer_layers(model, layout, dtype)
    if not isinstance(model.layers, dict):
        return dataclasses.replace(moved, layers=tuple(layers))
    stacked = None
    for index, layer in enumerate(layers):
        if stacked is None:
            stacked = _empty(layer, depth=model.config.num_layers, layout=layout)
        stacked = _write(stacked, layer, np.int32(index), layout=layout)
    return dataclasses.replace(moved, layers=typed(Layer, stacked))


def transfer_layers(
    model: Model, layout: Layout, dtype: DTypeLike | None = None
) -> Iterator[Layer]:
    """Yield the layers one by one, unrolled, each moved to a layout on request."""
    if not isinstance(model.layers, dict):
        for layer in model.layers:
            yield move(layer, _places(layer, layout), dtype)
        return
    for part in _by_slices(model.layers):
        places = _places(_one_layer(part), layout)
        for index in range(_depth(part)):
            yield move(part, places, dtype, index=index)


def transfer_ends(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return the weights outside the layers in a layout, moved one by one; with no layers."""
    ends = dataclasses.replace(model, layers=())
    places = _places(ends, layout)
    moved = {}
    for name in END_WEIGHTS:
        leaf = getattr(model, name)
        moved[name] = None if leaf is None else move(leaf, getattr(places, name, None), dtype)
    return dataclasses.replace(ends, **moved)


def is_in_place(tree: Any, layout: Layout, dtype: DTypeLike | None = None) -> bool:
    """Return whether all weights are placed as in a layout, in `dtype` if that is not None."""
    return _lies(tree, _places(tree, layout), dtype)


def bytes_moved(model: Model, layout: Layout, dtype: DTypeLike | None = None) -> BytesMoved:
    """Count the bytes that go from device to device when a model moves to a layout."""
    parts: list[tuple[Any, int]] = [(dataclasses.replace(model, layers=()), 1)]
    if isinstance(model.layers, dict):
        stacked = _by_slices(model.layers)
        parts += [(_one_layer(part), _depth(part)) for part in stacked]
    else:
        parts.append((model.layers, 1))
    needed = 0
    received = 0
    for part, times in parts:
        places = jax.tree.leaves(model_shardings(part, layout))
        for leaf, place in zip(jax.tree.leaves(part), places, strict=True):
            source = _placing(leaf.sharding, leaf.ndim)
            entries = traffic(leaf.shape, source, _placing(place, leaf.ndim))
            size = jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize * times
            needed += entries.needed * size
            received += entries.received * size
    return BytesMoved(needed, received)


def move(tree: T, places: Any, dtype: DTypeLike | None = None, index: int | None = None) -> T:
    """Return a tree of arrays of one mesh at `places`, a sharding for each leaf, in `dtype`.

    index: of one layer of a tree of stacked layers, whose places are then those of a layer alone.
    Places are None if nothing is placed. Shapes give shapes.
    """
    dtype = None if dtype is None else jnp.dtype(dtype)
    number = None if index is None else np.int32(index)
    if isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct):
        cast = jax.tree.map(lambda leaf: leaf.update(dtype=dtype or leaf.dtype), tree)
        if places is None:
            return cast
        return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), cast, places)
    if places is None:
        return _take(tree, number, dtype=dtype)
    if index is None and _lies(tree, places, dtype):
        return tree
    ends = jax.tree.leaves(places)
    paths = _paths(tree if index is None else _one_layer(tree), ends)
    leaves, treedef = jax.tree.flatten(tree)
    firsts = [path.first for path in paths]
    moved = run_steps([(leaf,) for leaf in leaves], firsts, dtype=dtype, index=number)
    moved = send_across(moved, paths)
    return jax.tree.unflatten(treedef, copy_over(moved, paths, ends))


def offload(model: T) -> T:
    """Return a model in pinned memory of the hosts of its devices, split as before."""
    return jax.tree.map(lambda leaf: _moved(leaf, _ASIDE), model)


def fetched(model: T) -> T:
    """Return a model on its devices, while the copy may still be in progress.

    It may be passed to programs at once: they begin when it has arrived. Shapes give shapes.
    """

    def bring(leaf: jax.Array) -> jax.Array:
        waits = getattr(leaf.sharding, "memory_kind", None) == _ASIDE
        return _moved(leaf, _AT_WORK) if waits else leaf

    return jax.tree.map(bring, model)


def layer_programs(
    layers: Layer, layout: Layout, devices: Sequence[Any]
) -> Iterator[ReshardProgram]:
    """Yield the programs that move a layer of stacked shapes to a layout, in its dtype.

    devices: all that take part; they may be absent. Leaves on other devices are resplit on their
    source, and again on arrival. If slices have different layers, the layer is the first slice's.
    """
    layers = _by_slices(layers)[0]
    one = _one_layer(layers)
    places = jax.tree.leaves(model_shardings(one, layout))
    yield from _move_programs(one, places, devices, layout.dtype, given=layers)


def ends_programs(ends: Model, layout: Layout, devices: Sequence[Any]) -> Iterator[ReshardProgram]:
    """Yield the programs that move shapes of a model without layers to a layout, leaf by leaf."""
    places = jax.tree.leaves(model_shardings(ends, layout))
    for leaf, place in zip(jax.tree.leaves(ends), places, strict=True):
        yield from _move_programs(leaf, [place], devices, layout.dtype)


def _move_programs(
    tree: Any,
    places: Sequence[Sharding],
    devices: Sequence[Any],
    cast: jnp.dtype,
    given: Any = None,
) -> Iterator[ReshardProgram]:
    """Yield the programs that `move` runs on shapes; given: of stacked layers, all of them."""
    paths = _paths(tree, places)
    index = None if given is None else jax.ShapeDtypeStruct((), jnp.int32)
    leaves = [(leaf,) for leaf in jax.tree.leaves(tree if given is None else given)]
    firsts = [one.first for one in paths]
    yield from reshard_programs(leaves, firsts, devices, cast, index)
    arriving = [path for path in paths if path.second is not None]
    pieces = []
    steps = []
    for path in arriving:
        step = typed(ReshardStep, path.second)
        piece = jax.ShapeDtypeStruct((len(step.devices), *step.part_shape()), cast)
        pieces.append((piece,) * len(path.crossing[0]))
        steps.append(step)
    yield from reshard_programs(pieces, steps, devices)


def _paths(tree: Any, places: Sequence[Sharding]) -> list[ReshardPath]:
    """Return the path of each leaf of a tree of arrays or shapes to its place."""
    return [
        find_path(leaf.shape, _placing(leaf.sharding, leaf.ndim), _placing(place, leaf.ndim))
        for leaf, place in zip(jax.tree.leaves(tree), places, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _placing(sharding: Sharding, rank: int) -> Placing:
    """Return in numbers where a sharding places a leaf of some rank."""
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


def _moved(leaf: Any, kind: str) -> Any:
    """Return an array in the memory of a kind; a shape gives a shape."""
    place = leaf.sharding.with_memory_kind(kind)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=place)
    return jax.device_put(leaf, place)


def _places(tree: Any, layout: Layout) -> Any:
    return None if layout.mesh is None else model_shardings(tree, layout)


def _lies(tree: Any, places: Any, dtype: DTypeLike | None) -> bool:
    """Return whether leaves are at their places, if given, in `dtype` if not None."""
    leaves = jax.tree.leaves(tree)
    if dtype is not None and any(leaf.dtype != dtype for leaf in leaves):
        return False
    pairs = [] if places is None else zip(leaves, jax.tree.leaves(places), strict=True)
    return all(leaf.sharding.is_equivalent_to(place, leaf.ndim) for leaf, place in pairs)


def _by_slices(layers: Layer) -> list[Layer]:
    """Return the stacked layers of each slice of a pipelined model; of others all as one."""
    place = jax.tree.leaves(layers)[0].sharding
    if not isinstance(place, NamedSharding) or not place.spec or place.spec[0] is None:
        return [layers]
    return [on_slice(layers, own) for own in Layout(typed(Mesh, place.mesh)).split()]


def _depth(layers: Layer) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def _one_layer(layers: T) -> T:
    """Return the shapes of one of stacked layers, placed as these are."""

    def one(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        place = leaf.sharding
        if isinstance(place, NamedSharding):
            split = place.shard_shape(leaf.shape)[0] < leaf.shape[0]
            assert not split, "A slice's own layers are never split."
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)

    return jax.tree.map(one, layers)


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
