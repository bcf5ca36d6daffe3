"""How well the free drafters do, seen by looking back: what they would have drafted against what
came.

It costs no draft and no verification, so a drafter is known before it is ever used.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.generation.speculative.drafters import lookup, replay
from rlhf_jax.generation.speculative.drafters.lookup import Found, distinct
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.mesh import pin_rows
from rlhf_jax.types import Array, DecodeState

FREE = ("lookup", "replay")  # drafters that need no model


@struct.dataclass
class Hindsight:
    """One drafter's confidence, and the evidence of its last DEPTHS tokens, row by row (see
    `Observations`).
    """

    confidence: Array  # [B] int8, the class now
    past: Array  # [B] int8, the class DEPTHS tokens ago
    # [B, DEPTHS] int8, rank of the token that came among the options at each depth; -1: none of
    # them
    ranks: Array
    # [B, DEPTHS] int8, RANKS where that was observed: what was lacking counts as wrong; else 0
    offered: Array


@functools.partial(jax.jit, static_argnames=("drafters", "mesh"))
def look(
    state: DecodeState, siblings: Array, drafters: tuple[str, ...] = FREE, mesh=None
) -> dict[str, Hindsight]:
    """A `Hindsight` of each of `drafters` (out of FREE), from the state after a round.

    Looking back, every text, the siblings' [B, S] included, is cut by DEPTHS tokens: nothing is
    used that was not known. Rows of DEPTHS tokens and fewer are unobserved. A depth is observed
    while rank 0 was right before it.
    """
    before = dataclasses.replace(state, length=state.length - DEPTHS)
    back = jnp.maximum(before.length, 0)[:, None] + jnp.arange(DEPTHS, dtype=jnp.int32)
    came = jnp.take_along_axis(state.tokens, back, axis=1)
    signals = {}
    for name in drafters:
        now = _search(name, state, siblings, 1)
        past = _search(name, before, siblings, DEPTHS)
        ranks, offered = compare(past, came, before.length > 0)
        signals[name] = Hindsight(now.confidence, past.confidence, ranks, offered)
    return pin_rows(signals, mesh)


def _search(name: str, state: DecodeState, siblings: Array, depth: int) -> Found:
    return (
        lookup.search(state, siblings, depth) if name == "lookup" else replay.search(state, depth)
    )


def compare(found: Found, came: Array, known: Array) -> tuple[Array, Array]:
    """(ranks, offered), both [B, K] int8 as in `Hindsight`, of what was found and what came [B, K];
    known[B]: observed.
    """
    chex.assert_rank([found.tokens, came, known], [3, 2, 1])
    right = found.tokens == came[..., None]  # [B, K, R]
    agree = jnp.cumprod(
        jnp.pad(right[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=True), axis=1
    ).astype(bool)
    options = distinct(found.tokens, agree)
    rank = jnp.where(options & right, jnp.cumsum(options, axis=-1, dtype=jnp.int32) - 1, -1).max(-1)
    missed = jnp.cumsum(rank != 0, axis=1, dtype=jnp.int32) - (rank != 0).astype(jnp.int32)
    observed = (missed == 0) & known[:, None]
    return jnp.where(observed, rank, -1).astype(jnp.int8), jnp.where(observed, RANKS, 0).astype(
        jnp.int8
    )
