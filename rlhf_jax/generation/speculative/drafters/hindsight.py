"""Say how well drafters would do, by looking back: what they would have drafted, and what came.

It costs no draft and no verification, so a drafter is known before it is ever used.
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
    """Hold one drafter's confidence, and how it would have drafted each row's last DEPTHS tokens.

    `Observations` says what ranks and offered mean.
    """

    confidence: Array  # [B] int8, the class now
    past: Array  # [B] int8, the class DEPTHS tokens ago
    # [B, DEPTHS] int8, the rank of the token that came among the options at each depth; -1: none of
    # them.
    ranks: Array
    # [B, DEPTHS] int8, RANKS where that was observed: what was lacking counts as wrong; else 0.
    offered: Array


@functools.partial(jax.jit, static_argnames=("drafters", "layout"))
def look_back(
    state: DecodeState,
    siblings: Array,
    drafters: tuple[SearchDrafter, ...],
    layout: Layout = ONE_DEVICE,
) -> dict[str, Hindsight]:
    """Return the `Hindsight` of each of `drafters`, by name, from the state after a round.

    Every text, those of siblings [B, S] int32 too, is cut by DEPTHS tokens: nothing is used that
    was not known. Rows of DEPTHS tokens and fewer are unobserved. A depth is observed while rank 0
    was right before it.
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
