"""Compute the inputs of a replayable draw from the logits at each node, in plain JAX.

This defines the kernels, and is the path on any other hardware.

The draw first picks a block of 256 consecutive token ids by log-sum-exp + noise, then a token
inside it. The first half needs the whole vocabulary and ends in `Parts`, 256 logits per node; the
second needs `Parts` only. So the first half can stream over the vocabulary, on one device or on
several.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels.arrays import check_ranks
from pallas_kernels.shapes import BLOCK


class Parts(NamedTuple):
    """Hold the reduced logits `[..., V]` after a block has been chosen.

    The rest of the draw reads nothing else.
    """

    normaliser: Array  # [...] float32, log-sum-exp of the tempered logits
    score: Array  # [...] float32, the chosen block's, the largest of all
    block: Array  # [...] int32, the chosen block: of equal scores the first
    inside: Array  # [..., 256] float32, its tempered logits, -inf past V


def verify_head(
    hidden: Array,
    head: Array,
    noise: Array,
    temperature: Array,
    vocab: Array | int | None = None,
    *,
    tied: bool,
) -> Parts:
    """Compute the `Parts` of `hidden @ head / temperature` at each of R = B * (N+1) nodes.

    hidden [R, M]; head [M, V], or [V, M] if `tied` to the embedding; both of one dtype, bfloat16 or
    float32 (then in the highest precision). noise [R, ceil(V/256)] float32 is added to each block's
    log-sum-exp, which makes its score. temperature [R] float32; if it is 0, logits are not divided,
    and a block's score is its largest logit.

    `vocab` is the number of valid tokens of the head, whose rest pads it to whole blocks; None:
    all.

    The distribution is not truncated: top-k and top-p need all logits of a node at once, so callers
    with truncation keep the logits and draw from those.
    """
    check(hidden, head, noise, temperature, tied=tied)
    precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    logits = lax.dot_general(
        hidden, head, dims, precision=precision, preferred_element_type=jnp.float32
    )
    if vocab is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1], dtype=jnp.int32) < vocab, logits, -jnp.inf)
    return parts_of(tempered(logits, temperature), noise, temperature)


def check(hidden: Array, head: Array, noise: Array, temperature: Array, *, tied: bool) -> None:
    """Assert the ranks, shapes and dtypes of every implementation of `verify_head`."""
    check_ranks([hidden, head], [2, 2])
    assert head.dtype == hidden.dtype, f"The head is {head.dtype}, hidden states {hidden.dtype}."
    width = head.shape[1 if tied else 0]
    assert width == hidden.shape[1], f"The head is {width} wide, hidden states {hidden.shape[1]}."
    rows = hidden.shape[0]
    expected = (rows, -(-head.shape[0 if tied else 1] // BLOCK))
    assert noise.shape == expected, f"The noise has shape {noise.shape}, not {expected}."
    shape = temperature.shape
    assert shape == (rows,), f"The temperature has shape {shape}, not {(rows,)}."


def tempered(logits: Array, temperature: ArrayLike) -> Array:
    """Return logits `[..., V]` divided by their temperature `[...]`, float32.

    At 0 they stay unchanged.
    """
    divisor = jnp.asarray(temperature, jnp.float32)[..., None]
    # XLA turns a division by a constant into the same product.
    return logits.astype(jnp.float32) * (1 / jnp.where(divisor == 0, 1.0, divisor))


def parts_of(z: Array, noise: Array, temperature: ArrayLike) -> Parts:
    """Compute the `Parts` of tempered logits z `[..., V]` float32.

    The block noise is `[..., ceil(V/256)]` and is used if the temperature `[...]` is above 0.
    """
    log_sums = jax.nn.logsumexp(blocks(z), -1)
    greedy = jnp.asarray(temperature)[..., None] == 0
    scores = jnp.where(greedy, jnp.max(blocks(z), -1), log_sums + noise)
    block = jnp.argmax(scores, -1)[..., None].astype(jnp.int32)
    chosen = inside(z, block)[..., 0, :]
    normaliser = jax.nn.logsumexp(log_sums, -1)
    return Parts(normaliser, jnp.max(scores, -1), block[..., 0], inside=chosen)


def blocks(z: Array) -> Array:
    """Return z `[..., V]` as `[..., blocks, 256]`, padded with -inf.

    So the ids of a block never depend on V.
    """
    short = -z.shape[-1] % BLOCK
    z = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, short)], constant_values=-jnp.inf)
    return z.reshape(*z.shape[:-1], -1, BLOCK)


def inside(z: Array, chosen: Array) -> Array:
    """Return the logits `[..., c, 256]` of blocks `chosen[..., c]` int32 of z `[..., V]`.

    They are -inf past V.
    """
    # Read from z: a second reader of the padded blocks would make XLA materialise them, five times
    # slower.
    ids = chosen[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    flat = jnp.minimum(ids, z.shape[-1] - 1).reshape(*chosen.shape[:-1], -1)
    return jnp.where(
        ids < z.shape[-1], jnp.take_along_axis(z, flat, -1).reshape(ids.shape), -jnp.inf
    )


def combine(parts: Parts, axis_name: str, offset: Array | int) -> Parts:
    """Combine the `Parts` of a vocabulary's shards over a mesh axis, inside `shard_map`.

    A shard holds whole blocks, the first of which is block `offset` of the vocabulary; its noise is
    of those blocks. Three numbers per node and one block of logits cross the axis; the result is
    the same on every device.
    """
    check_ranks([parts.normaliser, parts.inside], [parts.score.ndim, parts.score.ndim + 1])
    # Exact: there are fewer than 2**24.
    block = (parts.block + offset).astype(jnp.float32)
    # One array, for one transfer: each has its latency, and they would run one after another.
    packed = jnp.concatenate(
        [jnp.stack([parts.normaliser, parts.score, block], -1), parts.inside], -1
    )
    shards = lax.all_gather(packed, axis_name)
    # Of equal scores the first shard's, whose blocks come first.
    best = jnp.argmax(shards[..., 1], 0)[None, ..., None]
    chosen = jnp.take_along_axis(shards, best, 0)[0]
    normaliser = jax.nn.logsumexp(shards[..., 0], 0)
    score = chosen[..., 1]
    block = chosen[..., 2].astype(jnp.int32)
    return Parts(normaliser, score, block, inside=chosen[..., 3:])
