"""Extract observations of the drafters from a round's results, on the host."""

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
    band: np.ndarray,
) -> Observations:
    """Observe the drafts that a round verified: which siblings were right until the row stopped.

    confidence, seen_prompt, band [B]: class, whether the prompt has earlier roll-outs, position;
    allowed [B]: the depth allowed to a row. A wanted draft that was missing counts as wrong. Rows
    that gained nothing show nothing; the end of a sample hides the continuation, and so does the
    allowed depth.
    """
    rank, children = _shape(strategy)
    gained = arrived.count > 0
    path = arrived.path[gained]
    depth = arrived.accepted[gained]
    levels = np.arange(min(DEPTHS, path.shape[1] - 1))
    offered = children[path[:, levels]]
    ranks = np.where(levels < depth[:, None], rank[path[:, levels + 1]], -1)

    # Where the text or the allowed depth ended, no draft was wrong.
    ended = levels >= np.minimum(arrived.count, allowed)[gained][:, None]
    # The first draft that was not the likeliest is the last that counts: later rates are of the
    # likeliest chain.
    diverged = np.cumsum(ranks != 0, axis=1) - (ranks != 0) > 0
    offered = np.where(ended | diverged | (levels > depth[:, None]), 0, offered)

    missing = ((0, 0), (0, DEPTHS - len(levels)))
    return Observations(
        seen_prompt[gained],
        confidence[gained],
        np.pad(ranks, missing, constant_values=-1),
        offered=np.pad(offered, missing),
        band=band[gained],
    )


def of_hindsight(
    hindsight: Hindsight, shown: np.ndarray, seen_prompt: np.ndarray, band: np.ndarray
) -> Observations:
    """Observe the hindsight of a drafter, in the rows `shown` [B] bool.

    Those are the rows that gained tokens and have enough of them; seen_prompt [B] bool, band [B].
    """
    return Observations(
        seen_prompt[shown],
        np.asarray(hindsight.past)[shown],
        np.asarray(hindsight.ranks)[shown],
        offered=np.asarray(hindsight.offered)[shown],
        band=band[shown],
    )


@functools.cache
def _shape(strategy: Strategy) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of every node, and its number of children, each [node bucket] int64."""
    count = len(strategy.parents) + 1
    rank = np.zeros(trees.bucket(strategy), np.int64)
    rank[:count] = trees.ranks(strategy)
    children = np.zeros(trees.bucket(strategy), np.int64)
    parents = np.array(strategy.parents, np.int64) + 1
    children[:count] = np.bincount(parents, minlength=count)
    return rank, children
