"""Compute streamed log-probabilities from a platform's two passes over the vocabulary.

One pass sums over a part of the vocabulary, the other makes the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arrays import check_ranks


class Sums(NamedTuple):
    """Hold the sums of the vocabulary, or a part of it, for each row: [R] float32 each.

    z are the tempered logits.
    """

    chosen: Array  # z of the row's target, 0 if another part has it
    normaliser: Array  # log-sum-exp of z
    entropy: Array  # of softmax(z) over the part alone, in nats


class Options(NamedTuple):
    """Hold the static arguments of a kernel."""

    temperature: float
    tied: bool
    interpret: Any  # True, or the parameters of the interpreter of a platform


class Streams(NamedTuple):
    """Hold the two passes over a head of V tokens, or a device's part of them; static.

    `sums` takes hidden [R, M], head and targets [R], of which -1 is no token of this part.
    `gradients` takes the same, then normaliser and entropy of the whole vocabulary and the
    cotangents of log-probability and entropy, each [R]; it returns this part's contribution to the
    gradient of hidden, and the gradient of head, in float32.
    """

    sums: Callable[..., Sums]
    gradients: Callable[..., tuple[Array, Array]]
    tied: bool
    axis: str | None  # of the mesh, along which the vocabulary is split


def token_logprobs(
    streams: Streams, hidden: Array, head: Array, targets: Array
) -> tuple[Array, Array]:
    """Compute `reference.token_logprobs` by two streams, forward and backward without [R, V].

    The residuals are hidden, head, targets and two numbers per row; the logits are recomputed. The
    head's gradient is summed in float32 and returned in the head's dtype: give a float32 head to
    keep it. Inside `shard_map`, with an axis, head is the device's part of the vocabulary, and
    targets count from its first token.
    """
    check_ranks([hidden, head, targets], [2, 2, 1])
    held = head.shape[0 if streams.tied else 1]
    # The targets of other parts could match the padding of a tile.
    here = (targets >= 0) & (targets < held)
    return _token_logprobs(streams, hidden, head, jnp.where(here, targets, -1))


def combine(sums: Sums, axis_name: str) -> Sums:
    """Combine the `Sums` of parts along a mapped or mesh axis into those of the whole vocabulary.

    With w a part's share of the probability and h its own entropy, the whole has sum w (h - log w).
    """
    # One array, for one all-gather: each has its latency, and they would run one after another.
    parts = Sums(*jnp.moveaxis(lax.all_gather(jnp.stack(sums), axis_name), 1, 0))
    normaliser = jax.nn.logsumexp(parts.normaliser, axis=0)
    log_share = parts.normaliser - normaliser
    entropy = jnp.sum(jnp.exp(log_share) * (parts.entropy - log_share), axis=0)
    return Sums(parts.chosen.sum(axis=0), normaliser, entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(
    streams: Streams, hidden: Array, head: Array, targets: Array
) -> tuple[Array, Array]:
    """Return log-probability and entropy [R], with the gradients of `_backward`."""
    return _forward(streams, hidden, head, targets)[0]


def _forward(
    streams: Streams, hidden: Array, head: Array, targets: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Return log-probability and entropy, and the residuals."""
    sums = streams.sums(hidden, head, targets)
    if streams.axis is not None:
        sums = combine(sums, streams.axis)
    kept = (hidden, head, targets, sums.normaliser, sums.entropy)
    return (sums.chosen - sums.normaliser, sums.entropy), kept


def _backward(
    streams: Streams, kept: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Return the gradients of hidden and head from those of log-probability and entropy."""
    hidden, head, targets, normaliser, entropy = kept
    if streams.axis is not None:
        # `shard_map` divides a replicated result's cotangent over the axis, and sums the parts of
        # hidden's gradient.
        cotangents = lax.psum(cotangents, streams.axis)
    d_hidden, d_head = streams.gradients(hidden, head, targets, normaliser, entropy, *cotangents)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_token_logprobs.defvjp(_forward, _backward)
