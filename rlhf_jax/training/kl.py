"""From the rewards of samples to the rewards of tokens: estimates of the KL divergence, penalties,
scales.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlhf_jax.types import Array

FLAT = 1e-6  # a standard deviation up to this is rounding: such numbers are not blown up


def kl_k1(logprobs: Array, reference_logprobs: Array) -> Array:
    """log(p / p_ref) per token, [B, T], in nats: unbiased for KL(p || p_ref) over tokens drawn from
    p, of either sign (Schulman 2020, "Approximating KL divergence").
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    return logprobs - reference_logprobs


def kl_k2(logprobs: Array, reference_logprobs: Array) -> Array:
    """log(p / p_ref)^2 / 2 per token, [B, T], in nats: never negative, biased, and its mean
    gradient over tokens drawn from p is that of KL(p || p_ref) (Schulman 2020).
    """
    return kl_k1(logprobs, reference_logprobs) ** 2 / 2


def kl_k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """p_ref / p - log(p_ref / p) - 1 per token, [B, T], in nats: never negative, and unbiased for
    KL(p || p_ref) over tokens drawn from p (Schulman 2020; DeepSeekMath, Shao et al. 2024, eq. 4).
    """
    difference = -kl_k1(logprobs, reference_logprobs)
    return jnp.expm1(difference) - difference


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def token_rewards(rewards: Array, kl: Array, mask: Array, coefficient: float | Array) -> Array:
    """-coefficient * kl[b, t], plus rewards[b] at the last token of the response: [B, T], 0 where
    masked out.

    rewards [B] and kl [B, T] float32, mask [B, T] bool (Ziegler et al. 2019, eq. 2; InstructGPT,
    Ouyang et al. 2022).
    """
    chex.assert_equal_shape([kl, mask])
    chex.assert_shape(rewards, mask.shape[:1])
    later = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # response tokens from here on
    last = mask & (later == 1)
    return jnp.where(last, rewards[:, None], 0.0) - jnp.where(mask, coefficient * kl, 0.0)


def whiten(x: Array, mask: Array, shift_mean: bool = True) -> Array:
    """(x - mean) / std over what the mask names, 0 elsewhere; x / std without `shift_mean`.

    x float32 and mask bool, of one shape; the deviation is the population's. Numbers that are all
    equal are not divided: they become 0, or stay what they are without `shift_mean`.
    """
    chex.assert_equal_shape([x, mask])
    x = jnp.where(mask, x, 0.0)
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    centred = jnp.where(mask, x - x.sum() / count, 0.0)
    std = jnp.sqrt((centred**2).sum() / count)
    return (centred if shift_mean else x) / jnp.where(std > FLAT, std, 1.0)


def clip_rewards(rewards: Array, limit: float) -> Array:
    """Rewards [B], no further than `limit` from 0."""
    return jnp.clip(rewards, -limit, limit)


def missing_end(rewards: Array, finished: Array, penalty: float) -> Array:
    """Rewards [B], less `penalty` where the response was cut off: `finished` [B] bool is false."""
    chex.assert_equal_shape([rewards, finished])
    return jnp.where(finished, rewards, rewards - penalty)


def adapt_kl(coefficient: float, kl: float, target: float, samples: int, horizon: float) -> float:
    """The next KL coefficient: coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * samples /
    horizon).

    `kl` is what was measured over `samples` samples, in the unit of `target`, which is above 0
    (Ziegler et al. 2019, 2.2, with the horizon of its code for the constant).
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
