"""Measure a draft model's acceptance on finished texts, by one teacher-forced pass.

With the noise of the text itself, the rank of each token in the drafter's own draw shows whether a
round would have accepted it. That gives the acceptance of every chain and tree without drafting.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.speculative import sampling as draws
from rlhf_jax.generation.speculative.drafters.model import confidence_of
from rlhf_jax.generation.speculative.sampling import Truncation
from rlhf_jax.generation.strategy.acceptance import DEPTHS, NOTHING, RANKS, Observations, bands
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.columns import join_columns, split_columns
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.types import Array, Model

HEAD_TOKENS = 512  # Tokens whose logits exist at a time.


@functools.partial(jax.jit, static_argnames=("truncation", "layout"))
def score(
    drafter: Model,
    tokens: Array,
    mask: Array,
    key: Array,
    temperature: Array,
    truncation: Truncation,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, jax.Array]:
    """Return (rank, confidence), both [B, T] int8, of the tokens [B, T] under mask [B, T].

    rank[b, t] is the place of tokens[b, t] among the RANKS best of the drafter's draw with key[b]
    (seed, sample), uint32, and temperature[b], float32, at position t, -1 if it is none of them;
    confidence[b, t] is the class 1..3 of that draw. Unmasked: -1 and 0. It is one forward pass,
    then the head on one block of HEAD_TOKENS tokens after another: [B, T, V] never exists.
    """
    chex.assert_rank([tokens, mask, key, temperature], [2, 2, 2, 1])
    slots = tokens.shape[1]
    of_row = jnp.asarray(temperature)[:, None]
    places = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(drafter, tokens, places, causal_on(layout))

    def score_block(block: tuple[Array, ...]) -> tuple[jax.Array, jax.Array]:
        before, predicted, masked, position = block  # [B, C, M], and three of [B, C]

        def measure() -> tuple[jax.Array, jax.Array]:
            scores = logits(drafter, before)
            proposed = draws.rank(scores, key[:, None], position, of_row, truncation, RANKS, layout)
            right = proposed == predicted[..., None]
            place = jnp.argmax(right, axis=-1).astype(jnp.int8)
            rank = jnp.where(right.any(-1) & masked, place, -1)
            confidence = confidence_of(scores, proposed[..., 0], of_row)
            confidence = jnp.where(masked, confidence, 0)
            return rank.astype(jnp.int8), confidence.astype(jnp.int8)

        # A block without masked tokens, of prompts or of padding, skips the head. It is a loop of
        # at most one iteration, as XLA's partitioner for GPUs gathers the results of a branch.
        unknown = (jnp.full(masked.shape, -1, jnp.int8), jnp.zeros(masked.shape, jnp.int8))
        turns = masked.any().astype(jnp.int32)
        return jax.lax.fori_loop(0, turns, lambda _, unused: measure(), pin_rows(unknown, layout))

    # Each token is predicted by the hidden state before it.
    aligned = (hidden[:, :-1], tokens[:, 1:], mask[:, 1:], places[:, 1:])
    blocks = jax.lax.map(score_block, split_columns(aligned, HEAD_TOKENS))
    rank, confidence = join_columns(blocks, slots - 1)
    first = ((0, 0), (1, 0))
    return jnp.pad(rank, first, constant_values=-1), jnp.pad(confidence, first)


def as_observations(
    rank: np.ndarray, confidence: np.ndarray, mask: np.ndarray, seen_prompt: np.ndarray
) -> Observations:
    """Return the observations of drafting from every response token of mask [B, T].

    rank and confidence, both [B, T], are those of `score`; seen_prompt [B] marks prompts with
    earlier roll-outs. The class before a draft is that of the token before it, none at a response's
    first token; and each counts once more for the class in which nothing is known. All RANKS are
    offered at each depth until the first that rank 0 misses, or the end.
    """
    row, place = np.nonzero(mask)
    padding = ((0, 0), (0, DEPTHS))
    ahead = place[:, None] + np.arange(DEPTHS)
    ranks = np.pad(rank, padding, constant_values=-1)[row[:, None], ahead]
    known = np.pad(mask, padding)[row[:, None], ahead]
    right = np.pad(ranks[:, :-1] == 0, ((0, 0), (1, 0)), constant_values=True)
    observed = np.logical_and.accumulate(known & right, axis=1)

    ranks = np.where(observed, ranks, -1)
    offered = np.where(observed, RANKS, 0)
    before = np.where(mask[row, place - 1], confidence[row, place - 1], NOTHING)
    band = bands(mask.cumsum(axis=1)[row, place] - 1)
    by_class = (seen_prompt[row], before, ranks, offered, band)
    # Between its own drafts nothing is known of a row: that class is the mean of all.
    again = before != NOTHING
    nothing = np.full(again.sum(), NOTHING)
    unknown = (seen_prompt[row][again], nothing, ranks[again], offered[again], band[again])
    return Observations(*(np.concatenate(both) for both in zip(by_class, unknown, strict=True)))
