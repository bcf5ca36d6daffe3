"""Keep models that do not work in the memory of their hosts."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

ASIDE = "pinned_host"
AT_WORK = "device"

T = TypeVar("T")


def put_aside(model: T) -> T:
    """Return a model in pinned memory of the hosts of its devices, split as it was."""
    return jax.tree.map(lambda leaf: _moved(leaf, ASIDE), model)


def fetched(model: T) -> T:
    """Return a model on its devices, to which it is on its way; one that is there stays.

    It may be handed to programs at once: they begin when it has arrived. Of shapes it is shapes.
    """

    def move(leaf: jax.Array) -> jax.Array:
        waits = getattr(leaf.sharding, "memory_kind", None) == ASIDE
        return _moved(leaf, AT_WORK) if waits else leaf

    return jax.tree.map(move, model)


def _moved(leaf: Any, kind: str) -> Any:
    """Return an array in the memory of a kind; of a shape it is a shape."""
    place = leaf.sharding.with_memory_kind(kind)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=place)
    return jax.device_put(leaf, place)
