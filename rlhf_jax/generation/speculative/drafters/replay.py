"""Draft by replay: the earlier text of the same noise, from the current position.

With repeated noise of (sample, position), a slightly changed policy draws almost the same text.
Drafts are verified draw by draw like any others, so the text is that of plain decoding.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative.drafters.search import (
    LONGEST_MATCH,
    Found,
    SearchDrafter,
    best_places,
    continuations,
    is_followed,
    match_length,
)
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.types import Array

FOLLOWS_EARLIER = 3  # The confidence class of a text that follows its earlier one.
# A text follows its earlier one while this many last tokens are equal, position by position.
ALIGNED = 4
# Least match elsewhere to leave the position: the noise is the same only there.
REALIGNED = 2


class ReplayDrafter(SearchDrafter):
    """Draft the earlier text of the same noise."""

    name = "replay"
    needs_earlier = True
    first_confidence = FOLLOWS_EARLIER
    packs = True

    def search(self, state: DecodeState, siblings: Array, depth: int) -> Found:
        """Return the next `depth` tokens of the earlier text, by position or after a match.

        The position is left only for a match that is longer than the agreement there, never while
        the last ALIGNED tokens (or all so far) agree; among equal matches the nearest is first. The
        class: 0 nothing is known, 1 by position although the text has just differed, 2 realigned, 3
        by position and the text follows.
        """
        chex.assert_rank([state.earlier, state.tokens], 2)
        rows, size = state.earlier.shape
        if not size:
            nothing = jnp.full((rows, depth, RANKS), -1, jnp.int32)
            return Found(nothing, jnp.zeros((rows,), jnp.int8))

        # Matching tokens up to each place of the earlier text; while the text follows, its own
        # position outranks any match, and it always counts one token.
        distance = jnp.arange(size, dtype=jnp.int32) - (state.length - 1)[:, None]
        matched = match_length(state, state.earlier)
        aligned = matched >= jnp.minimum(state.length, ALIGNED)[:, None]
        here = jnp.where(aligned, LONGEST_MATCH + 1, jnp.maximum(matched, 1))
        elsewhere = jnp.where(matched >= REALIGNED, matched, 0)
        matched = jnp.where(distance == 0, here, elsewhere)
        matched = jnp.where(is_followed(state.earlier), matched, 0)

        # The longest match is first, of equal ones the nearest.
        span = 2 * (size + state.tokens.shape[1])
        nearness = span - 2 * jnp.abs(distance) + (distance > 0).astype(jnp.int32)
        score, where = best_places(jnp.where(matched > 0, matched * 2 * span + nearness, 0))
        whole = jnp.full_like(where, depth)
        tokens = continuations(state.earlier, where, score > 0, depth, period=whole)

        by_position = where[:, 0] == state.length - 1
        follows = score[:, 0] // (2 * span) > LONGEST_MATCH
        kind = jnp.where(by_position, jnp.where(follows, FOLLOWS_EARLIER, 1), 2)
        return Found(tokens, jnp.where(score[:, 0] > 0, kind, 0).astype(jnp.int8))


REPLAY = ReplayDrafter()
