"""What streamed log-probabilities are made of on every platform: sums over a part of the
vocabulary, and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


class Sums(NamedTuple):
    """What a part of the vocabulary, or all of it, says of each row's law, [R] float32 each; z are
    tempered logits.
    """

    chosen: Array  # z of the row's target, 0 where another part has it
    normaliser: Array  # log-sum-exp of z
    entropy: Array  # of softmax(z) over the part alone, in nats


def combine(sums: Sums, axis_name: str) -> Sums:
    """`Sums` of the whole vocabulary from those of its parts, which lie along a mapped or mesh
    axis: one all-gather.

    With w a part's share of the probability and h its own entropy, the whole has sum w (h - log w).
    """
    # One array, for one crossing: several would wait for each other, and each costs its latency.
    parts = Sums(*jnp.moveaxis(jax.lax.all_gather(jnp.stack(sums), axis_name), 1, 0))
    normaliser = jax.nn.logsumexp(parts.normaliser, axis=0)
    log_share = parts.normaliser - normaliser
    entropy = jnp.sum(jnp.exp(log_share) * (parts.entropy - log_share), axis=0)
    return Sums(parts.chosen.sum(axis=0), normaliser, entropy)


class Options(NamedTuple):
    """What of a kernel's call is static."""

    temperature: float
    tied: bool
    interpret: Any  # True, or the parameters of the interpreter of a platform


class Streams(NamedTuple):
    """The two passes over a head of V tokens, or a device's part of them; static.

    `sums` takes hidden [R, M], head and targets [R], of which -1 is no token of this part.
    `gradients` takes the same, then normaliser and entropy of the whole vocabulary and the
    cotangents of log-probability and entropy, each [R]; it gives the gradients of hidden, as far as
    this part goes, and of head, in float32.
    """

    sums: Callable[..., Sums]
    gradients: Callable[..., tuple[Array, Array]]
    tied: bool
    axis: str | None  # of the mesh, along which the vocabulary is split


def law(streams: Streams, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    """`reference.law` by two streams; [R, V] exists nowhere, neither forward nor backward.

    The gradient keeps hidden, head, targets and two numbers a row, and computes the logits again.
    The head's is summed in float32 and given in the head's dtype: give a float32 head to keep it.
    Inside `shard_map`, with an axis, head is the device's part of the vocabulary, and targets count
    from its first token.
    """
    chex.assert_rank([hidden, head, targets], [2, 2, 1])
    held = head.shape[0 if streams.tied else 1]
    here = (targets >= 0) & (targets < held)  # others could meet the padding of a tile
    return _law(streams, hidden, head, jnp.where(here, targets, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _law(streams: Streams, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    return _forward(streams, hidden, head, targets)[0]


def _forward(streams: Streams, hidden: Array, head: Array, targets: Array):
    sums = streams.sums(hidden, head, targets)
    if streams.axis is not None:
        sums = combine(sums, streams.axis)
    return (sums.chosen - sums.normaliser, sums.entropy), (
        hidden,
        head,
        targets,
        sums.normaliser,
        sums.entropy,
    )


def _backward(streams: Streams, residuals: tuple[Array, ...], cotangents: Any):
    hidden, head, *_ = residuals
    if streams.axis is not None:
        # `shard_map` shares a replicated result's cotangent out over the axis, and sums the parts
        # of hidden's gradient.
        cotangents = jax.lax.psum(cotangents, streams.axis)
    d_hidden, d_head = streams.gradients(*residuals, *cotangents)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_law.defvjp(_forward, _backward)
