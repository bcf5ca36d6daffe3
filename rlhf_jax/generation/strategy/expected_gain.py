"""Rank the drafts of packed rounds by the chance that they are accepted.

A packed round verifies fewer nodes than its rows draft. Its budget goes to the likeliest drafts,
selected on the device by `rlhf_jax.generation.speculative.budget`; the expectations are here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, NOTHING

_LONGEST = trees.NODE_BUCKETS[-1] - 1  # Draft tokens of a chain.

# The gains without measurements [CLASSES, longest chain]: those of surer classes come first.
UNMEASURED = (np.arange(CLASSES, dtype=np.float32)[:, None] / CLASSES) ** np.arange(
    1, _LONGEST + 1, dtype=np.float32
)


class Ranking(NamedTuple):
    """Hold the n possible drafts of one row of each class, the likeliest first."""

    kind: np.ndarray  # [n] class
    # [n, 2 * CLASSES] expected accepted drafts, and drafts, of a row of each class
    gains: np.ndarray


def expected_gains(rates: np.ndarray) -> np.ndarray:
    """Return [CLASSES, longest chain] float32 chances that a draft of each depth is accepted.

    rates [CLASSES, DEPTHS] of rank 0; depths beyond the last use its rate.
    """
    depths = np.minimum(np.arange(_LONGEST), DEPTHS - 1)
    gains = np.cumprod(rates[:, depths], axis=1).astype(np.float32)
    gains[NOTHING] = 0.0
    return gains


def rank(expected_gain: np.ndarray) -> Ranking:
    """Rank drafts in the order in which the budget of a packed round takes them.

    expected_gain [CLASSES, length]: some columns of `expected_gains`.
    """
    likely = np.count_nonzero(expected_gain)
    order = np.argsort(-expected_gain, axis=None, kind="stable")[:likely]
    kind = order // expected_gain.shape[1]
    own = kind[:, None] == np.arange(CLASSES)
    gains = np.concatenate([own * expected_gain.ravel()[order, None], own], axis=1)
    return Ranking(kind, gains.astype(float))


def tokens(
    ranking: Ranking, counts: np.ndarray, slots: int, nodes: np.ndarray, factor: float
) -> np.ndarray:
    """Return [CLASSES, S] expected tokens of a row by packed rounds of S budgets.

    counts [D, CLASSES]: live rows of each class on D devices; a class without rows gets the gain of
    its first row. slots: rows of the program; nodes [S]: average verified nodes per row; factor:
    accepted drafts over those that the ranking expects.
    """
    budgets = nodes[:, None] * (slots / len(counts)) - counts.sum(axis=1)  # [S, D] drafts
    wanted = counts[:, ranking.kind]
    left = budgets[..., None] - wanted.cumsum(axis=1)
    share = np.minimum(np.maximum(left / np.maximum(wanted, 1) + 1, 0), 1)
    gains = share @ ranking.gains  # [S, D, 2 * CLASSES]
    if len(counts) == 1:
        gains = gains[:, 0]
    else:
        weights = np.tile(counts + 1e-9, 2)
        gains = (gains * weights).sum(axis=1) / weights.sum(axis=0)
    return 1 + np.minimum(factor * gains[:, :CLASSES], gains[:, CLASSES:]).T
