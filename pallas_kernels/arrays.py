"""Define what all kernels share: the type of the cache, and the check of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

# A cache is a tuple over layers; one layer is (k [B, G, D, T], v [B, G, T, D]), row first.
LayerCache = tuple[Array, Array]
Cache = tuple[LayerCache, ...]

# A logit that adds nothing to a sum of exponentials, but whose multiples and differences are
# finite.
LOWEST = -1e30


def check_ranks(arrays: Sequence[ArrayLike], ranks: Sequence[int]) -> None:
    """Assert that arrays have these ranks; raises AssertionError."""
    for number, (array, rank) in enumerate(zip(arrays, ranks, strict=True)):
        shape = jnp.shape(array)
        assert len(shape) == rank, (
            f"Input {number} has rank {len(shape)} (shape {shape}), but rank {rank} is expected."
        )
