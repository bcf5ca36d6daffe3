"""What a round's results say of the drafters. Host code."""

from __future__ import annotations

import functools

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters.hindsight import Hindsight
from rlhf_jax.generation.strategy.acceptance import DEPTHS, Observations
from rlhf_jax.types import Emission, Strategy


def of_drafts(
    strategy: Strategy,
    arrived: Emission,
    confidence: np.ndarray,
    seen_prompt: np.ndarray,
    allowed: np.ndarray,
) -> Observations:
    """Of the drafts that were verified: which siblings were right on the way to where the row
    stopped.

    confidence, familiar [B]; what was to be drafted and could not be counts as wrong. Rows that
    gained nothing say nothing; the end of a sample hides what would have followed, as does the
    depth that a row was allowed [B].
    """
    rank, children = _shape(strategy)
    part = arrived.count > 0
    path = arrived.path[part]
    depth = arrived.accepted[part]
    levels = np.arange(min(DEPTHS, path.shape[1] - 1))
    offered = children[path[:, levels]]
    ranks = np.where(levels < depth[:, None], rank[path[:, levels + 1]], -1)
    # not by a draft that was wrong
    ended = levels >= np.minimum(arrived.count, allowed)[part][:, None]
    # The first draft that was not the likeliest is the last that tells: later rates are of the
    # likeliest chain.
    diverged = np.cumsum(ranks != 0, axis=1) - (ranks != 0) > 0
    offered = np.where(ended | diverged | (levels > depth[:, None]), 0, offered)
    missing = ((0, 0), (0, DEPTHS - len(levels)))
    return Observations(
        seen_prompt[part],
        confidence[part],
        np.pad(ranks, missing, constant_values=-1),
        np.pad(offered, missing),
    )


def of_signal(signal: Hindsight, told: np.ndarray, seen_prompt: np.ndarray) -> Observations:
    """Of what a drafter would have drafted: the rows `told` [B] bool that gained tokens and have
    enough of them.
    """
    return Observations(
        seen_prompt[told], signal.past[told], signal.ranks[told], signal.offered[told]
    )


@functools.cache
def _shape(strategy: Strategy) -> tuple[np.ndarray, np.ndarray]:
    """Rank of every node, and its number of children."""
    size = trees.bucket(strategy)
    rank = np.zeros(size, np.int64)
    children = np.zeros(size, np.int64)
    rank[: len(strategy.parents) + 1] = trees.ranks(strategy)
    children[: len(strategy.parents) + 1] = np.bincount(
        np.array(strategy.parents, np.int64) + 1, minlength=len(strategy.parents) + 1
    )
    return rank, children
