"""One equation a function: PPO's clipped loss, the k3 estimate of a KL divergence, and GRPO from both."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlhf_jax.types import Array, Experience


def policy_loss(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float
) -> Array:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old, per token, 0 where masked out:
    [B, T].

    logprobs, old_logprobs and advantages [B, T] float32, mask [B, T] bool. (PPO, Schulman et al. 2017, eq. 7;
    two clip widths as in DAPO, Yu et al. 2025.)
    """
    ratios = ratio(logprobs, old_logprobs, mask)
    clipped = jnp.clip(ratios, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.where(mask, -jnp.minimum(ratios * advantages, clipped * advantages), 0.0)


def ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """p / p_old per token [B, T], 1 where masked out."""
    chex.assert_equal_shape([logprobs, old_logprobs, mask])
    return jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))


def kl_k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """p_ref / p - log(p_ref / p) - 1 per token, [B, T], in nats: never negative, and unbiased for KL(p ||
    p_ref) over tokens drawn from p (Schulman 2020, "Approximating KL divergence"; DeepSeekMath eq. 4).
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    difference = reference_logprobs - logprobs
    return jnp.expm1(difference) - difference


def token_mean(x: Array, mask: Array, total: Array) -> Array:
    """sum of x [B, T] where mask, over `total` (float32, the tokens of the whole minibatch): a scalar.

    Summed over micro-batches it is the minibatch's mean, however the minibatch is split.
    """
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0)) / total


def grpo_loss(
    logprobs: Array,
    experience: Experience,
    total: Array,
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
) -> tuple[Array, dict[str, Array]]:
    """mean over tokens of (policy_loss + kl_weight * kl_k3), and metrics (DeepSeekMath eq. 3, token mean as
    in DAPO).

    logprobs [B, T] are the policy's now; `total` is as in `token_mean`. Metrics are shares of the minibatch's
    mean, to be summed over micro-batches; those whose name ends in `/max` are maxima.
    """
    mask, old = experience.rollout.mask, experience.logprobs
    losses = policy_loss(logprobs, old, experience.advantages, mask, clip_low, clip_high)
    divergence = kl_k3(jnp.where(mask, logprobs, 0.0), jnp.where(mask, experience.reference_logprobs, 0.0))
    ratios = ratio(logprobs, old, mask)
    outside = (ratios < 1.0 - clip_low) | (ratios > 1.0 + clip_high)
    policy, kl = token_mean(losses, mask, total), token_mean(divergence, mask, total)
    metrics = {
        "loss/policy": policy,
        "kl/mean": kl,
        "ratio/mean": token_mean(ratios, mask, total),
        "ratio/clipped": token_mean(outside.astype(jnp.float32), mask, total),
        "ratio/max": ratios.max(),
        "entropy/estimate": token_mean(-logprobs, mask, total),
    }
    return policy + kl_weight * kl, metrics
