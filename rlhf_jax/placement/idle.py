"""Keep models that do not work in the memory of their hosts."""

from __future__ import annotations

from typing import TypeVar

import jax

ASIDE = "pinned_host"
AT_WORK = "device"

T = TypeVar("T")


def put_aside(model: T) -> T:
    """Return a model in pinned memory of the hosts of its devices, split as it was."""
    return _in_memory(model, ASIDE)


def fetched(model: T) -> T:
    """Return a model on its devices, to which it is on its way; one that is there stays.

    It may be handed to programs at once: they begin when it has arrived.
    """
    return _in_memory(model, AT_WORK)


def fetched_shapes(model: T) -> T:
    """Return the shapes of a model where `fetched` brings it, and bring nothing."""

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        place = leaf.sharding.with_memory_kind(AT_WORK)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape, model)


def _in_memory(model: T, kind: str) -> T:
    """Return a tree of arrays in the memory of a kind; those that are there stay as they are."""

    def move(leaf: jax.Array) -> jax.Array:
        place = leaf.sharding
        if place.memory_kind == kind:
            return leaf
        return jax.device_put(leaf, place.with_memory_kind(kind))

    return jax.tree.map(move, model)
