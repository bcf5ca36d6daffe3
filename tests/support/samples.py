"""Samples in groups at random, as they are before packing, and a loss that compares them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from learning import sequences_of

from rlhf_jax.sequences.batch import Sequences

PROMPTS = (3, 9, 5)  # tokens of each
GROUP = 4
SLOTS = 26


def grouped(vocabulary: int, seed: int = 0, top_k: bool = False) -> Sequences:
    """Samples of prompts of different lengths; one response has a single token."""
    random = np.random.default_rng(seed)
    rows = len(PROMPTS) * GROUP
    prompt = np.repeat(PROMPTS, GROUP)[:, None]
    length = np.minimum(prompt[:, 0] + random.integers(2, 18, rows), SLOTS)
    length[1] = prompt[1, 0] + 1
    place = np.arange(SLOTS)
    texts = random.integers(0, vocabulary, (len(PROMPTS), SLOTS)).repeat(GROUP, axis=0)
    tokens = np.where(place < prompt, texts, random.integers(0, vocabulary, (rows, SLOTS)))
    known = place < length[:, None]
    mask = known & (place >= prompt)
    top_k_ids = None
    if top_k:
        ids = random.integers(0, vocabulary, (rows, SLOTS, 6))
        ids[..., 0] = tokens
        top_k_ids = np.where(mask[..., None], ids, -1).astype(np.int32)
    return sequences_of(
        np.where(known, tokens, 0).astype(np.int32),
        mask,
        sampled_logprobs=random.normal(size=mask.shape).astype(np.float32),
        top_k_ids=top_k_ids,
    )


def seen_by(segments: np.ndarray) -> np.ndarray:
    """Which tokens of a line [C, 2] each token sees: [C, C] bool."""
    own, prompt = segments.T
    before = np.tri(len(own), dtype=bool)
    return before & (own >= 0)[:, None] & ((own == own[:, None]) | (own == prompt[:, None]))


def drawn(prompt: int, responses: np.ndarray, group: int, longest: int) -> Sequences:
    """Samples of these lengths, of which neighbours share a prompt."""
    place = np.arange(prompt + longest)
    groups = np.arange(len(responses), dtype=np.int32) // group
    tokens = np.zeros((len(responses), len(place)), np.int32)
    tokens[:, :prompt] = groups[:, None]
    mask = (place >= prompt) & (place < prompt + responses[:, None])
    return Sequences(tokens, mask, groups)


def in_groups(vocabulary: int):
    """Twelve samples of three prompts, whose last one has no token to learn from."""
    given = grouped(vocabulary).reading()
    mask = np.array(given.mask)
    mask[-1] = False
    rewards = np.random.default_rng(3).normal(size=len(mask)).astype(np.float32)
    groups = np.arange(len(mask), dtype=np.int32) // GROUP
    return dataclasses.replace(given, mask=mask, group=groups).with_columns(rewards=rewards)


def spread(terms):
    """By group, what the likeliest sequence gains over the mean of all, weighed by rewards."""
    total = terms.per_sequence(terms.scores) * terms.batch.columns["rewards"]
    count = terms.per_group(jnp.ones(total.shape))
    losses = jnp.exp(terms.per_group(total) / jnp.maximum(count, 1.0) / 100)
    return losses, {"loss/group": terms.mean(losses)}
