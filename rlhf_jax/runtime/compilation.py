"""Compile programs before their arguments are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# Calls a jitted function with arguments, or compiles it for them.
Execute = Callable[..., Any]


def run_now(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function."""
    return function(*arguments, **options)


def compile_only(function: jax.stages.Wrapped, *arguments: Any, **options: Any) -> Any:
    """Compile a jitted function for arrays or shapes, and return its results as shapes."""
    given = shapes(arguments)
    lowered = function.lower(*given, **options)
    places = lowered.compile().output_shardings
    # Results are held to a place only where arguments are: else another program would be compiled
    # for them.
    held = any(getattr(leaf, "sharding", None) is not None for leaf in jax.tree.leaves(given))

    def shape(info, place):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place if held else None)

    return jax.tree.map(shape, lowered.out_info, places)


def shapes(tree: Any, rows: int | None = None) -> Any:
    """Return a tree with shapes in place of arrays, that say where what is held to a place lies.

    rows: the length of axis 0 of every leaf, where it is to be another.
    """

    def shape(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        size = leaf.shape if rows is None else (rows, *leaf.shape[1:])
        held = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(size, leaf.dtype, sharding=held)

    return jax.tree.map(shape, tree)
