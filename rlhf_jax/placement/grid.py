"""Cut the devices of two meshes into one grid of small axes, and weights into digits over it.

Devices are numbered in the order of their mesh. An axis of the grid is a digit of that number. A
split dimension has digits, too: the first is the index of the largest part that contains an entry.
A split assigns each digit an axis of the grid, or none if every device has all its values.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Axes of a mesh or of a grid that split each dimension of a leaf, the major ones first.
Split = tuple[tuple[int, ...], ...]


class Grid(NamedTuple):
    """Hold the small axes that two meshes over the same devices have in common."""

    # of the small axes, major first: digits of a device's number in the source
    sizes: tuple[int, ...]
    # the small axes of each axis of a mesh
    source: Split
    target: Split


@functools.cache
def common_grid(
    source: tuple[int, ...], target: tuple[int, ...], order: tuple[int, ...]
) -> Grid | None:
    """Return the common grid of two meshes, of prime sizes; None if there is none.

    source, target: their sizes. order: the number in the source of each device of the target.
    """
    count = len(order)
    strides = set(_strides(target)) | set(_strides(source))
    ordered = sorted(strides, reverse=True)
    if any(large % small for large, small in itertools.pairwise(ordered)):
        strides = set(_strides(target))
    primes = _primes(strides)
    sizes = [size for _, size in primes]
    starts = [order[stride] for stride, _ in primes]
    ranks = sorted(range(len(primes)), key=lambda place: -starts[place])
    numbers = np.reshape(order, sizes).transpose(ranks).ravel()
    own = _strides([sizes[rank] for rank in ranks])[1:]
    if not np.array_equal(numbers, np.arange(count)) or not set(_strides(source)) <= {count, *own}:
        return None
    of_source = _small_axes(source, dict(zip(own, range(len(own)), strict=True)))
    place = {primes[rank][0]: axis for axis, rank in enumerate(ranks)}
    return Grid(tuple(sizes[rank] for rank in ranks), of_source, _small_axes(target, place))


def over_grid(split: Split, axes: Split) -> Split:
    """Convert a split over a mesh to one over a grid; axes: the small ones of each of the mesh."""
    return tuple(tuple(small for one in own for small in axes[one]) for own in split)


def digits_of(splits: Sequence[Split], sizes: Sequence[int]) -> Split | None:
    """Return the sizes of each dimension's digits under some splits; None if they differ."""
    digits = []
    for dimension in zip(*splits, strict=True):
        radices = [tuple(sizes[axis] for axis in axes) for axes in dimension]
        longest = max(radices, key=len)
        if any(one != longest[: len(one)] for one in radices):
            return None
        digits.append(longest)
    return tuple(digits)


def spread(
    shape: tuple[int, ...],
    split: Split,
    wanted: Sequence[Split],
    sizes: Sequence[int],
    axes: Sequence[int],
    parts: Sequence[int] = (),
) -> Split:
    """Return a split with more of `axes` of the grid, whose digits agree with those of `wanted`.

    An unused axis splits the same dimension as in a wanted split, or else the longest dimension; if
    none can be split so, it stays unused. parts: the current number of parts by dimension; cutting
    few of them has priority.
    """
    result = [list(own) for own in split]
    left = set(axes) - set(itertools.chain.from_iterable(split))
    # An axis that divides no number of parts cuts them all: it is the last digit.
    for axis in sorted(left, key=lambda axis: (all(one % sizes[axis] for one in parts), axis)):
        ranks = {}
        for place, own in enumerate(result):
            count = math.prod(sizes[one] for one in (*own, axis))
            there = [other[place][len(own)] for other in wanted if len(own) < len(other[place])]
            if shape[place] % count == 0 and all(sizes[one] == sizes[axis] for one in there):
                keeps = bool(parts) and parts[place] % count == 0
                ranks[place] = (keeps, axis in there, shape[place] // count)
        if ranks:
            result[max(ranks, key=ranks.__getitem__)].append(axis)
    return tuple(map(tuple, result))


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return the stride of each axis in device numbers, preceded by the number of devices."""
    count = int(np.prod(sizes))
    return [count, *(count // int(part) for part in np.cumprod(sizes))]


def _primes(strides: set[int]) -> list[tuple[int, int]]:
    """Return strides and sizes of axes of prime sizes between strides, the major ones first."""
    primes = []
    for large, small in itertools.pairwise(sorted(strides, reverse=True)):
        left = large
        while left > small:
            size = next(prime for prime in range(2, left + 1) if left // small % prime == 0)
            left //= size
            primes.append((left, size))
    return primes


def _small_axes(sizes: Sequence[int], places: dict[int, int]) -> Split:
    """Return the small axes of each axis of a mesh; places: of their strides, in the grid."""
    return tuple(
        tuple(places[one] for one in sorted(places, reverse=True) if small <= one < large)
        for large, small in itertools.pairwise(_strides(sizes))
    )
