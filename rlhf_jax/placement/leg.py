"""Say what programs do with one leaf, and over which devices it lies.

All is counted in numbers of devices, so it may be planned for devices that are not here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from rlhf_jax.placement.grid import Split, agreed_part, axis_of_digits, digits_of, spread
from rlhf_jax.placement.recut import Recut


class Placing(NamedTuple):
    """Say which devices hold a leaf, and how it is split over them."""

    # by their ids, in the order of their mesh
    devices: tuple[int, ...]
    # of the axes of the mesh
    sizes: tuple[int, ...]
    # the mesh's axes that split each dimension
    split: Split

    def turned(self) -> Iterator[Placing]:
        """Return the same placing with the axes of the mesh in each order there is."""
        devices = np.reshape(self.devices, self.sizes)
        large = [axis for axis, size in enumerate(self.sizes) if size > 1]
        for order in itertools.permutations(large):
            axes = [*order, *(axis for axis in range(devices.ndim) if axis not in order)]
            split = tuple(tuple(axes.index(axis) for axis in own) for own in self.split)
            found = devices.transpose(axes)
            yield Placing(tuple(found.ravel().tolist()), found.shape, split)

    def bounds(self, shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Return where the part of each device begins and ends in each dimension."""
        numbers = np.indices(self.sizes).reshape(len(self.sizes), -1)
        columns = []
        for size, axes in zip(shape, self.split, strict=True):
            part = np.zeros(len(self.devices), np.int64)
            for axis in axes:
                part = part * self.sizes[axis] + numbers[axis]
            length = size // math.prod(self.sizes[axis] for axis in axes)
            columns.append([(start, start + length) for start in (part * length).tolist()])
        return [[column[device] for column in columns] for device in range(len(self.devices))]


class Leg(NamedTuple):
    """Say what one program does with one leaf, all of it on the same devices."""

    shape: tuple[int, ...]
    # ids of the devices, in the order of the grid
    devices: tuple[int, ...]
    # one after another: two where dimensions are split into parts that do not fit each other
    recuts: tuple[Recut, ...]
    # digits whose values come in, or go out, as pieces; None: the leaf is one array
    enters: tuple[int, ...] | None = None
    leaves: tuple[int, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return names of the axes of the grid."""
        return tuple(f"axis_{number}" for number in range(len(self.recuts[0].sizes)))

    def part_shape(self, *, outgoing: bool = False) -> tuple[int, ...]:
        """Return the shape of one device's part, or of one piece of it, before or after the leg."""
        recut = self.recuts[-1 if outgoing else 0]
        held = recut.target if outgoing else recut.source
        pieces = (self.leaves if outgoing else self.enters) or ()
        split = iter(axis is not None or digit in pieces for digit, axis in enumerate(held))
        shape = []
        for size, sizes in zip(self.shape, recut.digits, strict=True):
            shape.append(size // math.prod(radix for radix in sizes if next(split)))
        return tuple(shape)

    def view(self, recut: Recut, pieces: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the shape of a device's part with an axis for each digit, of length 1 if split.

        Behind its digits each dimension has an axis of what is never split.
        """
        held = enumerate(recut.source)
        view = []
        for size, sizes in zip(self.shape, recut.digits, strict=True):
            for radix in sizes:
                digit, axis = next(held)
                view.append(radix if axis is None and digit not in pieces else 1)
            view.append(size // math.prod(sizes))
        return tuple(view)

    def spec(self, *, stacked: bool = False, outgoing: bool = False) -> PartitionSpec:
        """Return how the arrays of the leaf are split over the mesh of the grid."""
        if (self.leaves if outgoing else self.enters) is not None:
            return PartitionSpec(self.names)
        recut = self.recuts[-1 if outgoing else 0]
        held = iter(recut.target if outgoing else recut.source)
        split = []
        for sizes in recut.digits:
            own = [next(held) for _ in sizes]
            split.append(tuple(self.names[axis] for axis in own if axis is not None))
        return PartitionSpec(*([None] if stacked else []), *split)


def recuts_between(
    shape: tuple[int, ...],
    before: Split,
    after: Split,
    sizes: tuple[int, ...],
    axes: Sequence[int] | None = None,
) -> tuple[Recut, ...]:
    """Return how to come from a split to another over a grid, or over some `axes` of it."""
    axes = range(len(sizes)) if axes is None else axes
    splits = [before, after]
    if digits_of(splits, sizes) is None:
        # parts of 1/2 and of 1/3, for example: with neither in between
        agreed = agreed_part(before, after, sizes, axes)
        splits.insert(1, spread(shape, agreed, splits, sizes=sizes, axes=axes))
    found = []
    for pair in itertools.pairwise(splits):
        digits = digits_of(pair, sizes)
        assert digits is not None, "A split in between agrees with both."
        held = (axis_of_digits(split, digits) for split in pair)
        found.append(Recut(tuple(sizes[axis] for axis in axes), digits, *held))
    return tuple(found)
