"""Which rows are trained on together: shuffled minibatches, micro-batches of like lengths (host code)."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from rlhf_jax.types import Experience


def minibatches(batch: int, count: int, epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """Row indices [batch / count] of each minibatch, shuffled anew every epoch by (seed, step, epoch)."""
    if batch % count:
        raise ValueError(f"{batch} rows cannot be split into {count} equal minibatches; change one of the two.")
    for epoch in range(epochs):
        yield from np.random.default_rng([seed, step, epoch]).permutation(batch).reshape(count, -1)


def micro_batches(rows: np.ndarray, length: np.ndarray, size: int, bucket: int) -> Iterator[tuple[np.ndarray, int]]:
    """Row indices [size] and token slots of each micro-batch: rows of like length together, slots rounded up.

    `length[B]` counts each row's tokens. The slots are the smallest multiple of `bucket` that holds the
    micro-batch's longest row, at least one, so a run sees few shapes.
    """
    if len(rows) % size:
        raise ValueError(f"A minibatch of {len(rows)} rows cannot be split into micro-batches of {size}; change one.")
    for part in rows[np.argsort(length[rows], kind="stable")].reshape(-1, size):
        yield part, max(1, -(-int(length[part].max()) // bucket)) * bucket


def select(experience: Experience, rows: np.ndarray, slots: int) -> Experience:
    """The given rows of a host experience, cut to at most `slots` token slots."""
    return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim == 1 else leaf[rows, :slots], experience)
