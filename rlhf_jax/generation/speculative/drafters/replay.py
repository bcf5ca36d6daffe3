"""Drafts by replay: the text that the same noise gave before, read on from where this one stands.

With the noise of (sample, position) repeated, a slightly changed policy draws almost the same text.
Drafts are verified draw by draw as any others: the text is what plain decoding gives.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters.lookup import (
    LONGEST,
    Found,
    best,
    continuations,
    fill,
    followed,
    match_length,
    text_end,
)
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.mesh import pin_rows
from rlhf_jax.types import Array, DecodeState, Strategy

FOLLOWS = 3  # the class of a text that follows its earlier one
ALIGNED = 4  # tokens in a row that are equal, by position, in a text that follows its earlier one
# tokens that must match elsewhere to leave the position: noise is the same only there
REALIGNED = 2


@functools.partial(jax.jit, static_argnames=("strategy", "mesh"))
def propose(state: DecodeState, strategy: Strategy, mesh=None) -> tuple[Array, Array]:
    """(drafts [B, bucket - 1] int32 for the strategy's nodes, -1 where the earlier text has none;
    class [B]).
    """
    depth = int(trees.depths(strategy).max())
    found = search(state, depth)
    return pin_rows((fill(strategy, found.tokens), found.confidence), mesh)


def search(state: DecodeState, depth: int) -> Found:
    """The next `depth` tokens of the earlier text: by position, or after the longest match of the
    text's end.

    The position is left only for a match that is longer than the agreement there, never while the
    last ALIGNED tokens (or all so far) agree; among equal matches the nearest is first. The class:
    0 nothing is known, 1 by position although the text has just differed, 2 realigned, 3 by
    position and the text follows.
    """
    chex.assert_rank([state.earlier, state.tokens], 2)
    rows, size = state.earlier.shape
    if not size:
        return Found(jnp.full((rows, depth, RANKS), -1, jnp.int32), jnp.zeros((rows,), jnp.int8))
    distance = jnp.arange(size, dtype=jnp.int32) - (state.length - 1)[:, None]
    worth = jnp.where(followed(state.earlier), _worth(state, distance), 0)
    span = 2 * (size + state.tokens.shape[1])
    nearness = span - 2 * jnp.abs(distance) + (distance > 0).astype(jnp.int32)
    score, where = best(jnp.where(worth > 0, worth * 2 * span + nearness, 0))
    tokens = continuations(state.earlier, where, score > 0, depth, jnp.full_like(where, depth))
    by_position = where[:, 0] == state.length - 1
    kind = jnp.where(by_position, jnp.where(score[:, 0] // (2 * span) > LONGEST, FOLLOWS, 1), 2)
    return Found(tokens, jnp.where(score[:, 0] > 0, kind, 0).astype(jnp.int8))


def _worth(state: DecodeState, distance: Array) -> Array:
    """[B, E] int32 the match length at each place, 0 unless usable; LONGEST + 1 by position while
    the text follows.
    """
    decide_together = match_length(state.earlier, text_end(state))
    follows = decide_together >= jnp.minimum(state.length, ALIGNED)[:, None]
    by_position = jnp.where(follows, LONGEST + 1, jnp.maximum(decide_together, 1))
    return jnp.where(
        distance == 0, by_position, jnp.where(decide_together >= REALIGNED, decide_together, 0)
    )
