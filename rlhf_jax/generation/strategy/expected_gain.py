"""Packed rounds on the host: which drafts the budget of a round goes to, and what is expected of
them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, NOTHING

LONGEST = trees.NODE_BUCKETS[-1] - 1  # drafts of a chain

# Of drafts by class and depth where nothing was measured: those of surer classes first.
UNMEASURED = (np.arange(CLASSES, dtype=np.float32)[:, None] / CLASSES) ** np.arange(
    1, LONGEST + 1, dtype=np.float32
)


class Ranking(NamedTuple):
    """The n drafts that rows may make, one row of each class, the worthiest first."""

    kind: np.ndarray  # [n] class
    # [n, 2 * CLASSES] accepted drafts expected, and drafts, of a row of each class that makes it
    gains: np.ndarray


def worths(rates: np.ndarray) -> np.ndarray:
    """[CLASSES, LONGEST] float32 chance that a draft of each depth is accepted. rates [CLASSES,
    DEPTHS] by depth.
    """
    found = np.cumprod(rates[:, np.minimum(np.arange(LONGEST), DEPTHS - 1)], axis=1).astype(
        np.float32
    )
    found[NOTHING] = 0.0
    return found


def ranked(worth: np.ndarray) -> Ranking:
    """The drafts of worth [CLASSES, length], those of `worths`, in the order in which
    `packed.allocate_budget` takes them.
    """
    order = np.argsort(-worth, axis=None, kind="stable")[: np.count_nonzero(worth)]
    kind = order // worth.shape[1]
    own = kind[:, None] == np.arange(CLASSES)
    return Ranking(
        kind, np.concatenate([own * worth.ravel()[order, None], own], axis=1).astype(float)
    )


def on_one_device(counts: np.ndarray, live: int) -> np.ndarray:
    """[1, CLASSES] so many rows, shared out as counts [2, CLASSES] by familiar and class are."""
    rows = counts.sum(axis=0)[None]
    return rows * (live / max(1, rows.sum()))


def tokens(
    ranking: Ranking, counts: np.ndarray, slots: int, nodes: np.ndarray, factor: float
) -> np.ndarray:
    """[CLASSES, S] tokens expected of a row, by rounds of `slots` rows that verify so many nodes
    [S] of each.

    counts [D, CLASSES]: live rows of each class on D devices; of a class without rows it is said
    what the first such row gains. factor: accepted drafts over those that `ranking` expects.
    """
    budgets = nodes[:, None] * (slots / len(counts)) - counts.sum(axis=1)
    wanted = counts[:, ranking.kind]
    left = budgets[..., None] - wanted.cumsum(axis=1)
    share = np.minimum(np.maximum(left / np.maximum(wanted, 1) + 1, 0), 1)
    found = _mean(share @ ranking.gains, counts)
    return 1 + np.minimum(factor * found[:, :CLASSES], found[:, CLASSES:]).T


def _mean(figures: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[S, 2 * CLASSES] of figures [S, D, 2 * CLASSES] on D devices, weighed by rows [D,
    CLASSES].
    """
    if len(rows) == 1:
        return figures[:, 0]
    weights = np.tile(rows + 1e-9, 2)
    return (figures * weights).sum(axis=1) / weights.sum(axis=0)
