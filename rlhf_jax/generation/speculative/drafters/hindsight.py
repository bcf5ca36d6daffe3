"""Estimate the acceptance of drafters by hindsight: compare their drafts with the actual text.

It needs no drafting or verification, so a drafter can be judged before its first use.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative.drafters.search import SearchDrafter, first_occurrences
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.types import Array


@struct.dataclass
class Hindsight:
    """Hold one drafter's confidence, and the ranks of each row's last DEPTHS tokens in its drafts.

    `Observations` defines ranks and offered.
    """

    confidence: Array  # [B] int8, the class now
    past: Array  # [B] int8, the class DEPTHS tokens ago
    # [B, DEPTHS] int8, the rank of the actual token among the options at each depth; -1: none.
    ranks: Array
    # [B, DEPTHS] int8, RANKS if observed: a missing option counts as wrong; else 0.
    offered: Array


@functools.partial(jax.jit, static_argnames=("drafters", "layout"))
def look_back(
    state: DecodeState,
    siblings: Array,
    drafters: tuple[SearchDrafter, ...],
    layout: Layout = ONE_DEVICE,
) -> dict[str, Hindsight]:
    """Return the `Hindsight` of each of `drafters`, by name, from the state after a round.

    Every text, including those of siblings [B, S] int32, is cut by DEPTHS tokens, so that only then
    known tokens are used. Rows of at most DEPTHS tokens are unobserved. A depth is observed while
    rank 0 was right before it.
    """
    before = dataclasses.replace(state, length=state.length - DEPTHS)
    back = jnp.maximum(before.length, 0)[:, None] + jnp.arange(DEPTHS, dtype=jnp.int32)
    came = jnp.take_along_axis(state.tokens, back, axis=1)
    hindsight = {}
    for drafter in drafters:
        now = drafter.search(state, siblings, 1)
        past = drafter.search(before, siblings, DEPTHS)
        chex.assert_rank([past.tokens, came], [3, 2])
        right = past.tokens == came[..., None]  # [B, DEPTHS, R]
        from_start = jnp.pad(right[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=True)
        agree = jnp.cumprod(from_start, axis=1).astype(bool)
        options = first_occurrences(past.tokens, agree)
        place = jnp.cumsum(options, axis=-1, dtype=jnp.int32) - 1
        rank = jnp.where(options & right, place, -1).max(-1)

        missed = jnp.cumsum(rank != 0, axis=1, dtype=jnp.int32) - (rank != 0).astype(jnp.int32)
        observed = (missed == 0) & (before.length > 0)[:, None]
        ranks = jnp.where(observed, rank, -1).astype(jnp.int8)
        offered = jnp.where(observed, RANKS, 0).astype(jnp.int8)
        hindsight[drafter.name] = Hindsight(now.confidence, past.confidence, ranks, offered)
    return pin_rows(hindsight, layout)
