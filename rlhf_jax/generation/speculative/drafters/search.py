"""Drafters that search known texts: how matches are found, and how they become drafts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.protocol import DraftContext, Drafter, Execute, Proposal
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.types import Array, Strategy

LONGEST_MATCH = 8  # Most tokens that are compared before the text's end.


class Found(NamedTuple):
    """Hold a search's candidates for the next K tokens: up to R = `RANKS` continuations."""

    tokens: jax.Array  # [B, K, R] int32, the best continuation first, -1 beyond known tokens
    confidence: Array  # [B] int8, the drafter's class 0..3


class SearchDrafter(Drafter):
    """Propose the results of `search`, without a model; a subclass gives a name and `search`.

    Such a drafter is cheap, so it looks back after every round of an adaptive stage: its acceptance
    is known before its first use (see `hindsight`).
    """

    has_hindsight = True

    def search(self, state: DecodeState, siblings: Array, depth: int) -> Found:
        """Return the next `depth` tokens that the drafter expects.

        It is traced, and may use `state` only up to its `length`. siblings [B, S] int32 are rows of
        `state` that hold samples of the same prompt, -1 for none.
        """
        raise NotImplementedError(f"Drafter {self.name!r} has no `search`.")

    def propose(self, execute: Execute, state: DecodeState, context: DraftContext) -> Proposal:
        """Return the best results of `search`, in one jitted call."""
        siblings = context.siblings
        return execute(propose, self, state, siblings, context.strategy, layout=context.layout)


@functools.partial(jax.jit, static_argnames=("drafter", "strategy", "layout"))
def propose(
    drafter: SearchDrafter,
    state: DecodeState,
    siblings: Array,
    strategy: Strategy,
    layout: Layout = ONE_DEVICE,
) -> Proposal:
    """Search, and place the results on the strategy's nodes.

    siblings [B, S] int32 as in `search`. Nodes beyond the end of continuations get -1. Siblings are
    distinct: rank r is the r-th different token among the continuations that agree with the path.
    The proposal has a confidence only if the drafter's rounds may have a budget.
    """
    level = trees.depths(strategy)
    results = drafter.search(state, siblings, int(level.max()))
    chex.assert_rank(results.tokens, 3)
    rank = trees.ranks(strategy)[1:]
    parent = np.array(strategy.parents, np.int32) + 1
    node = np.arange(1, len(parent) + 1, dtype=np.int32)

    def draft(
        agree: jax.Array, step: tuple[Array, Array, Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        node, parent, rank, options = step
        first = first_occurrences(options, agree[parent])
        chosen = first & (jnp.cumsum(first, axis=1, dtype=jnp.int32) == rank + 1)
        token = jnp.where(chosen, options, -1).max(axis=1)
        return agree.at[node].set(agree[parent] & (options == token[:, None])), token

    options = jnp.moveaxis(results.tokens[:, level[1:] - 1], 1, 0)  # [N, B, R]
    agree = jnp.ones((len(node) + 1, *options.shape[1:]), bool)
    _, drafts = jax.lax.scan(draft, agree, (node, parent, rank, options))
    padding = trees.bucket(strategy) - 1 - len(node)
    drafts = jnp.pad(drafts.T, ((0, 0), (0, padding)), constant_values=-1)
    confidence = results.confidence if drafter.packs else None
    return pin_rows(Proposal(drafts, confidence=confidence), layout)


def first_occurrences(options: jax.Array, agree: jax.Array) -> jax.Array:
    """Mark [..., R] bool the options that `agree` and are tokens, each at its first occurrence.

    options [..., R] int32 (-1: no token) and agree [..., R] bool.
    """
    usable = agree & (options >= 0)
    same = (options[..., :, None] == options[..., None, :]) & usable[..., None, :]
    before = jnp.tril(jnp.ones((options.shape[-1],) * 2, bool), -1)
    return usable & ~(same & before).any(-1)


# Matches of the end of a row's text in a corpus, and their continuations.


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
