"""Batches: which rows are trained on together, in shuffled minibatches and in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from flax import struct

from rlhf_jax.types import Array, Experience

SAME = 1e-6  # Rewards that differ by no more than this are equal.


@struct.dataclass
class MicroBatch:
    """Hold what one gradient is taken of: R rows of a minibatch, and their part in its loss."""

    experience: Experience  # [R, T]
    weights: Array  # [R, T] float32, of each token's loss
    total: Array  # [] float32, the minibatch's tokens, which metrics are means over
    kl_weight: Array  # [] float32, of the KL divergence in the loss


def groups_with_signal(rewards: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Say which prompts have samples whose rewards differ: [B] -> [B / samples_per_prompt] bool.

    Samples of a prompt lie in neighbouring rows. From equal rewards nothing is learned, so dynamic
    sampling replaces such prompts (DAPO, Yu et al. 2025, 3.2).
    """
    return np.ptp(rewards.reshape(-1, samples_per_prompt), axis=1) > SAME


def minibatches(batch: int, count: int, epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """Yield the row indices [batch / count] of each minibatch of each epoch.

    Rows are shuffled anew every epoch, by (seed, step, epoch). ValueError where `count` does not
    divide the rows.
    """
    if batch % count:
        raise ValueError(
            f"{batch} rows cannot be split into {count} equal minibatches; change one of the two."
        )
    for epoch in range(epochs):
        random = np.random.default_rng([seed, step, epoch])
        yield from random.permutation(batch).reshape(count, -1)


def micro_batches(
    rows: np.ndarray, length: Array, microbatch_rows: int, length_bucket: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the row indices [microbatch_rows] and token slots of each micro-batch.

    Rows of like length go together; `length` [B] counts each row's tokens. The slots are the
    smallest multiple of `length_bucket` that holds the longest row, at least one, so that a run
    compiles few shapes. ValueError where `microbatch_rows` does not divide the rows.
    """
    if len(rows) % microbatch_rows:
        raise ValueError(
            f"A minibatch of {len(rows)} rows cannot be split into micro-batches of"
            f" {microbatch_rows}; change one."
        )
    by_length = rows[np.argsort(length[rows], kind="stable")]
    for part in by_length.reshape(-1, microbatch_rows):
        buckets = max(1, -(-int(length[part].max()) // length_bucket))
        yield part, buckets * length_bucket


def select(experience: Experience, rows: np.ndarray, slots: int) -> Experience:
    """Return the given rows of a host experience, cut to at most `slots` token slots."""
    return jax.tree.map(
        lambda leaf: leaf[rows] if leaf.ndim == 1 else leaf[rows, :slots], experience
    )
