"""Turn rewards of whole samples into advantages of their tokens."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.losses.advantages import ESTIMATORS, EstimatorConfig, whiten
from rlhf_jax.losses.kl import KL, kl_k1, token_rewards
from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Hold the settings of advantages; static, so a change recompiles."""

    estimator: str  # a name of `ESTIMATORS`
    estimation: EstimatorConfig
    kl_estimator: str = "k3"  # a name of `KL`
    kl_in_reward: bool = False  # The KL penalty is a part of the reward, not of the loss.
    whiten: bool = False  # Rewards are divided by their standard deviation over the batch.
    drop_overlong: bool = False  # Responses that were cut off are not trained on (DAPO, 3.4).


@functools.partial(jax.jit, static_argnames="config")
def compute_advantages(
    rewards: Array,
    finished: Array,
    mask: Array,
    logprobs: Array | None,
    reference_logprobs: Array | None,
    values: Array | None,
    kl_coefficient: Array,
    config: AdvantageConfig,
) -> tuple[Array, Array, Array | None, jax.Array | None]:
    """Return (training mask, advantages, returns or None, KL of a response or None).

    rewards [B] float32, finished [B] bool (the response has an end), mask [B, T] bool (its tokens),
    the rest [B, T] float32, kl_coefficient [] float32. The first three results are [B, T]. In
    order: whitening, the KL penalty token by token, the estimator. A sample with a NaN reward
    (scoring failed) is not trained on, nor are the samples of a group with fewer than two rewards
    to compare. The KL to the reference is [] float32, in nats: the mean over the trained samples of
    the sum over tokens of k1, which an adaptive coefficient steers; it is None without log-probs,
    which only a KL in the reward needs. Without the reference's it is 0, and NaN if no sample is
    trained on.
    """
    chex.assert_rank([rewards, finished, mask], [1, 1, 2])
    rewarded = ~jnp.isnan(rewards)
    if config.whiten:
        whitened = whiten(rewards, rewarded, shift_mean=False)
        rewards = jnp.where(rewarded, whitened, rewards)

    estimator = ESTIMATORS[config.estimator]
    learned = rewarded & finished if config.drop_overlong else rewarded
    groups = rewards.reshape(-1, config.estimation.samples_per_prompt)
    if estimator.compares_group:
        comparable = (~jnp.isnan(groups)).sum(axis=1, keepdims=True) > 1
        learned &= jnp.broadcast_to(comparable, groups.shape).reshape(-1)
    if not estimator.reads_missing:
        means = jnp.nanmean(groups, axis=1, keepdims=True)
        rewards = jnp.where(jnp.isnan(groups), means, groups).reshape(-1)
    trained = mask & learned[:, None]
    kl = jnp.zeros(mask.shape, jnp.float32)
    of_response = None
    if logprobs is not None:
        reference = logprobs if reference_logprobs is None else reference_logprobs
        kl = KL[config.kl_estimator](logprobs, reference)
        k1 = jnp.where(trained, kl_k1(logprobs, reference), 0.0)
        count = trained.any(axis=1).sum().astype(jnp.float32)
        of_response = jnp.where(count > 0, k1.sum() / jnp.maximum(count, 1.0), jnp.nan)
    coefficient = kl_coefficient if config.kl_in_reward else jnp.zeros_like(kl_coefficient)
    rewards_of_tokens = token_rewards(rewards, kl, mask, coefficient=coefficient)
    # A sample that was not drawn has no token for its reward, which would be 0 in its group's mean.
    first_of_absent = ~mask.any(axis=1, keepdims=True) & (jnp.arange(mask.shape[1]) == 0)
    rewards_of_tokens = jnp.where(first_of_absent, rewards[:, None], rewards_of_tokens)

    advantages, returns = estimator.estimate(rewards_of_tokens, values, trained, config.estimation)
    return trained, advantages, returns, of_response
