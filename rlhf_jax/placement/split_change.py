"""Change the split of one leaf over the same devices, moving as few bytes as possible.

Inside a program of one device a leaf has an axis for each digit (`grid`) of a dimension, of length
1 if an axis of the grid has it. Cutting unneeded data is free; digits change axes in one exchange;
digits that become whole are gathered last. So each device receives exactly the missing entries of
its new part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.placement.grid import Split

# The axis of the grid that has each digit; None: every device has all its values.
Held = tuple[int | None, ...]


class Swap(NamedTuple):
    """Describe an axis that gives up a digit, which becomes whole, while another digit is split."""

    old: int
    new: int
    # the axis that will have the new digit, and the one that had the old one
    first: int
    last: int


class Steps(NamedTuple):
    """Hold the steps of a split change: cut, exchange, gather."""

    # (digit, axis): a device keeps the value of its number along the axis
    cuts: tuple[tuple[int, int], ...]
    # for each axis, the axis along which a receiver has its sender's number
    senders: tuple[int, ...]
    swaps: tuple[Swap, ...]
    # (digit, axis): each device gets all values from the devices along the axis
    gathers: tuple[tuple[int, int], ...]

    @property
    def turns(self) -> bool:
        """Return whether a digit goes from one axis to another."""
        return self.senders != tuple(range(len(self.senders)))


class SplitChange(NamedTuple):
    """Describe the split of one leaf over a grid before and after."""

    # of the axes of the grid
    sizes: tuple[int, ...]
    # the sizes of each dimension's digits
    digits: Split
    source: Held
    target: Held

    @property
    def radices(self) -> tuple[int, ...]:
        """Return the sizes of all digits."""
        return tuple(itertools.chain.from_iterable(self.digits))

    @property
    def places(self) -> tuple[int, ...]:
        """Return the axis of each digit in a leaf with one axis per digit."""
        dimensions = enumerate(self.digits)
        # after its digits each dimension has an axis for the part that is never split
        owners = [dimension for dimension, sizes in dimensions for _ in sizes]
        return tuple(digit + dimension for digit, dimension in enumerate(owners))

    @property
    def steps(self) -> Steps:
        """Return the steps: digits that stay split go along paths of axes, and in circles.

        A path begins at an axis that receives no digit from another, and ends at one whose own
        digit no other receives; the end passes to the beginning to close the circle.
        """
        held = {axis: digit for digit, axis in enumerate(self.source) if axis is not None}
        wanted = {axis: digit for digit, axis in enumerate(self.target) if axis is not None}
        # the axis to which each axis passes a digit that stays split
        ends = zip(self.source, self.target, strict=True)
        gives = {axis: end for axis, end in ends if axis is not None and end is not None}
        senders = [gives.get(axis, axis) for axis in range(len(self.sizes))]
        cuts = []
        swaps = []
        gathers = []
        for first in sorted(set(range(len(senders))) - set(gives.values())):
            last = first
            while last in gives:
                last = gives[last]
            new = wanted.get(first)
            old = held.get(last)
            senders[last] = first
            if new is not None and old is not None:
                swaps.append(Swap(old, new, first, last))
            elif new is not None:
                cuts.append((new, last))
            elif old is not None:
                gathers.append((old, first))
        return Steps(tuple(cuts), tuple(senders), tuple(swaps), tuple(gathers))

    def rounds(self) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """Return, for each round of an exchange, the offsets of swaps, and (sender, receiver)s.

        A sender's number along the end of a path is its receiver's along the beginning, plus the
        offset.
        """
        steps = self.steps
        numbers = np.indices(self.sizes).reshape(len(self.sizes), -1)
        for offsets in itertools.product(*(range(self.sizes[swap.last]) for swap in steps.swaps)):
            sender = numbers[list(steps.senders)]
            for swap, offset in zip(steps.swaps, offsets, strict=True):
                sender[swap.last] = (sender[swap.last] + offset) % self.sizes[swap.last]
            origins = np.asarray(np.ravel_multi_index(tuple(sender), self.sizes)).tolist()
            yield offsets, list(zip(origins, range(len(origins)), strict=True))


def change_split(x: jax.Array, change: SplitChange, names: tuple[str, ...]) -> jax.Array:
    """Return a device's part of a leaf after a split change, inside `shard_map`.

    x: its part before, digit by digit. names: of the grid's axes.
    """
    steps = change.steps
    for digit, axis in steps.cuts:
        number = jax.lax.axis_index(names[axis])
        x = jax.lax.dynamic_slice_in_dim(x, number, 1, change.places[digit])
    if steps.turns:
        x = _exchange(x, steps, change, names)
    elif steps.swaps:
        x = _swap_all(x, steps, change, names)
    if not steps.gathers:
        return x
    parts = jax.lax.all_gather(x, tuple(names[axis] for _, axis in steps.gathers))
    sizes = [change.radices[digit] for digit, _ in steps.gathers]
    places = [change.places[digit] for digit, _ in steps.gathers]
    # the digits' own axes have length 1
    parts = parts.reshape(*sizes, *np.delete(x.shape, places).tolist())
    order = np.argsort(places)
    return jnp.moveaxis(parts, order.tolist(), np.sort(places).tolist())


def _swap_all(x: jax.Array, steps: Steps, change: SplitChange, names: tuple[str, ...]) -> jax.Array:
    """Swap digits of the same axes, all in one all-to-all."""
    new = [change.places[swap.new] for swap in steps.swaps]
    old = [change.places[swap.old] for swap in steps.swaps]
    sizes = [change.radices[swap.new] for swap in steps.swaps]
    parts = jnp.moveaxis(x, new, range(len(new)))
    parts = parts.reshape(-1, *parts.shape[len(new) :])
    along = tuple(names[swap.first] for swap in steps.swaps)
    parts = jax.lax.all_to_all(parts, along, 0, concat_axis=0, tiled=True)
    parts = parts.reshape(*sizes, *parts.shape[1:])
    order = list(range(x.ndim))
    for one, other in zip(new, old, strict=True):
        order[one] = other
        order[other] = one
    # the axes that now count old digits move to the old digits' places
    return jnp.moveaxis(parts, range(len(new)), new).transpose(order)


def _exchange(x: jax.Array, steps: Steps, change: SplitChange, names: tuple[str, ...]) -> jax.Array:
    """Send digits from axis to axis, one round for each value of the digits that are swapped."""
    own = [jax.lax.axis_index(name) for name in names]
    result: jax.Array | None = None
    for offsets, pairs in change.rounds():
        part = x
        for swap, offset in zip(steps.swaps, offsets, strict=True):
            value = (own[swap.last] - offset) % change.sizes[swap.last]
            part = jax.lax.dynamic_slice_in_dim(part, value, 1, change.places[swap.new])
        part = jax.lax.ppermute(part, names, pairs)
        if not steps.swaps:
            return part
        if result is None:
            shape = list(part.shape)
            for swap in steps.swaps:
                shape[change.places[swap.old]] = change.sizes[swap.last]
            result = jnp.zeros(shape, x.dtype)
        start = [jnp.zeros((), jnp.int32)] * x.ndim
        for swap, offset in zip(steps.swaps, offsets, strict=True):
            value = (own[swap.first] + offset) % change.sizes[swap.last]
            start[change.places[swap.old]] = value
        result = jax.lax.dynamic_update_slice(result, part, start)
    assert result is not None, "There is at least one round."
    return result


def received(change: SplitChange, size: int) -> int:
    """Count the entries received from other devices as a leaf of `size` entries is resplit."""
    steps = change.steps
    count = math.prod(change.sizes)
    held = [change.radices[digit] for digit, axis in enumerate(change.source) if axis is not None]
    part = size // math.prod(held)
    part //= math.prod(change.radices[digit] for digit, _ in steps.cuts)
    values = math.prod(change.sizes[swap.last] for swap in steps.swaps)
    entries = 0
    if steps.turns:
        pairs = [pair for _, pairs in change.rounds() for pair in pairs]
        entries += sum(origin != end for origin, end in pairs) * (part // values)
    else:
        entries += count * (part - part // values)
    copies = math.prod(change.radices[digit] for digit, _ in steps.gathers)
    return entries + count * part * (copies - 1)
