"""Store arrays of which only some processes have a part, by these processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.shards import owners_of, parts_elsewhere


class _OwnParts:
    """Present an array to orbax under another class.

    Orbax refuses an array of one process alone if there are several, as each might have its own of
    that name; here the others know that this one has it.
    """

    def __init__(self, array: jax.Array):
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class DividedArrays(type_handlers.ArrayHandler):
    """Store arrays that any processes hold: the first of these writes the metadata."""

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list:
        """Start writing this process's parts."""
        given = args or [ocp.SaveArgs()] * len(values)
        by_first: dict[int, list[tuple]] = {}
        for array, info, how in zip(values, infos, given, strict=True):
            if array.addressable_shards:
                first = owners_of(array.sharding)[0]
                by_first.setdefault(first, []).append((_OwnParts(array), info, how))
        started = []
        for first, own in by_first.items():
            writer = type_handlers.ArrayHandler(
                primary_host=first, enable_write_sharding_file=False
            )
            started += await writer.serialize(*map(list, zip(*own, strict=True)))
        return started


def writers() -> dict[str, Any]:
    """Return handlers that make orbax store such arrays of a tree so."""
    if not distributed.is_divided():
        return {}
    registry = type_handlers.create_type_handler_registry((jax.Array, DividedArrays()))
    return {"type_handler_registry": registry}


def own_and_others(
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.Array]]:
    """Return the arrays of which this process reads a part, and those of other processes."""
    here = jax.process_index()
    own = {name: leaf for name, leaf in wanted.items() if here in owners_of(leaf.sharding)}
    return own, {name: parts_elsewhere(wanted[name]) for name in wanted if name not in own}
