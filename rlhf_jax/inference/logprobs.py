"""Log-probabilities of finished rows, as they were sampled, in fixed shapes and order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.model.attention import causal_on
from rlhf_jax.model.columns import join_columns, split_columns
from rlhf_jax.model.kernels import token_logprobs as token_logprobs_kernel
from rlhf_jax.model.transformer import cast, forward, logits
from rlhf_jax.types import Array, Model, Rollout

__all__ = [
    "CHUNK",
    "logprobs_and_entropy",
    "map_rows",
    "mismatch",
    "score_rollout",
    "token_logprobs",
]

CHUNK = 512  # tokens whose logits exist at one time
ABSENT = -1e30  # A score that adds nothing to a log-sum-exp, yet has a finite gradient.


def token_logprobs(
    model: Model,
    tokens: Array,
    *,
    temperature: float,
    mask: Array | None = None,
    support: Array | None = None,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
    remat: bool = False,
) -> jax.Array:
    """Compute log p(tokens[b, t] | tokens[b, :t]) of softmax(logits / temperature): [B, T] float32.

    tokens [B, T] int32; in nats, 0 at t = 0. `mask` [B, T] bool names the tokens that are wanted;
    the others are 0. `support` [B, T, k] int32 (token ids, -1 absent) renormalises the distribution
    at t over its ids; a position without any id is not restricted. ValueError for a temperature
    that is not above 0.

    The vocabulary is projected for about `chunk` tokens at a time, forward and backward, so that
    [B, T, V] never exists, and not at all for columns of tokens that nobody wants. `remat` is
    `forward`'s. Where the layout has a kernel of log-probabilities, that does the same without
    chunks, for all tokens; where there is support it is left out.
    """
    return logprobs_and_entropy(
        model,
        tokens,
        temperature=temperature,
        entropy=False,
        mask=mask,
        support=support,
        chunk=chunk,
        layout=layout,
        remat=remat,
    )[0]


def logprobs_and_entropy(
    model: Model,
    tokens: Array,
    *,
    temperature: float,
    entropy: bool,
    mask: Array | None = None,
    support: Array | None = None,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute `token_logprobs` and, where `entropy` asks for it, -sum p log p at each token.

    Both are [B, T] float32, in nats, of the same distribution. Without `entropy` there is None in
    its place, and no cost. The other arguments are those of `token_logprobs`.
    """
    chex.assert_rank(tokens, 2)
    if temperature <= 0:
        raise ValueError(f"Log-probabilities need a temperature above 0, not {temperature}.")
    slots = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=causal_on(layout), remat=remat)
    wanted = jnp.ones(tokens.shape, bool) if mask is None else mask
    # The head's gradient is summed in float32, whatever the compute dtype.
    head = cast(dataclasses.replace(model, layers=()), jnp.float32)
    kernel = token_logprobs_kernel(layout)
    if kernel is not None and support is None:
        tied = head.head is None
        found = kernel(
            hidden[:, :-1].reshape(-1, hidden.shape[-1]),
            head.embed if tied else head.head,
            tokens[:, 1:].reshape(-1),
            temperature=temperature,
            tied=tied,
        )
        by_row = [jnp.pad(leaf.reshape(len(tokens), -1), ((0, 0), (1, 0))) for leaf in found]
        logprobs, entropies = (jnp.where(wanted, leaf, 0.0) for leaf in by_row)
        return logprobs, entropies if entropy else None

    # Hidden state t - 1 predicts token t.
    predicted = (tokens[:, 1:], wanted[:, 1:], None if support is None else support[:, 1:])
    blocks = split_columns((hidden[:, :-1], *predicted), chunk)
    # Checkpointed outside its branch, else each block would keep a copy of the head for the
    # backward pass.
    project = jax.checkpoint(functools.partial(_by_block, temperature=temperature, entropy=entropy))
    out = jax.lax.map(lambda block: project(head, *block), blocks)

    # Nothing predicts the first token, which is 0.
    return jax.tree.map(lambda leaf: jnp.pad(join_columns(leaf, slots - 1), ((0, 0), (1, 0))), out)


def _by_block(
    head: Model,
    hidden: Array,
    tokens: Array,
    mask: Array,
    support: Array | None,
    *,
    temperature: float,
    entropy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute [B, C] log-probabilities and entropies (or None) of a block of columns.

    Zeros where masked out; where no token of the block is wanted, nothing is projected.
    """

    def project():
        scores = logits(cast(head, hidden.dtype), hidden) / temperature
        chosen = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        normaliser = _over_support(functools.partial(jax.nn.logsumexp, axis=-1), scores, support)
        logprobs = jnp.where(mask, chosen - normaliser, 0.0)
        if not entropy:
            return logprobs, None
        return logprobs, jnp.where(mask, _over_support(_entropy, scores, support), 0.0)

    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.cond(mask.any(), project, lambda: (zeros, zeros if entropy else None))


def _over_support(
    statistic: Callable[[Array], jax.Array], scores: Array, support: Array | None
) -> jax.Array:
    """Compute a statistic of scores [B, C, V] over the vocabulary or its support: [B, C].

    statistic: reduces the last axis. It is taken over the ids of `support` [B, C, k] where it has
    any.
    """
    whole = statistic(scores)
    if support is None:
        return whole
    present = support >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(support, 0), axis=-1)
    restricted = statistic(jnp.where(present, picked, ABSENT))
    return jnp.where(present.any(axis=-1), restricted, whole)


def _entropy(scores: Array) -> jax.Array:
    """Compute -sum p log p with p = softmax(scores) over the last axis."""
    return jax.nn.logsumexp(scores, axis=-1) - jnp.sum(
        jax.nn.softmax(scores, axis=-1) * scores, axis=-1
    )


@functools.partial(jax.jit, static_argnames=("temperature", "rows", "chunk", "layout"))
def score_rollout(
    model: Model,
    rollout: Rollout,
    *,
    temperature: float,
    rows: int,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Compute `token_logprobs` of a rollout's response tokens: [B, T] float32.

    `rows` rows at a time; B is a multiple of `rows`. The order is the rollout's and the shapes
    depend on nothing but [B, T] and `rows`, so the same tokens score the same whatever generated
    them. Micro-batch j holds rows j, n + j, 2n + j, ...: where rows are split over devices, each
    device finds its share of every micro-batch at home.
    """

    def score(part: tuple[Array, Array, Array | None]) -> jax.Array:
        tokens, mask, support = part
        return token_logprobs(
            model,
            tokens,
            temperature=temperature,
            mask=mask,
            support=support,
            chunk=chunk,
            layout=layout,
        )

    return map_rows(score, (rollout.tokens, rollout.mask, rollout.support), rows)


def map_rows(score: Callable, inputs: Any, rows: int) -> jax.Array:
    """Apply `score` to `rows` rows of the inputs at a time: [B, T, ...] -> [B, T].

    `score` gives [rows, T]; micro-batches follow one another in the order of `score_rollout`.
    ValueError where `rows` does not divide the rows.
    """
    batch = jax.tree.leaves(inputs)[0].shape[0]
    if batch % rows:
        raise ValueError(
            f"{batch} rows cannot be scored {rows} at a time; the first must be a multiple of the"
            " second."
        )
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(rows, -1, *leaf.shape[1:]).swapaxes(0, 1), inputs
    )
    out = jax.lax.map(score, parts).swapaxes(0, 1)
    return out.reshape(batch, *out.shape[2:])


def mismatch(rollout_logprobs: Array, logprobs: Array, mask: Array) -> dict[str, float]:
    """Measure how far recomputed log-probs are from the sampled ones, over the response tokens.

    Host arrays [B, T]. `mismatch/kl` estimates KL(sampled || recomputed) by mean(exp(d) - 1 - d)
    with d = recomputed - sampled (Schulman 2020, k3); `mismatch/mean` and `mismatch/max` are of
    |d|. All in nats; zeros without response tokens.
    """
    sampled = np.asarray(rollout_logprobs, np.float64)[mask]
    difference = np.asarray(logprobs, np.float64)[mask] - sampled
    if not difference.size:
        return {"mismatch/kl": 0.0, "mismatch/mean": 0.0, "mismatch/max": 0.0}
    return {
        "mismatch/kl": float(np.mean(np.expm1(difference) - difference)),
        "mismatch/mean": float(np.mean(np.abs(difference))),
        "mismatch/max": float(np.max(np.abs(difference))),
    }
