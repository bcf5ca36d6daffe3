"""Which rows are trained on, and which together: shuffled minibatches, micro-batches of like
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from flax import struct

from rlhf_jax.types import Array, Experience

SAME = 1e-6  # rewards so close are equal


@struct.dataclass
class MicroBatch:
    """What one gradient is taken of: R rows of a minibatch, and their part in its loss."""

    experience: Experience  # [R, T]
    weights: Array  # [R, T] float32, of each token's loss
    total: Array  # [] float32, the minibatch's tokens, which metrics are means over
    kl_weight: Array  # [] float32, of the KL divergence in the loss


def signal(rewards: np.ndarray, group: int) -> np.ndarray:
    """Which groups of neighbouring samples have rewards [B] that differ: [B / group] bool. The
    others teach nothing, and dynamic sampling replaces them (DAPO, Yu et al. 2025, 3.2).
    """
    return np.ptp(rewards.reshape(-1, group), axis=1) > SAME


def overlong(mask: np.ndarray, finished: np.ndarray) -> np.ndarray:
    """mask [B, T] without the rows that are not `finished` [B]: what was cut off is not trained on
    (DAPO, 3.4).
    """
    return mask & finished[:, None]


def minibatches(batch: int, count: int, epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """Row indices [batch / count] of each minibatch, shuffled anew every epoch by (seed, step,
    epoch).
    """
    if batch % count:
        raise ValueError(
            f"{batch} rows cannot be split into {count} equal minibatches; change one of the two."
        )
    for epoch in range(epochs):
        yield from np.random.default_rng([seed, step, epoch]).permutation(batch).reshape(count, -1)


def micro_batches(
    rows: np.ndarray, length: np.ndarray, size: int, bucket: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Row indices [size] and token slots of each micro-batch: rows of like length together, slots
    rounded up.

    `length[B]` counts each row's tokens. The slots are the smallest multiple of `bucket` that holds
    the micro-batch's longest row, at least one, so a run sees few shapes.
    """
    if len(rows) % size:
        raise ValueError(
            f"A minibatch of {len(rows)} rows cannot be split into micro-batches of {size};"
            " change one."
        )
    for part in rows[np.argsort(length[rows], kind="stable")].reshape(-1, size):
        yield part, max(1, -(-int(length[part].max()) // bucket)) * bucket


def select(experience: Experience, rows: np.ndarray, slots: int) -> Experience:
    """The given rows of a host experience, cut to at most `slots` token slots."""
    return jax.tree.map(
        lambda leaf: leaf[rows] if leaf.ndim == 1 else leaf[rows, :slots], experience
    )
