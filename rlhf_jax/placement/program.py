"""Run the reshard steps of leaves on their devices, and send pieces between devices."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.placement.reshard_path import ReshardPath
from rlhf_jax.placement.reshard_step import ReshardStep
from rlhf_jax.placement.split_change import change_split, received
from rlhf_jax.runtime.shards import send_pieces, shard_on

# The arrays of one leaf: itself, or one for each piece that a device sends or receives.
Pieces = tuple[jax.Array, ...]


def run_steps(
    leaves: Sequence[Pieces],
    steps: Sequence[ReshardStep],
    dtype: jnp.dtype | None = None,
    index: np.int32 | None = None,
) -> list[Pieces]:
    """Run one step of each leaf; those over the same grid are one program."""
    by_place: dict[int, Pieces] = {}
    for program in reshard_programs(leaves, steps, jax.devices(), dtype, index):
        by_place |= dict(zip(program.places, program.run(operator.call), strict=True))
    return [by_place[place] for place in range(len(steps))]


class ReshardProgram(NamedTuple):
    """Hold a program of some steps over one grid, and its arrays or shapes."""

    places: list[int]  # of its leaves, among all
    steps: tuple[ReshardStep, ...]
    grid: Mesh
    given: list[Pieces]
    index: Any  # [] int32, of one layer of stacked ones; None: they are not stacked
    dtype: jnp.dtype | None  # that leaves are cast to

    def run(self, execute: Callable[..., Any]) -> Any:
        """Run the steps, or apply `execute` to their program."""
        return execute(
            _run, self.given, self.index, steps=self.steps, grid=self.grid, dtype=self.dtype
        )

    @property
    def arguments(self) -> int:
        """Return the bytes of its arguments per device."""
        pieces = itertools.chain.from_iterable(self.given)
        return sum(
            math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in pieces
        )

    def device_bytes(self, itemsize: int) -> int:
        """Return the bytes per device: arguments, and the layer as it arrives, cast, and leaving.

        An arriving layer exists twice while it is assembled or split; on GPUs only its gathered
        leaves, one at a time.
        """
        going = [step.entries(outgoing=True) for step in self.steps]
        if self.grid.devices.flat[0].platform == "gpu":
            exchanged = [size for step, size in zip(self.steps, going, strict=True) if _sent(step)]
            coming = max(exchanged, default=0)
        else:
            coming = sum(step.entries() for step in self.steps)
        return self.arguments + itemsize * (coming + sum(going))

    def received_bytes(self, itemsize: int) -> float:
        """Return the bytes that a device receives from others."""
        return itemsize * sum(map(_sent, self.steps)) / len(self.steps[0].devices)


def reshard_programs(
    leaves: Sequence[Pieces],
    steps: Sequence[ReshardStep],
    devices: Sequence[Any],
    dtype: jnp.dtype | None = None,
    index: Any = None,
) -> Iterator[ReshardProgram]:
    """Yield the programs of steps, one per grid; for shapes the devices may be absent.

    index: [] int32, or its shape, of stacked layers.
    """
    by_grid: dict[Mesh, list[int]] = {}
    for place, step in enumerate(steps):
        grid = _grid_mesh(step.changes[0].sizes, step.devices, tuple(devices))
        by_grid.setdefault(grid, []).append(place)
    for grid, own in by_grid.items():
        given = []
        for place in own:
            sharding = NamedSharding(grid, steps[place].spec(stacked=index is not None))
            given.append(tuple(relabel(piece, sharding) for piece in leaves[place]))
        number = index
        if isinstance(index, jax.ShapeDtypeStruct):
            number = index.update(sharding=NamedSharding(grid, PartitionSpec()))
        program = tuple(steps[place] for place in own)
        yield ReshardProgram(own, program, grid, given, number, dtype)


def _sent(step: ReshardStep) -> float:
    """Return the entries that all devices of a step receive from others."""
    return sum(received(change, math.prod(step.shape)) for change in step.changes)


@functools.partial(jax.jit, static_argnames=("steps", "grid", "dtype"))
def _run(
    leaves: list[Pieces],
    index: jax.Array | None,
    steps: tuple[ReshardStep, ...],
    grid: Mesh,
    dtype: jnp.dtype | None,
) -> list[Pieces]:
    """Take one layer of leaves if there is an index, cast them, and run their steps."""
    results = []
    for pieces, step in zip(leaves, steps, strict=True):
        run = jax.shard_map(
            functools.partial(_run_local, step=step, dtype=dtype, names=grid.axis_names[:-1]),
            mesh=grid,
            in_specs=(step.spec(stacked=index is not None), PartitionSpec()),
            out_specs=step.spec(outgoing=True),
            check_vma=False,
        )
        results.append(run(pieces, index))
    return results


def _run_local(
    pieces: Pieces,
    index: jax.Array | None,
    step: ReshardStep,
    dtype: jnp.dtype | None,
    names: tuple[str, ...],
) -> Pieces:
    """Run one step of one leaf on one device: from its part or pieces to its part or pieces."""
    if index is not None:
        pieces = tuple(jax.lax.dynamic_index_in_dim(one, index, keepdims=False) for one in pieces)
    if dtype is not None:
        pieces = tuple(piece.astype(dtype) for piece in pieces)
    x = pieces[0]
    if step.enters is not None:
        rank = len(step.enters)
        parts = jnp.stack(pieces).reshape(*step.enters, *step.part_shape())
        x = parts.transpose([axis for own in range(rank) for axis in (own, rank + own)])
    for change in step.changes:
        x = change_split(x.reshape(step.view(change)), change, names)
    shape = step.part_shape(outgoing=True)
    if step.leaves is None:
        return (x.reshape(shape),)
    pairs = zip(step.leaves, shape, strict=True)
    parts = x.reshape(list(itertools.chain.from_iterable(pairs)))
    axes = range(parts.ndim)
    return tuple(parts.transpose(*axes[::2], *axes[1::2]).reshape(-1, 1, *shape))


def send_across(moved: list[Pieces], paths: Sequence[ReshardPath]) -> list[Pieces]:
    """Send the pieces of leaves that go to other devices, and run their second steps there."""
    going = {place: path.second for place, path in enumerate(paths) if path.second is not None}
    by_id = {device.id: device for device in jax.devices()}
    pieces = []
    receivers = []
    for place, step in going.items():
        for receiver, own in zip(step.devices, paths[place].crossing, strict=True):
            pieces += [shard_on(moved[place][number], by_id[sender]) for sender, number in own]
            receivers += [receiver] * len(own)
    sent = iter(send_pieces(pieces, [by_id[number] for number in receivers]))
    arrived = []
    for place, step in going.items():
        by_receiver = [[next(sent) for _ in own] for own in paths[place].crossing]
        grid = _grid_mesh(step.changes[0].sizes, step.devices, tuple(jax.devices()))
        sharding = NamedSharding(grid, step.spec())
        shape = (len(step.devices), *step.part_shape())
        found = []
        for parts in zip(*by_receiver, strict=True):
            here = [part for part in parts if part.is_fully_addressable]
            dtype = parts[0].dtype
            found.append(
                jax.make_array_from_single_device_arrays(shape, sharding, here, dtype=dtype)
            )
        arrived.append(tuple(found))
    found = dict(zip(going, run_steps(arrived, list(going.values())), strict=True))
    return [found.get(place, leaf) for place, leaf in enumerate(moved)]


def copy_over(
    moved: Sequence[Pieces], paths: Sequence[ReshardPath], ends: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Return leaves at their ends, copied from devices that have them to those that lack them."""
    by_id = {device.id: device for device in jax.devices()}
    pieces = []
    receivers = []
    for (leaf,), path in zip(moved, paths, strict=True):
        pieces += [shard_on(leaf, by_id[holder]) for holder, _ in path.copies]
        receivers += [by_id[receiver] for _, receiver in path.copies]
    sent = iter(send_pieces(pieces, receivers))
    results = []
    for (leaf,), path, end in zip(moved, paths, ends, strict=True):
        copies = [next(sent) for _ in path.copies]
        results.append(relabel(leaf, end, [one for one in copies if one.is_fully_addressable]))
    return results


def relabel(
    leaf: jax.Array, sharding: NamedSharding, copies: Sequence[jax.Array] = ()
) -> jax.Array:
    """Return an array with another sharding of the same parts, on all of its devices or some.

    The parts share their buffers. copies: parts on more devices. A shape gives a shape.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return typed(jax.Array, leaf.update(sharding=sharding))
    if leaf.sharding == sharding:
        return leaf
    devices = sharding.device_set
    parts = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
    parts += copies
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts, dtype=leaf.dtype)


@functools.lru_cache(maxsize=256)
def _grid_mesh(sizes: tuple[int, ...], numbers: tuple[int, ...], devices: tuple[Any, ...]) -> Mesh:
    """Return the mesh of a grid, with one more axis of size 1, as a mesh has at least one."""
    by_id = {device.id: device for device in devices}
    places = np.array([by_id[number] for number in numbers]).reshape(*sizes, 1)
    return Mesh(places, (*(f"axis_{number}" for number in range(len(sizes))), "one"))
