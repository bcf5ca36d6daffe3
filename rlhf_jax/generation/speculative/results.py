"""Copy a round's results to the host as one array, since each transfer has a fixed cost."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.speculative.budget import BudgetShare
from rlhf_jax.generation.speculative.drafters.hindsight import Hindsight
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.types import Array, Emission


class Results(NamedTuple):
    """Hold a round's results for the host."""

    emission: Emission
    confidence: Array | None  # [B] int8, of its own drafts, if the drafter does not search
    budget_share: BudgetShare | None  # of a round with a budget of drafts
    hindsight: dict[str, Hindsight]  # by name, of the drafters that search, if requested


@functools.partial(jax.jit, static_argnames=("layout",))
def as_words(results: Results, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Return the results' leaves, row-first and of at most 32 bits, as one array [B, W] int32."""

    def words(leaf: Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        floats = leaf.dtype == jnp.float32
        whole = jax.lax.bitcast_convert_type(leaf, jnp.int32) if floats else leaf.astype(jnp.int32)
        return whole.reshape(len(leaf), -1)

    joined = jnp.concatenate([words(leaf) for leaf in jax.tree.leaves(results)], axis=1)
    # Each host that shares the devices reads all rows.
    return meshes.repeat(joined, layout) if layout.is_shared else meshes.pin_rows(joined, layout)


def from_words(words: np.ndarray, results: Results) -> Results:
    """Split what `as_words` joined into host arrays, with the shapes of `results`.

    Whole numbers are int32, however small they were.
    """
    leaves, treedef = jax.tree.flatten(results)
    parts = []
    start = 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape[1:])
        part = words[:, start:end].reshape(leaf.shape)
        if leaf.dtype == np.float32:
            part = part.view(np.float32)
        parts.append(part.astype(bool) if leaf.dtype == bool else part)
        start = end
    return jax.tree.unflatten(treedef, parts)
