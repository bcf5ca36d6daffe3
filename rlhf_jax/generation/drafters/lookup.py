"""Drafts by lookup: what followed the longest earlier match of the text's end (prompt lookup, Saxena 2023).

The corpus of a row is its earlier roll-outs of the same prompt and its own text. No model, no staleness.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlhf_jax.generation import tree as trees
from rlhf_jax.types import Array, DecodeState, Strategy

LONGEST = 8  # tokens of the text's end that are compared
MATCHES = 4  # places in the corpus that are followed


@functools.partial(jax.jit, static_argnames=("strategy",))
def propose(state: DecodeState, strategy: Strategy) -> Array:
    """Drafts [B, bucket - 1] for the strategy's nodes; -1 where the corpus has no continuation.

    Siblings are distinct: rank r is the r-th different token among the matches that agree with the path so far,
    the longest match first, later ones before earlier ones.
    """
    depth = int(trees.depths(strategy).max())
    continuations = _continuations(state, depth)
    rows = continuations.shape[0]
    agree = {0: jnp.ones((rows, MATCHES), bool)}
    rank, level = trees.ranks(strategy), trees.depths(strategy)
    drafts = []
    for node, parent in enumerate(strategy.parents, start=1):
        options = continuations[:, :, int(level[node]) - 1]
        token = _ranked(options, agree[parent + 1], int(rank[node]))
        agree[node] = agree[parent + 1] & (options == token[:, None])
        drafts.append(token)
    padding = trees.bucket(strategy) - 1 - len(drafts)
    return jnp.pad(jnp.stack(drafts, axis=1), ((0, 0), (0, padding)), constant_values=-1)


def _ranked(options: Array, agree: Array, rank: int) -> Array:
    """[B] the rank-th distinct token among options [B, R] where `agree`; -1 if there are not so many."""
    usable = agree & (options >= 0)
    same = (options[:, :, None] == options[:, None, :]) & usable[:, None, :]
    earlier = jnp.tril(jnp.ones((MATCHES, MATCHES), bool), -1)
    first = usable & ~(same & earlier).any(-1)
    chosen = first & (jnp.cumsum(first, axis=1, dtype=jnp.int32) == rank + 1)
    return jnp.where(chosen, options, -1).max(axis=1)


def _continuations(state: DecodeState, depth: int) -> Array:
    """[B, R, K] the tokens after the best R matches, best first; -1 beyond what is known."""
    slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    own = jnp.where(slots[None] < state.length[:, None], state.tokens, -1)
    corpus = jnp.concatenate([state.history, jnp.full_like(own[:, :1], -1), own], axis=1)
    length = _match_length(corpus, _text_end(state))
    known = jnp.pad(corpus, ((0, 0), (0, depth)), constant_values=-1)
    length = jnp.where(known[:, 1 : corpus.shape[1] + 1] >= 0, length, 0)  # a match must have a continuation
    places = jnp.arange(corpus.shape[1], dtype=jnp.int32)
    best, where = jax.lax.top_k(length * corpus.shape[1] + places, MATCHES)
    steps = where[:, :, None] + 1 + jnp.arange(depth, dtype=jnp.int32)
    found = jnp.take_along_axis(known[:, None], steps, axis=2)
    ends = jnp.cumsum(found < 0, axis=2, dtype=jnp.int32) > 0  # a separator ends a continuation
    return jnp.where(ends | (best < corpus.shape[1])[:, :, None], -1, found)


def _text_end(state: DecodeState) -> Array:
    """[B, LONGEST] the last tokens, the last one first; -2 (equal to nothing) before the text's start."""
    back = state.length[:, None] - 1 - jnp.arange(LONGEST, dtype=jnp.int32)
    return jnp.where(back >= 0, jnp.take_along_axis(state.tokens, jnp.maximum(back, 0), axis=1), -2)


def _match_length(corpus: Array, end: Array) -> Array:
    """[B, C] how many tokens up to and including each place equal the text's end, at most LONGEST."""
    padded = jnp.pad(corpus, ((0, 0), (LONGEST - 1, 0)), constant_values=-1)
    size = corpus.shape[1]
    equal = [padded[:, LONGEST - 1 - i : LONGEST - 1 - i + size] == end[:, i, None] for i in range(LONGEST)]
    return jnp.cumprod(jnp.stack(equal), axis=0, dtype=jnp.int32).sum(axis=0, dtype=jnp.int32)
