"""Draft by lookup: the continuation of the longest earlier match of the text's end.

It is prompt lookup (Saxena 2023). The corpus of a row is the latest roll-outs of other prompts, the
earlier ones of the same prompt, the running samples of that prompt and its own text. No model is
needed that could grow stale.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative.drafters.search import (
    Found,
    SearchDrafter,
    best_places,
    continuations,
    is_followed,
    match_length,
)
from rlhf_jax.types import Array

# Matched tokens from which a row is of confidence class 1, 2 and 3.
CONFIDENT_MATCHES = (1, 2, 4)


class LookupDrafter(SearchDrafter):
    """Draft the continuation of the longest earlier match of the text's end."""

    name = "lookup"
    needs_history = True
    branches = True

    def search(self, state: DecodeState, siblings: Array, depth: int) -> Found:
        """Return the next `depth` tokens after the longest matches, later ones before earlier ones.

        The class is the length of the best match: 0 none, 1 one token, 2 two or three, 3 four or
        more. A match in the row's own text that runs into the text's end goes on with its own
        draft, as repetition does (Ziv, Lempel 1977).
        """
        chex.assert_rank([siblings, state.tokens, state.history], 2)
        # The texts to search: earlier ones, siblings' and last the row's own, separated by -1,
        # which also marks unknown tokens.
        slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
        own = jnp.where(slots < state.length[:, None], state.tokens, -1)
        others = jnp.where((siblings >= 0)[..., None], own[jnp.maximum(siblings, 0)], -1)
        others = jnp.pad(others, ((0, 0), (0, 0), (1, 0)), constant_values=-1)
        texts = [state.history, others.reshape(len(own), -1), jnp.full_like(own[:, :1], -1), own]
        # Materialised once: fused into its readers it would be recomputed for every compared token.
        corpus = jax.lax.optimization_barrier(jnp.concatenate(texts, axis=1))  # [B, C] int32

        size = corpus.shape[1]
        place = jnp.arange(size, dtype=jnp.int32)
        matched = jnp.where(is_followed(corpus), match_length(state, corpus), 0)
        score, where = best_places(jnp.where(matched > 0, matched * size + place, 0))

        own_start = size - state.tokens.shape[1]
        last = (own_start + state.length - 1)[:, None]
        period = jnp.where(where >= own_start, last - where, depth)
        tokens = continuations(corpus, where, score > 0, depth, period=period)
        longest = score[:, :1] // size
        edges = jnp.array(CONFIDENT_MATCHES, jnp.int32)
        return Found(tokens, (longest >= edges).sum(axis=1, dtype=jnp.int8))


LOOKUP = LookupDrafter()
