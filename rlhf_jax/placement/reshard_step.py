"""Describe one reshard step of a leaf, and its placing over devices.

Everything is in numbers of devices, so it may be planned for absent devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from rlhf_jax.placement.grid import Split, common_grid, digits_of, over_grid, spread
from rlhf_jax.placement.split_change import SplitChange


class Placing(NamedTuple):
    """Hold the devices of a leaf, and its split over them."""

    # by their ids, in the order of their mesh
    devices: tuple[int, ...]
    # of the axes of the mesh
    sizes: tuple[int, ...]
    # the mesh's axes that split each dimension
    split: Split

    @property
    def parts(self) -> tuple[int, ...]:
        """Return how many parts each dimension is split into."""
        return tuple(math.prod(self.sizes[axis] for axis in own) for own in self.split)

    @property
    def on_grid(self) -> Placing:
        """Return the same placing on a mesh with axes of prime sizes."""
        grid = common_grid(self.sizes, self.sizes, tuple(range(len(self.devices))))
        assert grid is not None, "A mesh has a grid in common with itself."
        return Placing(self.devices, grid.sizes, over_grid(self.split, grid.source))

    def first_along(self, axes: Collection[int]) -> Placing:
        """Return the placing on the devices that are first along some axes of the mesh."""
        devices = np.reshape(self.devices, self.sizes)
        for axis in axes:
            devices = devices.take([0], axis)
        return Placing(tuple(devices.ravel().tolist()), devices.shape, self.split)

    def blocks(self, counts: tuple[int, ...]) -> list[list[int]]:
        """Return the numbers of each device's blocks, for `counts` equal blocks by dimension."""
        numbers = np.arange(math.prod(counts)).reshape(counts)
        return [
            numbers[tuple(slice(start, end) for start, end in bounds)].ravel().tolist()
            for bounds in self.bounds(counts)
        ]

    def bounds(self, shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Return the bounds of each device's part in each dimension."""
        numbers = np.indices(self.sizes).reshape(len(self.sizes), len(self.devices))
        columns = []
        for size, axes, parts in zip(shape, self.split, self.parts, strict=True):
            part = np.zeros(len(self.devices), np.int64)
            for axis in axes:
                part = part * self.sizes[axis] + numbers[axis]
            length = size // parts
            columns.append([(start, start + length) for start in (part * length).tolist()])
        return [[column[device] for column in columns] for device in range(len(self.devices))]


class ReshardStep(NamedTuple):
    """Describe one program's work on one leaf, all on the same devices."""

    shape: tuple[int, ...]
    # ids of the devices, in the order of the grid
    devices: tuple[int, ...]
    # one after another: two if dimensions are split into parts that do not fit each other
    changes: tuple[SplitChange, ...]
    # the number of pieces of a part that come in, or go out, by dimension; None: the leaf is one
    # array
    enters: tuple[int, ...] | None = None
    leaves: tuple[int, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return names of the axes of the grid."""
        return tuple(f"axis_{number}" for number in range(len(self.changes[0].sizes)))

    def part_shape(self, *, outgoing: bool = False) -> tuple[int, ...]:
        """Return the shape of a device's part, or of one piece of it, before or after the step."""
        change = self.changes[-1 if outgoing else 0]
        held = change.target if outgoing else change.source
        pieces = (self.leaves if outgoing else self.enters) or (1,) * len(self.shape)
        split = iter(axis is not None for axis in held)
        shape = []
        for size, sizes, count in zip(self.shape, change.digits, pieces, strict=True):
            parts = math.prod(radix for radix in sizes if next(split))
            shape.append(size // (parts * count))
        return tuple(shape)

    def entries(self, *, outgoing: bool = False) -> int:
        """Return the entries of one device's part before or after the step, in all its pieces."""
        pieces = (self.leaves if outgoing else self.enters) or ()
        return math.prod((*self.part_shape(outgoing=outgoing), *pieces))

    def view(self, change: SplitChange) -> tuple[int, ...]:
        """Return the shape of a device's part with an axis for each digit, of length 1 if split.

        After its digits each dimension has an axis for the part that is never split.
        """
        held = iter(change.source)
        view = []
        for size, sizes in zip(self.shape, change.digits, strict=True):
            view += [radix if next(held) is None else 1 for radix in sizes]
            view.append(size // math.prod(sizes))
        return tuple(view)

    def spec(self, *, stacked: bool = False, outgoing: bool = False) -> PartitionSpec:
        """Return the split of the leaf's arrays over the mesh of the grid."""
        if (self.leaves if outgoing else self.enters) is not None:
            return PartitionSpec(self.names)
        change = self.changes[-1 if outgoing else 0]
        held = iter(change.target if outgoing else change.source)
        split = []
        for sizes in change.digits:
            own = [next(held) for _ in sizes]
            split.append(tuple(self.names[axis] for axis in own if axis is not None))
        return PartitionSpec(*([None] if stacked else []), *split)


def split_changes(
    shape: tuple[int, ...], before: Split, after: Split, sizes: tuple[int, ...]
) -> tuple[SplitChange, ...]:
    """Return the changes from one split to another over a grid."""
    splits = [before, after]
    if digits_of(splits, sizes) is None:
        # parts of 1/2 and of 1/3, for example: a split in between that agrees with both
        agreed = _agreed_part(before, after, sizes)
        splits.insert(1, spread(shape, agreed, splits, sizes=sizes, axes=range(len(sizes))))
    changes = []
    for pair in itertools.pairwise(splits):
        digits = digits_of(pair, sizes)
        assert digits is not None, "A split in between agrees with both."
        source, target = (
            tuple(
                axes[place] if place < len(axes) else None
                for axes, own in zip(split, digits, strict=True)
                for place in range(len(own))
            )
            for split in pair
        )
        changes.append(SplitChange(sizes, digits, source, target))
    return tuple(changes)


def _agreed_part(split: Split, wanted: Split, sizes: Sequence[int]) -> Split:
    """Return the first digits of a split's dimensions that agree with `wanted`."""
    agreed = []
    for own, other in zip(split, wanted, strict=True):
        pairs = itertools.zip_longest(own, other[: len(own)])
        agrees = [there is None or sizes[one] == sizes[there] for one, there in pairs]
        agreed.append(own[: [*agrees, False].index(False)])
    return tuple(agreed)
