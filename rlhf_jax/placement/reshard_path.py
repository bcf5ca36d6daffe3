"""Find the path of one leaf from its devices and split to new ones.

Everything is in numbers of devices, so a path may be planned for absent devices.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf_jax.placement.grid import Split, common_grid, over_grid, spread
from rlhf_jax.placement.reshard_step import Placing, ReshardStep, split_changes
from rlhf_jax.placement.split_change import received


class ReshardPath(NamedTuple):
    """Hold the path of a leaf: split change, pieces sent to other devices, split change there."""

    first: ReshardStep
    # for each device of the second step, its pieces: (id of the sender, number of the piece there)
    crossing: tuple[tuple[tuple[int, int], ...], ...] = ()
    # None if nothing crosses
    second: ReshardStep | None = None
    # (id of a device of the second step, id of another that shall hold the same)
    copies: tuple[tuple[int, int], ...] = ()


class BytesMoved(NamedTuple):
    """Hold the bytes of weights that go from device to device."""

    # the missing part of the new parts: less is impossible
    needed: int
    received: int


@functools.lru_cache(maxsize=4096)
def find_path(shape: tuple[int, ...], source: Placing, target: Placing) -> ReshardPath:
    """Return the path of a leaf: at most one copy crosses to other devices, in parts.

    Devices that stay, but whose two meshes have no common grid, send to each other, too.
    """
    source = _narrowed(source, target)
    same = set(source.devices) == set(target.devices)
    path = _stay(shape, source, target) if same else None
    source = source.on_grid
    target = target.on_grid
    if path is None:
        receiving = _receiving(shape, source.parts, target)
        path = _cross(shape, source, target, receiving=receiving)
    if _received(path) <= 2 * missing_entries(shape, source, target):
        return path
    # Some devices have much of their parts already: each gets only what it lacks, and no copy is
    # shared.
    return _cross(shape, source, target, receiving=target)


def traffic(shape: tuple[int, ...], source: Placing, target: Placing) -> BytesMoved:
    """Count the entries of a leaf that go from device to device."""
    path = find_path(shape, source, target)
    return BytesMoved(missing_entries(shape, source, target), _received(path))


def _received(path: ReshardPath) -> int:
    """Count the entries that devices receive from others on a path."""
    changes = path.first.changes
    entries = 0
    if path.second is not None:
        changes += path.second.changes
        size = math.prod(path.second.part_shape())
        for device, pieces in zip(path.second.devices, path.crossing, strict=True):
            entries += size * sum(sender != device for sender, _ in pieces)
        entries += len(path.copies) * math.prod(path.second.part_shape(outgoing=True))
    return entries + sum(received(change, math.prod(path.first.shape)) for change in changes)


def missing_entries(shape: tuple[int, ...], source: Placing, target: Placing) -> int:
    """Count the entries of devices' new parts that they do not already hold."""
    before = dict(zip(source.devices, source.bounds(shape), strict=True))
    entries = 0
    for device, bounds in zip(target.devices, target.bounds(shape), strict=True):
        entries += math.prod(end - start for start, end in bounds)
        if device in before:
            pairs = zip(bounds, before[device], strict=True)
            both = [min(a[1], b[1]) - max(a[0], b[0]) for a, b in pairs]
            entries -= math.prod(max(0, length) for length in both)
    return entries


def _narrowed(source: Placing, target: Placing) -> Placing:
    """Return a source without the repetitions that are not on devices of the target.

    Repetitions are along axes of the mesh that do not split the leaf.
    """
    devices = np.reshape(source.devices, source.sizes)
    wanted = np.isin(devices, target.devices)
    for axis in set(range(devices.ndim)) - _axes(source.split):
        others = tuple(other for other in range(devices.ndim) if other != axis)
        (indices,) = np.nonzero(wanted.any(axis=others))
        if len(indices):
            devices = devices.take(indices, axis)
            wanted = wanted.take(indices, axis)
    return Placing(tuple(devices.ravel().tolist()), devices.shape, source.split)


def _stay(shape: tuple[int, ...], source: Placing, target: Placing) -> ReshardPath | None:
    """Return the path on the same devices, possibly in another order."""
    order = tuple(map(source.devices.index, target.devices))
    grid = common_grid(source.sizes, target.sizes, order)
    if grid is None:
        return None
    before = over_grid(source.split, grid.source)
    after = over_grid(target.split, grid.target)
    changes = split_changes(shape, before, after, sizes=grid.sizes)
    return ReshardPath(ReshardStep(shape, source.devices, changes))


def _cross(
    shape: tuple[int, ...], source: Placing, target: Placing, receiving: Placing
) -> ReshardPath:
    """Return the path on which each block of a leaf goes to its receiver, and is resplit there.

    Blocks are the largest that both sides' parts consist of. Other devices of the target get their
    copies from the receivers.
    """
    counts = tuple(map(math.lcm, source.parts, receiving.parts))
    still = split_changes(shape, source.split, source.split, source.sizes)
    changes = split_changes(shape, receiving.split, target.split, receiving.sizes)
    firsts = np.reshape(receiving.devices, receiving.sizes)
    everywhere = np.broadcast_to(firsts, target.sizes).ravel().tolist()
    pairs = zip(everywhere, target.devices, strict=True)
    return ReshardPath(
        ReshardStep(shape, source.devices, still, leaves=_quotients(counts, source.parts)),
        _senders(counts, source, receiving),
        ReshardStep(shape, receiving.devices, changes, enters=_quotients(counts, receiving.parts)),
        copies=tuple((first, other) for first, other in pairs if first != other),
    )


def _quotients(counts: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.floordiv, counts, parts))


def _receiving(shape: tuple[int, ...], parts: Sequence[int], target: Placing) -> Placing:
    """Return where blocks of a leaf arrive: split over as many of a target's axes as possible.

    It cuts as few of the source's parts as possible, provided one split change then ends at the
    target's split. Otherwise, it is that split, and more. Along unused axes only the first receive.
    """
    axes = range(len(target.sizes))
    over_axes = functools.partial(spread, shape, sizes=target.sizes, axes=axes, parts=parts)
    split = over_axes(split=((),) * len(shape), wanted=(target.split,))
    if not _axes(target.split) <= _axes(split):
        split = over_axes(split=target.split, wanted=())
    return target.first_along(set(axes) - _axes(split))._replace(split=split)


def _axes(split: Split) -> set[int]:
    return set(itertools.chain.from_iterable(split))


def _senders(
    counts: tuple[int, ...], source: Placing, target: Placing
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the sender of each block of a target's devices, and the sender's piece.

    counts: of blocks by dimension. A device that has a block already keeps it. Among other holders
    the one that has sent least sends it, so that copies share the work.
    """
    holders: dict[int, list[tuple[int, int]]] = {}
    for device, blocks in zip(source.devices, source.blocks(counts), strict=True):
        for number, block in enumerate(blocks):
            holders.setdefault(block, []).append((device, number))
    sent = dict.fromkeys(source.devices, 0)
    table = []
    for receiver, blocks in zip(target.devices, target.blocks(counts), strict=True):
        row = []
        for block in blocks:
            # of those with equal counts, another one for each block
            first = block % len(holders[block])
            turned = holders[block][first:] + holders[block][:first]
            sender, number = min(turned, key=lambda one: (one[0] != receiver, sent[one[0]]))
            sent[sender] += sender != receiver
            row.append((sender, number))
        table.append(tuple(row))
    return tuple(table)
