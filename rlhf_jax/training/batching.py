"""Batches: which rows are trained on together, in shuffled minibatches and in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast as typed

import jax
import numpy as np
from flax import struct

from rlhf_jax.inference.packing import Packed
from rlhf_jax.types import Array, Experience, PackedBatch

SAME = 1e-6  # Rewards that differ by no more than this are equal.


@struct.dataclass
class MicroBatch:
    """Hold what one gradient is taken of: packed samples, and their part in a minibatch's loss.

    What is [S, W] speaks of the predicted tokens, and is 0 behind them.
    """

    packed: PackedBatch
    weights: Array  # [S, W] float32, of each token's loss
    sampled_logprobs: Array  # [S, W] float32, as generation reported them
    advantages: Array  # [S, W] float32
    total: Array  # [] float32, the minibatch's tokens, which metrics are means over
    samples: Array  # [] float32, the minibatch's samples
    kl_weight: Array  # [] float32, of the KL divergence in the loss
    # [S, W] float32, and None as in `Experience`
    logprobs: Array | None = None
    reference_logprobs: Array | None = None
    values: Array | None = None
    returns: Array | None = None
    support: Array | None = None  # [S, W, top_k] int32

    @property
    def mask(self) -> Array:
        """Return which of the predicted tokens are real: [S, W] bool."""
        return self.packed.mask


def groups_with_signal(rewards: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Say which prompts have samples whose rewards differ: [B] -> [B / samples_per_prompt] bool.

    Samples of a prompt lie in neighbouring rows; a reward that is NaN, as scoring failed, is no
    reward. From equal rewards nothing is learned, so dynamic sampling replaces such prompts (DAPO,
    Yu et al. 2025, 3.2).
    """
    groups = rewards.reshape(-1, samples_per_prompt)
    unknown = np.isnan(groups)
    highest = np.where(unknown, -np.inf, groups).max(axis=1)
    lowest = np.where(unknown, np.inf, groups).min(axis=1)
    return highest - lowest > SAME


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
        yield from random.permutation(batch).reshape(count, batch // count)


def micro_batch(
    experience: Experience, weights: np.ndarray, kl_weight: float, packed: Packed
) -> MicroBatch:
    """Return a packed part of a minibatch of host arrays, whose tokens weigh `weights` [B, T]."""
    mask = np.asarray(experience.mask)
    take = packed.take
    return MicroBatch(
        packed=packed.batch,
        weights=typed(Array, take(weights)),
        sampled_logprobs=typed(Array, take(experience.rollout.logprobs)),
        advantages=typed(Array, take(experience.advantages)),
        total=np.array(max(1, mask.sum()), np.float32),
        samples=np.array(max(1, mask.any(axis=1).sum()), np.float32),
        kl_weight=np.array(kl_weight, np.float32),
        logprobs=take(experience.logprobs),
        reference_logprobs=take(experience.reference_logprobs),
        values=take(experience.values),
        returns=take(experience.returns),
        support=take(experience.rollout.support),
    )


def select(experience: Experience, rows: np.ndarray) -> Experience:
    """Return the given rows of a host experience."""
    return jax.tree.map(lambda leaf: leaf[rows], experience)
