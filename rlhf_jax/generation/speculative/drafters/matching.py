"""Find matches of the end of a row's text in a corpus, and read their continuations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.types import Array

LONGEST_MATCH = 8  # Most tokens that are compared before the text's end.


def match_length(state: DecodeState, corpus: Array) -> jax.Array:
    """Count [B, C] int32 the tokens up to each place of corpus [B, C] that equal the text's end.

    The token at the place itself counts. At most LONGEST_MATCH tokens are compared.
    """
    # The last known tokens, the last one first; -2, which equals nothing, before the text's start.
    back = state.length[:, None] - 1 - jnp.arange(LONGEST_MATCH, dtype=jnp.int32)
    known = jnp.take_along_axis(state.tokens, jnp.maximum(back, 0), axis=1)
    end = jnp.where(back >= 0, known, -2)

    padded = jnp.pad(corpus, ((0, 0), (LONGEST_MATCH - 1, 0)), constant_values=-1)
    length = jnp.zeros_like(corpus)
    for i in reversed(range(LONGEST_MATCH)):
        start = LONGEST_MATCH - 1 - i
        equal = padded[:, start : start + corpus.shape[1]] == end[:, i, None]
        length = jnp.where(equal, length + 1, 0)
    return length


def is_followed(corpus: Array) -> jax.Array:
    """Return [B, C] bool whether the token after a place of corpus [B, C] is known (not -1)."""
    return jnp.pad(corpus[:, 1:] >= 0, ((0, 0), (0, 1)))


def best_places(score: Array) -> tuple[jax.Array, jax.Array]:
    """Return the RANKS largest of score [B, C] int32 and their places, both [B, R].

    Scores other than 0 must be distinct, and below 2**24.
    """
    # On a CPU, XLA sorts whole rows, forty times slower, for integers (float32 is exact below
    # 2**24) and for a reader that slices: hence the barrier.
    top, where = jax.lax.top_k(score.astype(jnp.float32), RANKS)
    # One by one: XLA's partitioner of a top-k aborts if both are read at once (jax 0.10.2).
    top = jax.lax.optimization_barrier(top)
    where = jax.lax.optimization_barrier(where)
    return top.astype(jnp.int32), where


def continuations(
    corpus: Array, where: Array, usable: Array, depth: int, period: Array
) -> jax.Array:
    """Return the `depth` tokens after places [B, R] of corpus [B, C], [B, depth, R] int32.

    They repeat after period [B, R] tokens. They are -1 once unknown, and where not usable [B, R].
    """
    steps = jnp.arange(depth, dtype=jnp.int32)[:, None] % jnp.maximum(period, 1)[:, None]
    index = where[:, None] + 1 + steps
    size = corpus.shape[1]
    rows = jnp.arange(len(corpus), dtype=jnp.int32)[:, None, None]
    found = jnp.where(index < size, corpus[rows, jnp.minimum(index, size - 1)], -1)
    ended = jnp.cumsum(found < 0, axis=1, dtype=jnp.int32) > 0  # A separator ends a continuation.
    return jnp.where(ended | ~usable[:, None], -1, found)
