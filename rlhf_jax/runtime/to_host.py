"""Copy arrays to the host, whichever processes have them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.shards import owners_of, shard_on

LEADER_PIECE = 1 << 28  # bytes of an array that travel to the leader at a time


def fetch(tree: Any) -> Any:
    """Return a tree of arrays on the host, whole on every rank.

    All ranks call it if other processes have parts; arrays of some processes alone are sent by the
    first of these.
    """
    if not distributed.started():
        return jax.device_get(tree)
    leaves, kind = jax.tree.flatten(tree)
    local: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            leaves[place] = leaf if leaf.is_fully_addressable else _repeated(leaf)
            owners = owners_of(leaf.sharding)
            if distributed.is_divided() and len(owners) < distributed.count():
                local[place] = (
                    np.asarray(leaves[place]) if owners[0] == distributed.rank() else None
                )
    if local:
        gathered = distributed.gather(list(local.values()))
        for number, place in enumerate(local):
            first = owners_of(leaves[place].sharding)[0]
            leaves[place] = gathered[first][number]
    return jax.device_get(jax.tree.unflatten(kind, leaves))


def _repeated(leaf: jax.Array) -> jax.Array:
    """Return an array that is whole on each device that has a part of it."""
    if leaf.is_fully_replicated:
        return leaf
    everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # pyright: ignore[reportAttributeAccessIssue]
    return _repeat_to(everywhere)(leaf)


@functools.cache
def _repeat_to(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=everywhere)


def to_leader(tree: Any) -> Any:
    """Return a tree of arrays as numpy arrays on the leader, and Nones elsewhere.

    A large leaf comes in pieces: no device holds all of it. All ranks call it.
    """
    leaves, kind = jax.tree.flatten(tree)
    for place, leaf in enumerate(leaves):
        pieces = max(1, -(-leaf.nbytes // LEADER_PIECE)) if leaf.ndim else 1
        if pieces == 1:
            leaves[place] = _read_by_leader(leaf)
            continue
        out = np.empty(leaf.shape, leaf.dtype) if distributed.leads() else None
        step = -(-leaf.shape[0] // pieces)
        for start in range(0, leaf.shape[0], step):
            piece = _read_by_leader(leaf[start : start + step])
            if out is not None:
                out[start : start + step] = piece
        leaves[place] = out
    return jax.tree.unflatten(kind, leaves)


def _read_by_leader(leaf: jax.Array) -> np.ndarray | None:
    """Return an array whole on the leader, sent there if other processes have it."""
    whole = _repeated(leaf)
    owners = owners_of(leaf.sharding)
    if distributed.LEADER not in owners:
        first = {device.process_index: device for device in reversed(jax.devices())}
        there = [one for one in whole.sharding.device_set if one.process_index == owners[0]]
        sender = min(there, key=lambda device: device.id)
        whole = jax.device_put(shard_on(whole, sender), first[distributed.LEADER])
    return np.asarray(whole.addressable_data(0)) if distributed.leads() else None
