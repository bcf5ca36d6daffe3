"""Drafts by lookup: what followed the longest earlier match of the text's end (prompt lookup,
Saxena 2023).

The corpus of a row is its earlier roll-outs of the same prompt, the running samples of that prompt
and its own text. No model, no staleness.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.mesh import pin_rows
from rlhf_jax.types import Array, DecodeState, Strategy

LONGEST = 8  # tokens of the text's end that are compared
LIKELY = (1, 2, 4)  # matched tokens that divide the confidence classes 0, 1, 2 and 3


class Found(NamedTuple):
    """What a search offers as the next K tokens: up to R = `RANKS` continuations, best first."""

    tokens: Array  # [B, K, R] int32, -1 beyond what is known
    confidence: Array  # [B] int8, the drafter's class 0..3 (see `search`)


@functools.partial(jax.jit, static_argnames=("strategy", "mesh"))
def propose(state: DecodeState, siblings: Array, strategy: Strategy, mesh=None) -> Array:
    """Drafts [B, bucket - 1] int32 for the strategy's nodes; -1 where the corpus has no
    continuation.

    siblings [B, S] int32 are rows of `state` that hold samples of the same prompt, -1 for none.
    """
    depth = int(trees.depths(strategy).max())
    return pin_rows(fill(strategy, search(state, siblings, depth).tokens), mesh)


def fill(strategy: Strategy, continuations: Array) -> Array:
    """The strategy's nodes [B, bucket - 1] int32 from continuations [B, K, R], best first; -1 where
    they end.

    Siblings are distinct: rank r is the r-th different token among the continuations that agree
    with the path.
    """
    chex.assert_rank(continuations, 3)
    rank = trees.ranks(strategy)[1:]
    level = trees.depths(strategy)[1:]
    parent = np.array(strategy.parents, np.int32) + 1
    node = np.arange(1, len(parent) + 1, dtype=np.int32)

    def draft(agree: Array, step: tuple[Array, ...]) -> tuple[Array, Array]:
        node, parent, rank, options = step
        first = distinct(options, agree[parent])
        chosen = first & (jnp.cumsum(first, axis=1, dtype=jnp.int32) == rank + 1)
        token = jnp.where(chosen, options, -1).max(axis=1)
        return agree.at[node].set(agree[parent] & (options == token[:, None])), token

    options = jnp.moveaxis(continuations[:, level - 1], 1, 0)  # [N, B, R]
    agree = jnp.ones((len(node) + 1, *options.shape[1:]), bool)
    _, drafts = jax.lax.scan(draft, agree, (node, parent, rank, options))
    padding = trees.bucket(strategy) - 1 - len(node)
    return jnp.pad(drafts.T, ((0, 0), (0, padding)), constant_values=-1)


def distinct(options: Array, agree: Array) -> Array:
    """[..., R] bool: the real tokens among options [..., R] that `agree`, each only where it comes
    first.
    """
    usable = agree & (options >= 0)
    same = (options[..., :, None] == options[..., None, :]) & usable[..., None, :]
    before = jnp.tril(jnp.ones((options.shape[-1],) * 2, bool), -1)
    return usable & ~(same & before).any(-1)


def search(state: DecodeState, siblings: Array, depth: int) -> Found:
    """The next `depth` tokens after the longest matches of the text's end, later ones before
    earlier ones.

    The class says how long the best match is: 0 none, 1 one token, 2 two or three, 3 four or more.
    A match in the row's own text that runs into the text's end goes on with its own draft, as
    repetition does (Ziv, Lempel 1977).
    """
    chex.assert_rank([siblings, state.tokens, state.history], 2)
    corpus = _corpus(state, siblings)
    size = corpus.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    decide_together = jnp.where(followed(corpus), match_length(corpus, text_end(state)), 0)
    score, where = best(jnp.where(decide_together > 0, decide_together * size + place, 0))
    last = (size - state.tokens.shape[1] + state.length - 1)[:, None]
    period = jnp.where(where >= size - state.tokens.shape[1], last - where, depth)
    tokens = continuations(corpus, where, score > 0, depth, period)
    longest = score[:, :1] // size
    return Found(tokens, (longest >= jnp.array(LIKELY, jnp.int32)).sum(axis=1, dtype=jnp.int8))


def _corpus(state: DecodeState, siblings: Array) -> Array:
    """[B, C] int32 earlier roll-outs, siblings' texts, own text last; -1 between and where nothing
    is known.
    """
    slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    own = jnp.where(slots < state.length[:, None], state.tokens, -1)
    others = jnp.where((siblings >= 0)[..., None], own[jnp.maximum(siblings, 0)], -1)
    others = jnp.pad(others, ((0, 0), (0, 0), (1, 0)), constant_values=-1).reshape(len(own), -1)
    # Written out once: fused into each of its readers it would be put together anew for every token
    # compared.
    return jax.lax.optimization_barrier(
        jnp.concatenate([state.history, others, jnp.full_like(own[:, :1], -1), own], axis=1)
    )


def text_end(state: DecodeState) -> Array:
    """[B, LONGEST] int32 the last known tokens, the last one first; -2 (equal to nothing) before
    the text's start.
    """
    back = state.length[:, None] - 1 - jnp.arange(LONGEST, dtype=jnp.int32)
    return jnp.where(back >= 0, jnp.take_along_axis(state.tokens, jnp.maximum(back, 0), axis=1), -2)


def match_length(corpus: Array, end: Array) -> Array:
    """[B, C] int32 how many tokens up to and including each place of corpus [B, C] equal `end`, at
    most LONGEST.
    """
    padded = jnp.pad(corpus, ((0, 0), (LONGEST - 1, 0)), constant_values=-1)
    length = jnp.zeros_like(corpus)
    for i in reversed(range(LONGEST)):
        start = LONGEST - 1 - i
        length = jnp.where(
            padded[:, start : start + corpus.shape[1]] == end[:, i, None], length + 1, 0
        )
    return length


def followed(corpus: Array) -> Array:
    """[B, C] bool: a token is known after this place."""
    return jnp.pad(corpus[:, 1:] >= 0, ((0, 0), (0, 1)))


def best(score: Array) -> tuple[Array, Array]:
    """The RANKS largest of score [B, C] int32, distinct where they are not 0, and their places:
    both [B, R].
    """
    # On a CPU, XLA sorts whole rows, forty times slower, of integers (float32 is exact below 2**24)
    # and for a reader that slices: hence the barrier.
    top, where = jax.lax.optimization_barrier(jax.lax.top_k(score.astype(jnp.float32), RANKS))
    return top.astype(jnp.int32), where


def continuations(corpus: Array, where: Array, usable: Array, depth: int, period: Array) -> Array:
    """[B, K, R] int32 the `depth` tokens after places where [B, R], repeated with their period; -1
    once unknown.
    """
    steps = jnp.arange(depth, dtype=jnp.int32)[:, None] % jnp.maximum(period, 1)[:, None]
    index = where[:, None] + 1 + steps
    size = corpus.shape[1]
    rows = jnp.arange(len(corpus), dtype=jnp.int32)[:, None, None]
    found = jnp.where(index < size, corpus[rows, jnp.minimum(index, size - 1)], -1)
    ended = jnp.cumsum(found < 0, axis=1, dtype=jnp.int32) > 0  # a separator ends a continuation
    return jnp.where(ended | ~usable[:, None], -1, found)
