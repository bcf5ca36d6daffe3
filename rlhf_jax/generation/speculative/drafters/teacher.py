"""How well a draft model predicts finished texts: one teacher-forced pass gives the acceptance of
every chain and tree.

With the noise of the text itself, the rank that each token had in the drafter's own draw says
whether a round would have accepted it: no round needs to draft in order to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.speculative import sampling as draws
from rlhf_jax.generation.speculative.drafters.model import confidence
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy.acceptance import DEPTHS, NOTHING, RANKS, Observations
from rlhf_jax.model.attention import causal
from rlhf_jax.model.columns import join_columns, split_columns
from rlhf_jax.model.transformer import forward, logits
from rlhf_jax.types import Array, Model

CHUNK = 512  # tokens whose logits exist at one time


@functools.partial(jax.jit, static_argnames=("sampling", "rows", "attend"))
def score(
    drafter: Model,
    tokens: Array,
    mask: Array,
    key: Array,
    sampling: Sampling,
    *,
    rows: int,
    attend: Callable = causal,
) -> tuple[Array, Array]:
    """(rank, confidence), both [B, T] int8, of the tokens [B, T] that mask [B, T] names, one
    forward pass.

    rank[b, t] is the place of tokens[b, t] among the RANKS best of the drafter's draw with key[b]
    (seed, sample) at position t, -1 if it is none of them; confidence[b, t] is the class 1..3 of
    that draw. Unmasked: -1 and 0. `rows` rows at a time, in strides as a mesh lays them out, and
    CHUNK tokens of those: [B, T, V] never exists. Raises ValueError where B is not a multiple of
    `rows`.
    """
    chex.assert_rank([tokens, mask, key], 2)
    batch = len(tokens)
    if batch % rows:
        raise ValueError(
            f"{batch} rows cannot be scored {rows} at a time; the first must be a multiple of the"
            " second."
        )
    parts = [leaf.reshape(rows, batch // rows, -1).swapaxes(0, 1) for leaf in (tokens, mask, key)]
    scored = jax.lax.map(lambda part: _score_rows(drafter, part, sampling, attend), parts)
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape(batch, -1), scored)


def _score_rows(drafter: Model, part, sampling: Sampling, attend: Callable) -> tuple[Array, Array]:
    """`score` of a few rows: one forward pass, then the head on one block of columns after
    another.
    """
    tokens, mask, key = part
    slots = tokens.shape[1]
    places = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(drafter, tokens, places, attend)
    told = (hidden[:, :-1], tokens[:, 1:], mask[:, 1:], places[:, 1:])
    blocks = split_columns(told, CHUNK)

    def block(part):
        wanted = part[2]
        # A block that nobody asks about, of prompts or of padding, skips the head.
        unknown = (jnp.full(wanted.shape, -1, jnp.int8), jnp.zeros(wanted.shape, jnp.int8))
        return jax.lax.cond(
            wanted.any(), lambda: _score_block(drafter, part, key, sampling), lambda: unknown
        )

    rank, sure = join_columns(jax.lax.map(block, blocks), slots - 1)
    return jnp.pad(rank, ((0, 0), (1, 0)), constant_values=-1), jnp.pad(sure, ((0, 0), (1, 0)))


def _score_block(drafter: Model, part, key: Array, sampling: Sampling) -> tuple[Array, Array]:
    """(rank, confidence) of tokens [B, C], each told by the hidden state [B, C, M] before it."""
    hidden, tokens, mask, position = part
    scores = logits(drafter, hidden)
    proposed = draws.rank(scores, key[:, None], position, sampling, RANKS)
    right = proposed == tokens[..., None]
    rank = jnp.where(right.any(-1) & mask, jnp.argmax(right, axis=-1).astype(jnp.int8), -1)
    sure = jnp.where(mask, confidence(scores, proposed[..., 0], sampling), 0)
    return rank.astype(jnp.int8), sure.astype(jnp.int8)


def as_evidence(
    rank: np.ndarray, sure: np.ndarray, mask: np.ndarray, seen_prompt: np.ndarray
) -> Observations:
    """A draft from every response token of mask [B, T], as `score` saw them: rank and sure
    (confidence) [B, T].

    familiar[B] says whose prompt was rolled out before. The class before a draft is that of the
    token before it, none at a response's first token; and each counts once more for the class where
    nothing is known. All RANKS are offered at each depth until the first that rank 0 misses, or the
    end.
    """
    row, place = np.nonzero(mask)
    padding = ((0, 0), (0, DEPTHS))
    ahead = place[:, None] + np.arange(DEPTHS)
    ranks = np.pad(rank, padding, constant_values=-1)[row[:, None], ahead]
    known = np.pad(mask, padding)[row[:, None], ahead]
    right = np.pad(ranks[:, :-1] == 0, ((0, 0), (1, 0)), constant_values=True)
    observed = np.logical_and.accumulate(known & right, axis=1)
    before = np.where(mask[row, place - 1], sure[row, place - 1], NOTHING)
    seen = seen_prompt[row], before, np.where(observed, ranks, -1), np.where(observed, RANKS, 0)
    # Between drafts of its own nothing is known of a row: that class is the mean of all.
    again = before != NOTHING
    unknown = seen_prompt[row][again], np.full(again.sum(), NOTHING), seen[2][again], seen[3][again]
    return Observations(*(np.concatenate(both) for both in zip(seen, unknown, strict=True)))
