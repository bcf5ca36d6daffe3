"""Losses, one equation a function: PPO's of policy and critic, weights of tokens, their sums."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.training.batching import MicroBatch
from rlhf_jax.training.kl import bounded, kl_k1, kl_k3
from rlhf_jax.training.policy_losses import LossTerms, PolicyLoss, ppo
from rlhf_jax.types import Array

__all__ = [
    "AGGREGATES",
    "constant_weights",
    "explained_variance",
    "sequence_mean_weights",
    "summed_policy_loss",
    "summed_value_loss",
    "token_mean",
    "token_mean_weights",
    "value_loss",
]


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, clip: float
) -> jax.Array:
    """Compute max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token.

    values, old_values and returns [B, T] float32, mask [B, T] bool -> [B, T] float32, 0 where
    masked out (PPO's code, Dhariwal et al. 2017; Engstrom et al. 2020, 3).
    """
    chex.assert_equal_shape([values, old_values, returns, mask])
    near = jnp.clip(values, old_values - clip, old_values + clip)
    return jnp.where(mask, 0.5 * jnp.maximum((values - returns) ** 2, (near - returns) ** 2), 0.0)


def token_mean_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / tokens, so that every token of a minibatch weighs the same.

    mask [n, T] bool -> [n, T] float32 (DAPO, Yu et al. 2025, eq. 8).
    """
    del max_new_tokens
    return (mask / max(1, mask.sum())).astype(np.float32)


def sequence_mean_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / (rows * tokens of the row), so that every response weighs the same.

    mask [n, T] bool -> [n, T] float32; rows without a token are not counted (DeepSeekMath, Shao et
    al. 2024, eq. 3).
    """
    del max_new_tokens
    tokens = mask.sum(axis=1, keepdims=True)
    return (mask / np.maximum(1, tokens) / max(1, (tokens > 0).sum())).astype(np.float32)


def constant_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / (rows * max_new_tokens), a token's weight whatever the lengths.

    mask [n, T] bool -> [n, T] float32; rows without a token are not counted. max_new_tokens: the
    tokens that a response may have (Dr. GRPO, Liu et al. 2025, 3.2).
    """
    return (mask / (max(1, mask.any(axis=1).sum()) * max_new_tokens)).astype(np.float32)


# By the names that training.aggregate may have.
AGGREGATES = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
    "constant": constant_weights,
}


def token_mean(x: Array, mask: Array, total: Array) -> jax.Array:
    """Compute the sum of x over the mask, over `total`, the tokens of the whole minibatch.

    x [B, T] float32, mask [B, T] bool, total [] float32 -> [] float32. Summed over micro-batches it
    is the minibatch's mean, however the minibatch is split.
    """
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0)) / total


def is_maximum(name: str) -> bool:
    """Tell whether a metric of this name is a maximum over tokens; others are sums of shares."""
    return name.endswith("/max")


def summed_policy_loss(
    logprobs: Array,
    entropy: Array | None,
    batch: MicroBatch,
    *,
    loss: PolicyLoss = ppo,
    clip_low: float,
    clip_high: float,
    kl_estimator: Callable[[Array, Array], Array],
    entropy_coefficient: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the sum of weights * (policy loss + KL penalty - entropy bonus), and metrics.

    `loss` gives the policy's, token by token. The penalty is kl_weight * kl_estimator(policy,
    reference), the bonus entropy_coefficient * entropy. logprobs and entropy (or None) [S, W]
    float32 are the policy's now; they are the old ones, too, where the batch has none. The loss is
    [] float32. Metrics are shares of the minibatch's token means, to be summed over micro-batches,
    but for maxima (`is_maximum`). `kl/mean` is to the reference, `kl/old` is KL(old || now), both
    in nats by k3.
    """
    mask = batch.mask
    chex.assert_equal_shape([logprobs, batch.weights, mask])
    now = jnp.where(mask, logprobs, 0.0)
    old = jax.lax.stop_gradient(now) if batch.logprobs is None else batch.logprobs
    old = jnp.where(mask, old, 0.0)
    reference = old if batch.reference_logprobs is None else batch.reference_logprobs
    reference = jnp.where(mask, reference, 0.0)
    terms = LossTerms(
        now,
        old,
        batch.advantages,
        mask,
        batch.packed.owner,
        batch.packed.samples.shape[1],
        clip_low=clip_low,
        clip_high=clip_high,
    )
    losses = jnp.where(mask, loss(terms), 0.0)
    ratios = terms.ratios
    outside = (ratios < 1.0 - clip_low) | (ratios > 1.0 + clip_high)
    means = {
        "loss/policy": losses,
        "kl/mean": kl_k3(now, reference),
        "kl/old": kl_k3(old, now),
        "ratio/mean": ratios,
        "ratio/clipped": outside.astype(jnp.float32),
        "entropy/estimate": -logprobs,
    }
    if entropy is not None:
        means["entropy/mean"] = entropy
    metrics = {name: token_mean(x, mask, batch.total) for name, x in means.items()}
    metrics["ratio/max"] = jnp.where(mask, ratios, 0.0).max()
    if batch.logprobs is None:
        metrics |= _old_metrics(now, reference, batch)

    losses += batch.kl_weight * kl_estimator(now, reference)
    if entropy is not None:
        losses -= entropy_coefficient * jnp.where(mask, entropy, 0.0)
    return jnp.sum(batch.weights * losses), metrics


def _old_metrics(now: Array, reference: Array, batch: MicroBatch) -> dict[str, jax.Array]:
    """Measure what inference does not where the old log-probs are those of now.

    `kl/response` is the KL of a sample to the reference by k1, and `mismatch/...` as of
    `inference.logprobs.mismatch`: both in nats.
    """
    apart = jnp.where(batch.mask, now - batch.sampled_logprobs, 0.0)
    return {
        "kl/response": jnp.sum(kl_k1(now, reference)) / batch.samples,
        "mismatch/kl": jnp.sum(jnp.expm1(bounded(apart)) - apart) / batch.total,
        "mismatch/mean": jnp.sum(jnp.abs(apart)) / batch.total,
        "mismatch/max": jnp.max(jnp.abs(apart)),
    }


def summed_value_loss(
    values: Array, batch: MicroBatch, *, clip: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the sum of weights * value_loss, and metrics as in `summed_policy_loss`.

    values [S, W] float32 are the critic's now; the loss is [] float32.
    """
    mask = batch.mask
    chex.assert_equal_shape([values, batch.weights, mask])
    old_values = batch.values
    returns = batch.returns
    assert old_values is not None and returns is not None
    losses = value_loss(values, old_values, returns, mask=mask, clip=clip)
    outside = jnp.abs(values - old_values) > clip
    metrics = {
        "loss/value": token_mean(losses, mask, batch.total),
        "critic/mean": token_mean(values, mask, batch.total),
        "critic/clipped": token_mean(outside.astype(jnp.float32), mask, batch.total),
    }
    return jnp.sum(batch.weights * losses), metrics


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """Compute 1 - var(returns - values) / var(returns) over the tokens that the mask names.

    Host arrays [B, T]. 1 is a perfect critic, 0 one that knows no more than the mean; 0 also where
    all returns are equal.
    """
    values = values[mask].astype(np.float64)
    returns = returns[mask].astype(np.float64)
    variance = returns.var() if returns.size else 0.0
    return float(1.0 - (returns - values).var() / variance) if variance else 0.0
