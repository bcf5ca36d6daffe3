"""Copy a round's results to the host, and extract observations of the drafters from them.

They travel as one array, since each transfer has a fixed cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.requests import Sample
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.budget import BudgetShare
from rlhf_jax.generation.speculative.drafters.hindsight import Hindsight
from rlhf_jax.generation.speculative.protocol import drafter_of
from rlhf_jax.generation.strategy.acceptance import DEPTHS, Observations, bands
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.types import Array, Emission, Strategy


class Results(NamedTuple):
    """Hold a round's results for the host."""

    emission: Emission
    confidence: Array | None  # [B] int8, of its own drafts, if the drafter does not search
    budget_share: BudgetShare | None  # of a round with a budget of drafts
    hindsight: dict[str, Hindsight]  # by name, of the drafters that search, if requested


@functools.partial(jax.jit, static_argnames=("layout",))
def as_words(results: Results, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Return the results' leaves, row-first and of at most 32 bits, as one array [B, W] int32."""

    def words(leaf: Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        floats = leaf.dtype == jnp.float32
        whole = jax.lax.bitcast_convert_type(leaf, jnp.int32) if floats else leaf.astype(jnp.int32)
        return whole.reshape(len(leaf), -1)

    joined = jnp.concatenate([words(leaf) for leaf in jax.tree.leaves(results)], axis=1)
    # Each host that shares the devices reads all rows.
    return meshes.repeat(joined, layout) if layout.is_shared else meshes.pin_rows(joined, layout)


def from_words(words: np.ndarray, results: Results) -> Results:
    """Split what `as_words` joined into host arrays, with the shapes of `results`.

    Whole numbers are int32, however small they were.
    """
    leaves, treedef = jax.tree.flatten(results)
    parts = []
    start = 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape[1:])
        part = words[:, start:end].reshape(leaf.shape)
        if leaf.dtype == np.float32:
            part = part.view(np.float32)
        parts.append(part.astype(bool) if leaf.dtype == bool else part)
        start = end
    return jax.tree.unflatten(treedef, parts)


def observe_drafters(
    results: Results,
    strategy: Strategy,
    samples: Sequence[Sample | None],
    confidence: Sequence[dict[str, int]],
) -> dict[str, Observations]:
    """Observe the round's drafter by its drafts, and the others by hindsight.

    samples: of each row; confidence: of each row's drafters before the round. A round ends where
    its drafter was wrong, so hindsight from there would see too many of its misses.
    """
    if not results.hindsight and not strategy.parents:
        return {}
    used = strategy.drafter
    seen_prompt = np.array([one is not None and one.seen_prompt for one in samples])
    length = np.array([len(one.tokens) if one else 0 for one in samples])
    band = bands(length)
    # Hindsight is of rows that gained tokens and have enough of them.
    shown = (np.asarray(results.emission.count) > 0) & (length >= DEPTHS)
    observed = {
        name: Observations(
            seen_prompt[shown],
            np.asarray(own.past)[shown],
            np.asarray(own.ranks)[shown],
            offered=np.asarray(own.offered)[shown],
            band=band[shown],
        )
        for name, own in results.hindsight.items()
        if name != used
    }
    if strategy.parents and (used in results.hindsight or not drafter_of(strategy).has_hindsight):
        before = np.array([classes.get(used, 0) for classes in confidence])
        allowed = np.full(len(before), len(strategy.parents))
        if results.budget_share is not None:
            allowed = np.where(results.budget_share.short, results.budget_share.drafts, allowed)
        observed[used] = observe_drafts(
            strategy, results.emission, before, seen_prompt=seen_prompt, allowed=allowed, band=band
        )
    return observed


def observe_drafts(
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
