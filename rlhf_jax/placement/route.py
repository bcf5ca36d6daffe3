"""Find the way of one leaf from the devices and split it has to those it shall have.

All is counted in numbers of devices, so a way may be planned for devices that are not here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf_jax.placement.grid import Grid, common_grid, over_grid, own_grid, spread
from rlhf_jax.placement.leg import Leg, Placing, recuts_between
from rlhf_jax.placement.recut import Held, received

__all__ = ["BytesMoved", "Route", "find_route", "lacking", "traffic"]


class Route(NamedTuple):
    """Say how a leaf comes to its devices: recut, sent in pieces to others, and recut there."""

    first: Leg
    # for each device of the second leg, its pieces: (id of the sender, number of the piece there)
    crossing: tuple[tuple[tuple[int, int], ...], ...] = ()
    # None where nothing crosses
    second: Leg | None = None


class BytesMoved(NamedTuple):
    """Count bytes of weights that go from device to device."""

    # what devices lack of their new parts: less is impossible
    needed: int
    received: int


@functools.lru_cache(maxsize=4096)
def find_route(shape: tuple[int, ...], source: Placing, target: Placing) -> Route:
    """Return the way of a leaf: at most one copy crosses to other devices, what it can in parts.

    Where two meshes have no grid in common, and where a leaf cannot be split over all devices that
    send and receive, it goes in whole copies.
    """
    source = _narrowed(source, target)
    same = set(source.devices) == set(target.devices)
    found = (_stay if same else _cross)(shape, source, target)
    return found or _go_whole(shape, source, target)


def traffic(shape: tuple[int, ...], source: Placing, target: Placing) -> BytesMoved:
    """Count the entries of a leaf that go from device to device."""
    route = find_route(shape, source, target)
    recuts = route.first.recuts
    found = 0
    if route.second is not None:
        recuts += route.second.recuts
        size = math.prod(route.second.part_shape())
        for device, pieces in zip(route.second.devices, route.crossing, strict=True):
            found += size * sum(sender != device for sender, _ in pieces)
    found += sum(received(recut, math.prod(shape)) for recut in recuts)
    return BytesMoved(lacking(shape, source, target), found)


def lacking(shape: tuple[int, ...], source: Placing, target: Placing) -> int:
    """Count the entries of their new parts that devices do not hold before."""
    before = dict(zip(source.devices, source.bounds(shape), strict=True))
    found = 0
    for device, bounds in zip(target.devices, target.bounds(shape), strict=True):
        found += math.prod(end - start for start, end in bounds)
        if device in before:
            pairs = zip(bounds, before[device], strict=True)
            both = [min(a[1], b[1]) - max(a[0], b[0]) for a, b in pairs]
            found -= math.prod(max(0, length) for length in both)
    return found


def _narrowed(source: Placing, target: Placing) -> Placing:
    """Return a source without repetitions that lie on no device of the target.

    Repetitions are along axes of the mesh that do not split the leaf.
    """
    devices = np.reshape(source.devices, source.sizes)
    wanted = np.isin(devices, target.devices)
    split = set(itertools.chain.from_iterable(source.split))
    for axis in set(range(devices.ndim)) - split:
        others = tuple(other for other in range(devices.ndim) if other != axis)
        (found,) = np.nonzero(wanted.any(axis=others))
        if len(found):
            devices = devices.take(found, axis)
            wanted = wanted.take(found, axis)
    return Placing(tuple(devices.ravel().tolist()), devices.shape, source.split)


def _stay(shape: tuple[int, ...], source: Placing, target: Placing) -> Route | None:
    """Return the way on the same devices, which may be in another order."""
    order = tuple(map(source.devices.index, target.devices))
    grid = common_grid(source.sizes, target.sizes, order)
    if grid is None:
        return None
    before = over_grid(source.split, grid.source)
    after = over_grid(target.split, grid.target)
    recuts = recuts_between(shape, before, after, sizes=grid.sizes)
    return Route(Leg(shape, source.devices, recuts))


def _cross(shape: tuple[int, ...], source: Placing, target: Placing) -> Route | None:
    """Return the way to other devices: all send equally many equal pieces, and so all receive.

    Devices are numbered by the axes of their mesh in orders that suit each other.
    """
    count = math.lcm(len(source.devices), len(target.devices))
    for sender, receiver in itertools.product(source.turned(), target.turned()):
        # a last axis of each mesh numbers the pieces of a device
        pieces = (count // len(source.devices), count // len(target.devices))
        sizes = ((*sender.sizes, pieces[0]), (*receiver.sizes, pieces[1]))
        grid = common_grid(*sizes, tuple(range(count)))
        if grid is not None:
            return _cross_over(shape, sender, receiver, grid=grid)
    return None


def _cross_over(
    shape: tuple[int, ...], source: Placing, target: Placing, grid: Grid
) -> Route | None:
    """Return the way in pieces, over a grid whose last axes are of the pieces of a device."""
    axes = range(len(grid.sizes))
    before = over_grid(source.split, grid.source)
    after = over_grid(target.split, grid.target)
    pieces = spread(shape, before, (after,), sizes=grid.sizes, axes=axes)
    if sum(map(len, pieces)) < len(axes):
        pieces = spread(shape, before, (), sizes=grid.sizes, axes=axes)
    if sum(map(len, pieces)) < len(axes):
        return None

    own = axes[: len(axes) - len(grid.source[-1])]
    (leaving,) = recuts_between(shape, before, pieces, sizes=grid.sizes)
    over, leaves = _own_digits(leaving.target, own)
    leaving = leaving._replace(sizes=tuple(grid.sizes[axis] for axis in own), target=over)

    own = axes[: len(axes) - len(grid.target[-1])]
    arriving, *rest = recuts_between(shape, pieces, after, sizes=grid.sizes, axes=own)
    over, enters = _own_digits(arriving.source, own)
    arriving = arriving._replace(source=over)

    sent = math.prod(grid.sizes[axis] for axis in grid.source[-1])
    numbers = [(device, number) for device in source.devices for number in range(sent)]
    taken = len(numbers) // len(target.devices)
    table = [tuple(numbers[start : start + taken]) for start in range(0, len(numbers), taken)]
    return Route(
        Leg(shape, source.devices, (leaving,), leaves=leaves),
        tuple(table),
        Leg(shape, target.devices, (arriving, *rest), enters=enters),
    )


def _own_digits(held: Held, axes: Sequence[int]) -> tuple[Held, tuple[int, ...]]:
    """Return digits over axes of devices alone, and those over the other axes, in their order."""
    over = tuple(axis if axis in axes else None for axis in held)
    rest = [(axis, digit) for digit, axis in enumerate(held) if axis not in (None, *axes)]
    return over, tuple(digit for _, digit in sorted(rest))


def _go_whole(shape: tuple[int, ...], source: Placing, target: Placing) -> Route:
    """Return the way of whole copies: gathered in the source, and cut in the target."""
    whole = ((),) * len(shape)
    legs = []
    for place in (source, target):
        grid = own_grid(place.sizes)
        split = over_grid(place.split, grid.source)
        ends = (split, whole) if place is source else (whole, split)
        legs.append(Leg(shape, place.devices, recuts_between(shape, *ends, sizes=grid.sizes)))
    table = []
    for number, device in enumerate(target.devices):
        there = device in source.devices
        table.append(((device if there else source.devices[number % len(source.devices)], 0),))
    return Route(legs[0]._replace(leaves=()), tuple(table), legs[1]._replace(enters=()))
