"""KL divergence to the reference: per-token estimators, KL in the reward, adaptive coefficient."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlhf_jax.types import Array

__all__ = ["KL", "adapt_kl", "bounded", "kl_k1", "kl_k2", "kl_k3", "token_rewards"]


# Nats: log-ratios are clipped to this before `exp`, which overflows beyond 88.
LARGEST_LOG_RATIO = 20.0


def bounded(log_ratio: Array) -> Array:
    """Compute clip(x, -20, 20) of log-ratios of any shape, only for use in `exp`; 0 stays exact.

    A host array gives a host array.
    """
    return log_ratio.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def kl_k1(logprobs: Array, reference_logprobs: Array) -> Array:
    """Compute log(p / p_ref) of each token: [B, T] -> [B, T] float32, in nats.

    Over tokens drawn from p its mean is KL(p || p_ref); one token's may have either sign (Schulman
    2020, "Approximating KL divergence").
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    return logprobs - reference_logprobs


def kl_k2(logprobs: Array, reference_logprobs: Array) -> Array:
    """Compute log(p / p_ref)^2 / 2 of each token: [B, T] -> [B, T] float32, in nats.

    Never negative, and biased; but over tokens drawn from p its mean gradient is that of
    KL(p || p_ref) (Schulman 2020).
    """
    return kl_k1(logprobs, reference_logprobs) ** 2 / 2


def kl_k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """Compute p_ref / p - log(p_ref / p) - 1 of each token, in nats.

    [B, T] -> [B, T] float32. Never negative, and over tokens drawn from p its mean is
    KL(p || p_ref) (Schulman 2020; DeepSeekMath, Shao et al. 2024, eq. 4).
    """
    difference = -kl_k1(logprobs, reference_logprobs)
    return jnp.expm1(bounded(difference)) - difference


# By the values of kl.estimator.
KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def token_rewards(rewards: Array, kl: Array, mask: Array, coefficient: float | Array) -> Array:
    """Compute -coefficient * kl[b, t], plus rewards[b] at the response's last token: [B, T].

    rewards [B] and kl [B, T] float32, mask [B, T] bool; 0 where masked out (Ziegler et al. 2019,
    eq. 2; InstructGPT, Ouyang et al. 2022).
    """
    chex.assert_equal_shape([kl, mask])
    chex.assert_shape(rewards, mask.shape[:1])
    tokens_from_here = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    last = mask & (tokens_from_here == 1)
    return jnp.where(last, rewards[:, None], 0.0) - jnp.where(mask, coefficient * kl, 0.0)


def adapt_kl(coefficient: float, kl: float, samples: int, target: float, horizon: float) -> float:
    """Compute coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    This is the next coefficient of the KL penalty; without a target (0) it stays. `kl` was measured
    over `samples` samples, in the unit of `target` (Ziegler et al. 2019, 2.2, with the horizon of
    its code for the constant).
    """
    if not target:
        return coefficient
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
