"""Split a batch into shuffled minibatches, and compute weights shared by their micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlhf_jax.sequences.batch import Sequences


def minibatches(
    batch: int, count: int, epochs: int, seed: int, step: int, groups: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield the row indices of each minibatch of each epoch.

    Rows, or whole groups by their numbers `groups` [batch], are shuffled anew every epoch, by
    (seed, step, epoch). ValueError if `count` does not divide their number.
    """
    members = None
    if groups is not None:
        members = [np.flatnonzero(groups == number) for number in np.unique(groups)]
    units = batch if members is None else len(members)
    if units % count:
        what = "rows" if members is None else "groups"
        raise ValueError(
            f"{units} {what} cannot be split into {count} equal minibatches; change one of the two."
        )
    for epoch in range(epochs):
        random = np.random.default_rng([seed, step, epoch])
        for chosen in random.permutation(units).reshape(count, units // count):
            yield chosen if members is None else np.concatenate([members[one] for one in chosen])


def with_shares(minibatch: Sequences, weights: np.ndarray) -> Sequences:
    """Return a minibatch of host arrays with its totals, which its micro-batches need.

    weights [B, T] float32 are of each token's loss in the minibatch's.
    """
    mask = minibatch.mask
    present = mask.any(axis=1)
    groups = np.unique(minibatch.group[present])
    return minibatch.with_columns(
        weights=weights,
        total_tokens=np.array(max(1, mask.sum()), np.float32),
        total_sequences=np.array(max(1, present.sum()), np.float32),
        total_groups=np.array(max(1, len(groups)), np.float32),
    )
