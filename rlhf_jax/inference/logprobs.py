"""Log-probabilities of finished samples as they were sampled, and a critic's values.

Shapes and order are fixed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.columns import map_tokens
from rlhf_jax.models.kernels import token_logprobs as token_logprobs_kernel
from rlhf_jax.models.transformer import cast, forward, logits
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.types import Array, Model

CHUNK = 512  # tokens per device whose logits exist at a time
ABSENT = -1e30  # A score that adds nothing to a log-sum-exp, yet has a finite gradient.


def token_logprobs(
    model: Model,
    tokens: Array,
    *,
    temperature: float,
    mask: Array | None = None,
    top_k_ids: Array | None = None,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
    remat: bool = False,
) -> jax.Array:
    """Compute log p(tokens[b, t] | tokens[b, :t]) of softmax(logits / temperature): [B, T] float32.

    tokens [B, T] int32; in nats, 0 at t = 0. `mask` [B, T] bool marks the requested tokens; the
    others are 0. `top_k_ids` [B, T, k] int32 (-1 absent) renormalises the distribution at t over
    its ids; a position without any id is not restricted. ValueError for a temperature that is not
    above 0.

    The vocabulary is projected for about `chunk` tokens of a device at a time, forward and
    backward, so that [B, T, V] never exists. `remat` is `forward`'s. A kernel of log-probabilities
    in the layout replaces the chunks, except with `top_k_ids`.
    """
    return logprobs_and_entropy(
        model,
        tokens,
        temperature=temperature,
        entropy=False,
        mask=mask,
        top_k_ids=top_k_ids,
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
    top_k_ids: Array | None = None,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute `token_logprobs` and, if `entropy` is set, -sum p log p at each token.

    Both are [B, T] float32, in nats, of the same distribution. Without `entropy` the second is None
    and costs nothing. The other arguments are those of `token_logprobs`.
    """
    chex.assert_rank(tokens, 2)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=causal_on(layout), remat=remat)
    wanted = jnp.ones(tokens.shape, bool) if mask is None else mask
    # Hidden state t - 1 predicts token t; nothing predicts the first, which is 0.
    results = head_logprobs(
        model,
        hidden[:, :-1],
        tokens[:, 1:],
        wanted[:, 1:],
        top_k_ids=None if top_k_ids is None else top_k_ids[:, 1:],
        temperature=temperature,
        entropy=entropy,
        chunk=chunk,
        layout=layout,
        head_dtype=jnp.float32,
    )
    return jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (1, 0))), results)


def head_logprobs(
    model: Model,
    hidden: Array,
    tokens: Array,
    mask: Array,
    *,
    top_k_ids: Array | None,
    temperature: float,
    entropy: bool,
    chunk: int,
    layout: Layout,
    head_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the log-probabilities of tokens [B, C], and entropies or None, from hidden states.

    hidden [B, C, M] are the states before each token; top_k_ids [B, C, k] or None. head_dtype: the
    dtype of the head's gradient sum over blocks, if there is one. See `logprobs_and_entropy`.
    """
    chex.assert_equal_shape([tokens, mask])
    if temperature <= 0:
        raise ValueError(f"Log-probabilities need a temperature above 0, not {temperature}.")
    kernel = token_logprobs_kernel(layout)
    if kernel is not None and top_k_ids is None:
        head = model.embed if model.head is None else model.head
        results = kernel(
            hidden.reshape(-1, hidden.shape[-1]),
            # The head's gradient is summed in float32, whatever the compute dtype.
            head.astype(jnp.float32),
            tokens.reshape(-1),
            temperature=temperature,
            tied=model.head is None,
        )
        logprobs, entropies = (jnp.where(mask, leaf.reshape(tokens.shape), 0.0) for leaf in results)
        return logprobs, entropies if entropy else None

    measure = functools.partial(_logprobs_of_block, temperature=temperature, entropy=entropy)
    arrays = (hidden, tokens, mask, top_k_ids)
    return map_tokens(measure, model, arrays, chunk, layout, head_dtype, wanted=mask)


def tempered_states(hidden: jax.Array, batch: PackedSequences, temperature: float) -> jax.Array:
    """Return hidden states [S, W, M] such that `temperature` gives the law that samples are of.

    Logits are linear in the states, so a sample's own temperature scales its states.
    """
    own = batch.columns.get("temperatures")
    if own is None:
        return hidden
    return hidden * jnp.where(batch.mask, temperature / own, 1.0).astype(hidden.dtype)[..., None]


def _logprobs_of_block(
    head: Model,
    hidden: Array,
    tokens: Array,
    mask: Array,
    top_k_ids: Array | None,
    *,
    temperature: float,
    entropy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute log-probabilities [C] and entropies (or None) of a block; 0 where masked out."""
    scores = logits(cast(head, hidden.dtype), hidden) / temperature
    chosen = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    normaliser = _over_top_k(functools.partial(jax.nn.logsumexp, axis=-1), scores, top_k_ids)
    logprobs = jnp.where(mask, chosen - normaliser, 0.0)
    if not entropy:
        return logprobs, None
    return logprobs, jnp.where(mask, _over_top_k(_entropy, scores, top_k_ids), 0.0)


def _over_top_k(
    statistic: Callable[[Array], jax.Array], scores: Array, top_k_ids: Array | None
) -> jax.Array:
    """Compute a statistic of scores [C, V] over the vocabulary or its top-k ids: [C].

    statistic: reduces the last axis, over the ids of `top_k_ids` [C, k] if it has any.
    """
    whole = statistic(scores)
    if top_k_ids is None:
        return whole
    present = top_k_ids >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(top_k_ids, 0), axis=-1)
    restricted = statistic(jnp.where(present, picked, ABSENT))
    return jnp.where(present.any(axis=-1), restricted, whole)


def _entropy(scores: Array) -> jax.Array:
    """Compute -sum p log p with p = softmax(scores) over the last axis."""
    return jax.nn.logsumexp(scores, axis=-1) - jnp.sum(
        jax.nn.softmax(scores, axis=-1) * scores, axis=-1
    )


def mismatch(sampled_logprobs: Array, logprobs: Array, mask: Array) -> dict[str, float]:
    """Measure the mismatch of recomputed and sampled log-probs, over the response tokens.

    Host arrays [B, T]. `mismatch/kl` estimates KL(sampled || recomputed) by mean(exp(d) - 1 - d)
    with d = recomputed - sampled (Schulman 2020, k3); `mismatch/mean` and `mismatch/max` are of
    |d|. All in nats; zeros without response tokens.
    """
    sampled = np.asarray(sampled_logprobs, np.float64)[mask]
    difference = np.asarray(logprobs, np.float64)[mask] - sampled
    if not difference.size:
        return {"mismatch/kl": 0.0, "mismatch/mean": 0.0, "mismatch/max": 0.0}
    return {
        "mismatch/kl": float(np.mean(np.expm1(difference) - difference)),
        "mismatch/mean": float(np.mean(np.abs(difference))),
        "mismatch/max": float(np.max(np.abs(difference))),
    }


def head_values(critic: Model, hidden: jax.Array, mask: Array) -> jax.Array:
    """Compute V, the expected reward to come before each predicted token: [S, W] float32.

    hidden [S, W, M] are the states before the tokens, which the scalar head [M, 1] reads in
    float32; 0 where `mask` [S, W] bool is false.
    """
    chex.assert_equal(critic.config.scalar_head, True)
    head = cast(dataclasses.replace(critic, layers=()), jnp.float32)
    values = logits(head, hidden.astype(jnp.float32))[..., 0]
    return jnp.where(mask, values, 0.0)
