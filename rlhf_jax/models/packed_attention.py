"""Attend within packed lines, one pair of blocks at a time, skipping pairs without visible tokens.

A token sees itself and the earlier tokens of its own segment and of its prompt's, so samples of one
prompt share it. Which blocks of a line see which is data: a line of one long sample and one of many
short ones run the same program, with different iteration counts. The softmax is summed over blocks
as they come, and its weights are recomputed for the gradient (Dao et al. 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.arrays import LOWEST

ATTENDED = "attended"  # name under which the backward pass may keep a layer's attention


class Line(NamedTuple):
    """Hold the segments of a line, by block, and the pairs of blocks that see each other."""

    own: Array  # [N, K] int32, a token's segment, -1 of padding
    prompt: Array  # [N, K] int32, its prompt's segment
    pairs: Array  # [P, 2] int32, blocks of queries and of keys; -1 after the last


def attend_packed(
    query: Array, key: Array, value: Array, segments: Array, pairs: Array
) -> jax.Array:
    """Attend in lines of tokens: [S, C, H, D] in the query's dtype.

    query [S, C, H, D], key and value [S, C, G, D]; segments [S, C, 2] and pairs [S, P, 2] are those
    of `PackedSequences`. Scores and sums are float32; a token that sees nothing gives zeros.
    """
    chex.assert_rank([query, key, value, segments, pairs], [4, 4, 4, 3, 3])
    lines = zip(query, key, value, segments, pairs, strict=True)
    return jnp.stack([_attend_line(*line) for line in lines])


def _attend_line(query: Array, key: Array, value: Array, segments: Array, pairs: Array) -> Array:
    """Attend in one line."""
    count, heads, dim = query.shape
    groups = key.shape[1]
    blocks = (math.isqrt(8 * len(pairs) + 1) - 1) // 2  # pairs: all causal ones of this many
    size = count // blocks
    own, prompt = segments.T.reshape(2, blocks, size)
    # Heads that read the same keys are queries of one product: [N, G, H / G * K, D].
    grouped = query.reshape(blocks, size, groups, heads // groups, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(blocks, groups, -1, dim)
    keys, values = (part.reshape(blocks, size, groups, dim).swapaxes(1, 2) for part in (key, value))
    out = _attend_blocks(grouped, keys, values, Line(own, prompt, pairs))
    out = out.reshape(blocks, groups, heads // groups, size, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(count, heads, dim)


@jax.custom_vjp
def _attend_blocks(query: Array, key: Array, value: Array, line: Line) -> Array:
    """Attend by blocks: query [N, G, Q, D], key and value [N, G, K, D] -> [N, G, Q, D]."""
    return _forward(query, key, value, line)[0]


def _forward(query: Array, key: Array, value: Array, line: Line) -> tuple[Array, tuple]:
    """Return the result of `_attend_blocks`, and the residuals of its gradient."""
    sums = jnp.zeros(query.shape, jnp.float32)
    weight = jnp.zeros((*query.shape[:3], 1), jnp.float32)
    top = jnp.full(weight.shape, LOWEST, jnp.float32)

    def add_pair(turn: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Let one block of queries see one of keys."""
        sums, weight, top = state
        mine, theirs = line.pairs[turn]
        scores, seen = _scores(query, key, line, mine, theirs)
        before = top[mine]
        now = jnp.maximum(before, jnp.where(seen, scores, LOWEST).max(axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        kept = jnp.exp(before - now)
        seen_values = _product("gqk,gkd->gqd", weights.astype(value.dtype), value[theirs])
        return (
            sums.at[mine].set(sums[mine] * kept + seen_values),
            weight.at[mine].set(weight[mine] * kept + weights.sum(axis=-1, keepdims=True)),
            top.at[mine].set(now),
        )

    sums, weight, top = jax.lax.fori_loop(0, _count(line), add_pair, (sums, weight, top))
    # The best score weighs 1, so a sum below 1 is that of a query that sees nothing.
    weight = jnp.maximum(weight, 1.0)
    out = checkpoint_name((sums / weight).astype(query.dtype), ATTENDED)
    normaliser = checkpoint_name(top + jnp.log(weight), ATTENDED)
    return out, (query, key, value, line, out, normaliser)


def _backward(kept: tuple, cotangent: Array) -> tuple[Array, Array, Array, None]:
    """Return the gradients by query, key and value."""
    query, key, value, line, out, normaliser = kept
    balance = _product("ngqd,ngqd->ngq", cotangent, out)[..., None]

    def add_pair(turn: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add the gradients of one pair of blocks."""
        of_query, of_key, of_value = sums
        mine, theirs = line.pairs[turn]
        scores, seen = _scores(query, key, line, mine, theirs)
        weights = jnp.where(seen, jnp.exp(scores - normaliser[mine]), 0.0)
        block_cotangent = cotangent[mine]
        of_weights = _product("gqd,gkd->gqk", block_cotangent, value[theirs])
        of_scores = weights * (of_weights - balance[mine]) * query.shape[-1] ** -0.5
        of_scores = of_scores.astype(query.dtype)
        weights = weights.astype(query.dtype)
        return (
            of_query.at[mine].add(_product("gqk,gkd->gqd", of_scores, key[theirs])),
            of_key.at[theirs].add(_product("gqk,gqd->gkd", of_scores, query[mine])),
            of_value.at[theirs].add(_product("gqk,gqd->gkd", weights, block_cotangent)),
        )

    zeros = [jnp.zeros(part.shape, jnp.float32) for part in (query, key, value)]
    gradients = jax.lax.fori_loop(0, _count(line), add_pair, tuple(zeros))
    return *(part.astype(query.dtype) for part in gradients), None


_attend_blocks.defvjp(_forward, _backward)


def _count(line: Line) -> Array:
    """Count the pairs of a line."""
    return (line.pairs[:, 0] >= 0).sum(dtype=jnp.int32)


def _scores(
    query: Array, key: Array, line: Line, mine: Array, theirs: Array
) -> tuple[Array, Array]:
    """Return a pair's scores [G, Q, K] in float32, and which of them are valid: [Q, K] bool."""
    own = line.own[mine][:, None]
    prompt = line.prompt[mine][:, None]
    there = line.own[theirs][None, :]
    size = own.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    before = theirs * size + place[None, :] <= mine * size + place[:, None]
    seen = before & (own >= 0) & ((there == own) | (there == prompt))
    scores = _product("gqd,gkd->gqk", query[mine], key[theirs]) * query.shape[-1] ** -0.5
    return scores, jnp.tile(seen, (query.shape[2] // size, 1))


def _product(how: str, left: Array, right: Array) -> Array:
    """Compute a product that is summed in float32."""
    return jnp.einsum(how, left, right, preferred_element_type=jnp.float32)
