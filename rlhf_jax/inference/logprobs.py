"""Log-probabilities of finished rows under the law they were sampled from, in fixed shapes and
order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.model.attention import causal
from rlhf_jax.model.columns import join_columns, split_columns
from rlhf_jax.model.transformer import cast, forward, logits
from rlhf_jax.types import Array, Model, Rollout

CHUNK = 512  # tokens whose logits exist at one time
ABSENT = -1e30  # a score that adds nothing to a log-sum-exp, yet has a finite gradient


def token_logprobs(
    model: Model,
    tokens: Array,
    *,
    temperature: float,
    mask: Array | None = None,
    support: Array | None = None,
    chunk: int = CHUNK,
    attend: Callable = causal,
    remat: bool = False,
    law: Callable | None = None,
) -> Array:
    """log p(tokens[b, t] | tokens[b, :t]) under softmax(logits / temperature), [B, T] float32; 0 at
    t = 0.

    `mask[B, T]` names the tokens that are wanted; the others are 0. `support[B, T, k]` (token ids,
    -1 absent) renormalises the law at t on its ids; a position without any id is not restricted.
    The vocabulary is projected for about `chunk` tokens at a time, forward and backward, so that
    [B, T, V] never exists, and not at all for columns of tokens that nobody wants. `attend` and
    `remat` are `forward`'s. `law`, a kernel as `pallas_kernels.logprobs`, does the same without
    chunks, for all tokens; where there is support it is left out.
    """
    options = {
        "mask": mask,
        "support": support,
        "chunk": chunk,
        "attend": attend,
        "remat": remat,
        "law": law,
    }
    return token_law(model, tokens, temperature=temperature, entropy=False, **options)[0]


def token_law(
    model: Model,
    tokens: Array,
    *,
    temperature: float,
    entropy: bool,
    mask: Array | None = None,
    support: Array | None = None,
    chunk: int = CHUNK,
    attend: Callable = causal,
    remat: bool = False,
    law: Callable | None = None,
) -> tuple[Array, Array | None]:
    """`token_logprobs` and, where `entropy` asks for it, -sum p log p of the same law at each
    token: both [B, T] float32, in nats. Without it there is None, and no cost.
    """
    chex.assert_rank(tokens, 2)
    if temperature <= 0:
        raise ValueError(f"Log-probabilities need a temperature above 0, not {temperature}.")
    slots = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=attend, remat=remat)
    wanted_tokens = jnp.ones(tokens.shape, bool) if mask is None else mask
    # The head's gradient is summed in float32, whatever the compute dtype.
    head = cast(dataclasses.replace(model, layers=()), jnp.float32)
    if law is not None and support is None:
        logprobs, entropies = _streamed_law(law, head, hidden, tokens, wanted_tokens, temperature)
        return logprobs, entropies if entropy else None
    wanted = (tokens[:, 1:], wanted_tokens[:, 1:], None if support is None else support[:, 1:])
    blocks = split_columns((hidden[:, :-1], *wanted), chunk)
    # Checkpointed outside its branch, else each block would keep a copy of the head for the
    # backward pass.
    project = jax.checkpoint(
        functools.partial(_block_law, temperature=temperature, entropy=entropy)
    )
    out = jax.lax.map(lambda block: project(head, *block), blocks)
    # Nothing predicts the first token, which is 0.
    return jax.tree.map(lambda leaf: jnp.pad(join_columns(leaf, slots - 1), ((0, 0), (1, 0))), out)


def _streamed_law(
    law: Callable, head: Model, hidden, tokens, mask, temperature: float
) -> tuple[Array, Array]:
    """[B, T] log-probabilities and entropies by a kernel, zeros where no token is wanted."""
    tied = head.head is None
    flat = (
        hidden[:, :-1].reshape(-1, hidden.shape[-1]),
        head.embed if tied else head.head,
        tokens[:, 1:].reshape(-1),
    )
    logprobs, entropies = law(*flat, temperature=temperature, tied=tied)

    def by_row(leaf: Array) -> Array:
        return jnp.where(mask, jnp.pad(leaf.reshape(len(tokens), -1), ((0, 0), (1, 0))), 0.0)

    return by_row(logprobs), by_row(entropies)


def _block_law(head: Model, hidden, tokens, mask, support, *, temperature: float, entropy: bool):
    """[B, C] log-probabilities of a block of columns and entropies or None; zeros when none of them
    is wanted.
    """

    def project():
        scores = logits(cast(head, hidden.dtype), hidden) / temperature
        chosen = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        normaliser = _of_law(functools.partial(jax.nn.logsumexp, axis=-1), scores, support)
        logprobs = jnp.where(mask, chosen - normaliser, 0.0)
        return logprobs, jnp.where(
            mask, _of_law(_entropy, scores, support), 0.0
        ) if entropy else None

    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.cond(mask.any(), project, lambda: (zeros, zeros if entropy else None))


def _of_law(statistic: Callable[[Array], Array], scores: Array, support: Array | None) -> Array:
    """A statistic of scores [B, C, V] over the vocabulary, or over support [B, C, k] where it has
    ids: [B, C].
    """
    whole = statistic(scores)
    if support is None:
        return whole
    present = support >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(support, 0), axis=-1)
    restricted = statistic(jnp.where(present, picked, ABSENT))
    return jnp.where(present.any(axis=-1), restricted, whole)


def _entropy(scores: Array) -> Array:
    """-sum p log p with p = softmax(scores) over the last axis."""
    return jax.nn.logsumexp(scores, axis=-1) - jnp.sum(
        jax.nn.softmax(scores, axis=-1) * scores, axis=-1
    )


@functools.partial(jax.jit, static_argnames=("temperature", "rows", "chunk", "attend", "law"))
def score_rollout(
    model: Model,
    rollout: Rollout,
    *,
    temperature: float,
    rows: int,
    chunk: int = CHUNK,
    attend: Callable = causal,
    law: Callable | None = None,
) -> Array:
    """`token_logprobs` of a rollout's response tokens, [B, T] float32, `rows` rows at a time; B a
    multiple of `rows`.

    The order is the rollout's and the shapes depend on nothing but [B, T] and `rows`, so the same
    tokens score the same whatever generated them. Micro-batch j holds rows j, n + j, 2n + j, ...:
    where rows are split over devices, each device finds its share of every micro-batch at home.
    """

    def score(part):
        tokens, mask, support = part
        how = functools.partial(
            token_logprobs, temperature=temperature, chunk=chunk, attend=attend, law=law
        )
        return how(model, tokens, mask=mask, support=support)

    return map_rows(score, (rollout.tokens, rollout.mask, rollout.support), rows)


def map_rows(score: Callable, inputs: Any, rows: int) -> Array:
    """score(`rows` rows of the inputs [B, T, ...]) -> [rows, T], one micro-batch after another: [B,
    T].
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


def mismatch(rollout_logprobs, logprobs, mask) -> dict[str, float]:
    """How far the recomputed law is from the sampled one, over the response tokens of host arrays
    [B, T].

    `mismatch/kl` estimates KL(sampled || recomputed) by mean(exp(d) - 1 - d) with d = recomputed -
    sampled (Schulman 2020, k3); `mismatch/mean` and `mismatch/max` are of |d|. All in nats; zeros
    without response tokens.
    """
    difference = (
        np.asarray(logprobs, np.float64)[mask] - np.asarray(rollout_logprobs, np.float64)[mask]
    )
    if not difference.size:
        return {"mismatch/kl": 0.0, "mismatch/mean": 0.0, "mismatch/max": 0.0}
    return {
        "mismatch/kl": float(np.mean(np.expm1(difference) - difference)),
        "mismatch/mean": float(np.mean(np.abs(difference))),
        "mismatch/max": float(np.max(np.abs(difference))),
    }
