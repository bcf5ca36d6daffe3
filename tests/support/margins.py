"""Measure how far a draw is from another outcome, for tests that compare texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.shapes import BLOCK
from pallas_kernels.verify_head.reference import blocks, inside
from rlhf_jax.generation.speculative import sampling as sampling_module
from rlhf_jax.generation.speculative.sampling import (
    Sampling,
    Truncation,
    block_noise,
    log_probabilities,
    truncate,
)


def decision_margin(logits: Array, key: Array, position: Array, sampling: Sampling) -> Array:
    """Return how far `[...]` float32 the draw is from another outcome, in tempered logits.

    Two runs may differ where it is tiny. It is the least of the gaps between the two best blocks
    and the two best tokens of the best block and, where the draw depends on it, of the distance to
    the top-k or top-p edge. At temperature 0 it is the gap of the two largest logits. Arguments as
    for `draw`.
    """
    if sampling.temperature == 0:
        return _gap(logits.astype(jnp.float32))
    z = truncate(logits, sampling.temperature, sampling.truncation)[0]
    token, margin = _outcome(z, key, position)
    if not sampling.top_k and sampling.top_p == 1:
        return margin
    full = logits.astype(jnp.float32) / sampling.temperature
    for distance, moved in _edge_moves(full, z, sampling):
        other, gap = _outcome(moved, key, position)
        margin = jnp.minimum(margin, jnp.maximum(distance, jnp.where(other == token, gap, 0.0)))
    return margin


def _outcome(z: Array, key: Array, position: Array) -> tuple[Array, Array]:
    """Return the token that truncated logits give, and the smaller gap of its two levels."""
    block_scores = jax.nn.logsumexp(blocks(z), -1) + block_noise(key, position, z.shape[-1])
    block = jnp.argmax(block_scores, -1)[..., None].astype(jnp.int32)
    scores = (inside(z, block) + sampling_module._token_noise(block, key, position, 1))[..., 0, :]
    token = block[..., 0] * BLOCK + jnp.argmax(scores, -1).astype(jnp.int32)
    return token, jnp.minimum(_gap(block_scores), _gap(scores))


def _edge_moves(full: Array, z: Array, sampling: Sampling) -> list[tuple[Array, Array]]:
    """Return the truncations one step over the edge: last token out, next one in, or both.

    Each is (its distance `[...]`, its logits `[..., V]`). full are tempered logits, z truncated.
    """
    kept = z > -jnp.inf
    last = jnp.min(jnp.where(kept, z, jnp.inf), -1, keepdims=True)
    following = jnp.max(jnp.where(kept, -jnp.inf, full), -1, keepdims=True)
    swap = out = into = (last - following)[..., 0]
    if sampling.top_p < 1:
        # Mass is counted where top-p counts it: on what top-k leaves.
        mass = jnp.exp(log_probabilities(full, 1.0, Truncation(sampling.top_k)))
        out = jnp.abs(jnp.sum(jnp.where(z > last, mass, 0.0), -1) - sampling.top_p)
        into = jnp.abs(jnp.sum(jnp.where(kept, mass, 0.0), -1) - sampling.top_p)
    fewer = jnp.where(z > last, z, -jnp.inf)
    entering = ~kept & (full == following)
    return [
        (swap, jnp.where(entering, full, fewer)),
        (out, fewer),
        (into, jnp.where(entering, full, z)),
    ]


def _gap(scores: Array) -> Array:
    """Return the difference of the two largest of the last axis; inf where there is no second."""
    best = jnp.arange(scores.shape[-1]) == jnp.argmax(scores, -1, keepdims=True)
    first = jnp.max(scores, -1)
    second = jnp.max(jnp.where(best, -jnp.inf, scores), -1)
    return jnp.where(second > -jnp.inf, first - second, jnp.inf)
