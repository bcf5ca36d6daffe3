"""One equation a function: PPO's clipped losses of policy and critic, how tokens are weighed, and
what is summed.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax.numpy as jnp
import numpy as np

from rlhf_jax.training.batching import MicroBatch
from rlhf_jax.training.kl import kl_k3
from rlhf_jax.types import Array


def policy_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
) -> Array:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old, per token, 0 where
    masked out: [B, T].

    logprobs, old_logprobs and advantages [B, T] float32, mask [B, T] bool. (PPO, Schulman et al.
    2017, eq. 7; two clip widths as in DAPO, Yu et al. 2025.)
    """
    ratios = ratio(logprobs, old_logprobs, mask)
    clipped = jnp.clip(ratios, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.where(mask, -jnp.minimum(ratios * advantages, clipped * advantages), 0.0)


def ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """p / p_old per token [B, T], 1 where masked out."""
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    return jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))


def value_loss(values: Array, old_values: Array, returns: Array, mask: Array, clip: float) -> Array:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 per token, 0 where masked
    out: [B, T].

    values, old_values and returns [B, T] float32, mask [B, T] bool. (PPO's code, Dhariwal et al.
    2017; Engstrom et al. 2020, 3.)
    """
    chex.assert_equal_shape([values, old_values, returns, mask])
    near = jnp.clip(values, old_values - clip, old_values + clip)
    return jnp.where(mask, 0.5 * jnp.maximum((values - returns) ** 2, (near - returns) ** 2), 0.0)


def token_mean_weights(mask: np.ndarray, response_slots: int) -> np.ndarray:
    """Every token of a minibatch the same: mask [n, T] -> mask / tokens, [n, T] float32 (DAPO, eq.
    8).
    """
    del response_slots
    return (mask / max(1, mask.sum())).astype(np.float32)


def sequence_mean_weights(mask: np.ndarray, response_slots: int) -> np.ndarray:
    """Every response the same, and the tokens within: mask [n, T] -> [n, T] float32 (DeepSeekMath,
    eq. 3).

    Rows without a token are not counted.
    """
    del response_slots
    tokens = mask.sum(axis=1, keepdims=True)
    return (mask / np.maximum(1, tokens) / max(1, (tokens > 0).sum())).astype(np.float32)


def constant_weights(mask: np.ndarray, response_slots: int) -> np.ndarray:
    """Every token the same whatever the lengths: mask [n, T] -> mask / (rows with tokens *
    `response_slots`, the tokens a response may have), [n, T] float32 (Dr. GRPO, Liu et al. 2025,
    3.2).
    """
    return (mask / (max(1, mask.any(axis=1).sum()) * response_slots)).astype(np.float32)


AGGREGATES = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
    "constant": constant_weights,
}


def token_mean(x: Array, mask: Array, total: Array) -> Array:
    """sum of x [B, T] where mask, over `total` (float32, the tokens of the whole minibatch): a
    scalar.

    Summed over micro-batches it is the minibatch's mean, however the minibatch is split.
    """
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0)) / total


def summed_policy_loss(
    logprobs: Array,
    entropy: Array | None,
    batch: MicroBatch,
    *,
    clip_low: float,
    clip_high: float,
    kl: Callable[[Array, Array], Array],
    entropy_weight: float,
) -> tuple[Array, dict[str, Array]]:
    """sum of weights * (policy_loss + kl_weight * kl to the reference - entropy_weight * entropy),
    and metrics.

    logprobs and entropy [R, T] are the policy's now. Metrics are shares of the minibatch's token
    means, to be summed over micro-batches; those whose name ends in `/max` are maxima. `kl/mean` is
    to the reference and `kl/old` KL(old || now), both by k3.
    """
    experience = batch.experience
    mask = batch.experience.mask
    old = experience.logprobs
    reference = jnp.where(mask, experience.reference_logprobs, 0.0)
    losses = policy_loss(logprobs, old, experience.advantages, mask, clip_low, clip_high)
    now = jnp.where(mask, logprobs, 0.0)
    before = jnp.where(mask, old, 0.0)
    ratios = ratio(logprobs, old, mask)
    outside = (ratios < 1.0 - clip_low) | (ratios > 1.0 + clip_high)
    means = {
        "loss/policy": losses,
        "kl/mean": kl_k3(now, reference),
        "kl/old": kl_k3(before, now),
        "ratio/mean": ratios,
        "ratio/clipped": outside.astype(jnp.float32),
        "entropy/estimate": -logprobs,
    } | ({} if entropy is None else {"entropy/mean": entropy})
    metrics = {name: token_mean(x, mask, batch.total) for name, x in means.items()} | {
        "ratio/max": ratios.max()
    }
    losses += batch.kl_weight * kl(now, reference)
    if entropy is not None:
        losses -= entropy_weight * jnp.where(mask, entropy, 0.0)
    return jnp.sum(batch.weights * losses), metrics


def summed_value_loss(
    values: Array, batch: MicroBatch, *, clip: float
) -> tuple[Array, dict[str, Array]]:
    """sum of weights * value_loss, and metrics as in `summed_policy_loss`; values [R, T] are the
    critic's now.
    """
    experience = batch.experience
    mask = batch.experience.mask
    losses = value_loss(values, experience.values, experience.returns, mask, clip)
    outside = jnp.abs(values - experience.values) > clip
    metrics = {
        "loss/value": token_mean(losses, mask, batch.total),
        "critic/mean": token_mean(values, mask, batch.total),
        "critic/clipped": token_mean(outside.astype(jnp.float32), mask, batch.total),
    }
    return jnp.sum(batch.weights * losses), metrics


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 - var(returns - values) / var(returns) over the tokens that the mask names, of host arrays
    [B, T].

    1 is a perfect critic, 0 one that knows no more than the mean; 0 also where all returns are
    equal.
    """
    values = values[mask].astype(np.float64)
    returns = returns[mask].astype(np.float64)
    spread = returns.var() if returns.size else 0.0
    return float(1.0 - (returns - values).var() / spread) if spread else 0.0
