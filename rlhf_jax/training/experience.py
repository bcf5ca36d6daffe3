"""From rewards of whole samples to advantages of their tokens: penalties, shaping, and the
estimator of choice.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.training import kl as shaping
from rlhf_jax.training.advantages import ESTIMATORS, EstimatorConfig
from rlhf_jax.training.batching import overlong
from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages; static, so a change of it compiles anew."""

    estimator: str  # a name of ESTIMATORS
    estimation: EstimatorConfig
    kl: str = "k3"  # a name of shaping.KL
    kl_in_reward: bool = False
    missing_end: float = 0.0
    clip: float = 0.0
    whiten: bool = False
    drop_overlong: bool = False


@functools.partial(jax.jit, static_argnames="config")
def penalise_and_clip(rewards: Array, finished: Array, config: AdvantageConfig) -> Array:
    """Rewards [B] after the penalty for a missing end (`finished` [B] bool is false) and
    clipping.
    """
    rewards = shaping.missing_end(rewards, finished, config.missing_end)
    return shaping.clip_rewards(rewards, config.clip) if config.clip else rewards


@functools.partial(jax.jit, static_argnames="config")
def compute_advantages(
    rewards: Array,
    finished: Array,
    mask: Array,
    logprobs: Array,
    reference_logprobs: Array,
    values: Array | None,
    kl_coefficient: Array,
    config: AdvantageConfig,
) -> tuple[Array, Array, Array | None, Array]:
    """(mask of what is trained on [B, T], advantages [B, T], returns [B, T] or None, KL of a
    response).

    rewards [B] float32, finished [B] bool (the response has an end), the rest [B, T]. In order: the
    penalty for a missing end, clipping, whitening, the KL penalty token by token, the estimator.
    The KL to the reference is the mean over samples of the sum over tokens of k1, in nats: what an
    adaptive coefficient steers.
    """
    chex.assert_rank([rewards, finished, mask, logprobs], [1, 1, 2, 2])
    rewards = penalise_and_clip(rewards, finished, config)
    everyone = jnp.ones(rewards.shape, bool)
    rewards = shaping.whiten(rewards, everyone, shift_mean=False) if config.whiten else rewards
    weight = kl_coefficient if config.kl_in_reward else jnp.zeros_like(kl_coefficient)
    divergence = shaping.KL[config.kl](logprobs, reference_logprobs)
    earned = shaping.token_rewards(rewards, divergence, mask, weight)
    trained = overlong(mask, finished) if config.drop_overlong else mask
    advantages, returns = ESTIMATORS[config.estimator].estimate(
        earned, values, trained, config.estimation
    )
    kl = jnp.where(mask, shaping.kl_k1(logprobs, reference_logprobs), 0.0).sum(axis=1).mean()
    return trained, advantages, returns, kl
