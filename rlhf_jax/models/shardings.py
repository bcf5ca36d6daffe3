"""Define the sharding of weights: mesh axes by weight table and the layout's role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from rlhf_jax.mesh import ROLES, Layout, named
from rlhf_jax.models.families import weight_at
from rlhf_jax.models.weight import WeightKind

T = TypeVar("T")


def model_shardings(tree: Any, layout: Layout) -> Any:
    """Return a `NamedSharding` for every leaf of a tree of `Model`s, by the layout's role.

    The tree is a model, its gradient, an optax state or a `Trained`; leaves are arrays or
    `ShapeDtypeStruct`s. Leaves that are not weights (counts, steps) are replicated. In role
    "training" weights are split over slices, fsdp and tensor, in role "generation" over tensor,
    repeated over the rest; in "pipelined" layers over slices, and each over fsdp and tensor. A
    dimension that its axis does not divide stays whole: see `unsplit`. Raises ValueError for a
    weight of fewer dimensions than its table names.
    """

    def shard(path: tuple, leaf: Any, spec: tuple) -> NamedSharding:
        """Return the sharding of one leaf."""
        return named(layout, layout.fit(spec, leaf.shape))

    return _map_specs(shard, tree, layout.role)


def unsplit(tree: Any, layout: Layout) -> list[str]:
    """Return a line for each dimension that stays whole as its mesh axis does not divide it.

    Arguments and errors as in `model_shardings`.
    """
    lines = []

    def tell(path: tuple, leaf: Any, wanted: tuple) -> None:
        """Add the lines of one leaf."""
        fitted = layout.fit(wanted, leaf.shape)
        for size, axes, kept in zip(leaf.shape, wanted, fitted, strict=True):
            if axes is not None and kept is None:
                lines.append(
                    f"{jax.tree_util.keystr(path)}: {size} is not divisible by"
                    f" {axes}={layout.extent(axes)}"
                )

    _map_specs(tell, tree, layout.role)
    return lines


def pin_weights(tree: T, layout: Layout) -> T:
    """Constrain a tree of `Model`s to its layout, inside a jitted function; needs a mesh."""
    if layout.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, model_shardings(tree, layout))


def _map_specs(function: Callable[[tuple, Any, tuple], Any], tree: Any, role: str) -> Any:
    """Map path, leaf and the mesh axes of each of its dimensions, over all leaves of a tree."""

    def of_weight(path: tuple, given: Any) -> Any:
        """Map the leaves of one weight of any kind, or a leaf that is not a weight."""
        weight = weight_at(path)
        axes: Any = "" if weight is None else weight.axes
        if isinstance(given, WeightKind):
            assert weight is not None, "Another kind of array stands for weights alone."
            axes = given.axes(weight)
        # A norm or a bias is not split by its width.
        whole = weight is None or not weight.is_matrix

        def of_leaf(below: tuple, leaf: Any, letters: str) -> Any:
            kept = letters.replace("M", "-") if whole else letters
            return function((*path, *below), leaf, _spec((*path, *below), leaf, kept, role))

        return jax.tree_util.tree_map_with_path(of_leaf, given, axes)

    return jax.tree_util.tree_map_with_path(
        of_weight, tree, is_leaf=lambda node: isinstance(node, WeightKind)
    )


def _spec(path: tuple, leaf: Any, axes: str, role: str) -> tuple:
    """Return the mesh axes of each dimension of a leaf; a leading one is for layers."""
    if len(axes) > leaf.ndim:
        raise ValueError(
            f"{jax.tree_util.keystr(path)} has rank {leaf.ndim}; a weight of that name has axes"
            f" {axes}."
        )
    leading = ("L" if axes else "-") * (leaf.ndim - len(axes))
    # a pipeline's weights outside the layers are split as in training, so that no slice repeats
    # them
    table = ROLES["training" if role == "pipelined" and not leading else role]
    return tuple(table.get(axis) for axis in leading + axes)
