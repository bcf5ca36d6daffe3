"""How much better than expected each token was: one estimator a function, and the table a config
chooses from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.training.kl import whiten
from rlhf_jax.types import Array


def gae(
    rewards: Array, values: Array, mask: Array, discount: float, gae_lambda: float
) -> tuple[Array, Array]:
    """A_t = d_t + discount * gae_lambda * A_{t+1} with d_t = r_t + discount * V_{t+1} - V_t, and
    returns A_t + V_t.

    rewards and values [B, T] float32, mask [B, T] bool -> two of [B, T], 0 where masked out. V_t is
    the value before the token at t, t + 1 the next token under the mask; after the last one both V
    and A are 0 (Schulman et al. 2016, eq. 16).
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])

    def back(later, token):
        later_advantage, later_value = later
        reward, value, real = token
        advantage = (
            reward + discount * later_value - value + discount * gae_lambda * later_advantage
        )
        here = jnp.where(real, advantage, later_advantage), jnp.where(real, value, later_value)
        return here, jnp.where(real, advantage, 0.0)

    nothing = jnp.zeros(rewards.shape[:1], jnp.float32)
    _, advantages = jax.lax.scan(
        back, (nothing, nothing), (rewards.T, values.T, mask.T), reverse=True
    )
    return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def grpo(rewards: Array, group: int, eps: float = 1e-6) -> Array:
    """A_i = (r_i - mean(r)) / std(r) within each group of one prompt's samples.

    rewards [B] float32, groups contiguous, B a multiple of `group` -> [B]. The standard deviation
    is the population's; a group whose deviation is at most `eps` teaches nothing and gets 0
    (DeepSeekMath, Shao et al. 2024, 4.1.2).
    """
    centred = dr_grpo(rewards, group).reshape(-1, group)
    std = jnp.sqrt((centred**2).mean(axis=1, keepdims=True))
    return jnp.where(std > eps, centred / jnp.maximum(std, eps), 0.0).reshape(-1)


def dr_grpo(rewards: Array, group: int) -> Array:
    """A_i = r_i - mean(r) within each group: [B] -> [B] float32 (Dr. GRPO, Liu et al. 2025,
    3.2).
    """
    chex.assert_rank(rewards, 1)
    if rewards.shape[0] % group:
        raise ValueError(f"{rewards.shape[0]} rewards do not fall into groups of {group}.")
    groups = rewards.reshape(-1, group)
    return (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)


def rloo(rewards: Array, group: int) -> Array:
    """A_i = r_i - the mean of the group's other rewards: [B] -> [B] float32 (Kool et al. 2019;
    Ahmadian et al. 2024, eq. 8). With k samples that is k / (k - 1) * (r_i - mean(r)).
    """
    if group < 2:
        raise ValueError(f"Leave-one-out needs groups of two samples or more, not {group}.")
    return dr_grpo(rewards, group) * (group / (group - 1))


def reinforce_plus_plus(rewards: Array, mask: Array, discount: float) -> Array:
    """A_t = sum over s >= t of discount^(s - t) * r_s, whitened over all the batch's tokens.

    Rewards of tokens [B, T] float32, mask [B, T] bool -> [B, T] (REINFORCE++, Hu et al. 2025).
    """
    sums, _ = gae(rewards, jnp.zeros_like(rewards), mask, discount, 1.0)
    return whiten(sums, mask)


def reinforce_plus_plus_baseline(rewards: Array, mask: Array, group: int) -> Array:
    """A_t = r_i - mean(r) of the sample's group, whitened over all the batch's tokens.

    Rewards of samples [B] float32, mask [B, T] bool -> [B, T] (REINFORCE++ with baseline, Hu et al.
    2025).
    """
    return whiten(_spread(dr_grpo(rewards, group), mask), mask)


@dataclasses.dataclass(frozen=True)
class EstimatorConfig:
    """What an estimator may depend on; static."""

    group: int = 1  # samples of a prompt, in neighbouring rows
    discount: float = 1.0
    gae_lambda: float = 0.95


@dataclasses.dataclass(frozen=True)
class Estimator:
    """`estimate(token_rewards, values, mask, settings)` gives advantages [B, T] float32 and what
    the critic is to predict: returns [B, T], None without a critic. Both are 0 where masked out.

    token_rewards and values (None without a critic) [B, T] float32; mask [B, T] bool has the tokens
    that are trained on. Rewards of samples that are not, 0 outside their responses, still count in
    their group's mean.
    """

    estimate: Callable[[Array, Array | None, Array, EstimatorConfig], tuple[Array, Array | None]]
    groups: bool = False  # compares two or more samples of a prompt
    critic: bool = False  # needs values


def _gae(token_rewards, values, mask, settings: EstimatorConfig):
    """GAE, its advantages whitened over the batch as is usual for language models."""
    advantages, returns = gae(token_rewards, values, mask, settings.discount, settings.gae_lambda)
    return whiten(advantages, mask), returns


def _reinforce_plus_plus(token_rewards, values, mask, settings: EstimatorConfig):
    return reinforce_plus_plus(token_rewards, mask, settings.discount), None


def _reinforce_plus_plus_baseline(token_rewards, values, mask, settings: EstimatorConfig):
    return reinforce_plus_plus_baseline(token_rewards.sum(axis=1), mask, settings.group), None


def _same_for_all_tokens(function: Callable[[Array, int], Array]):
    """The table's form of an estimator of samples."""

    def estimator(token_rewards, values, mask, settings: EstimatorConfig):
        return _spread(function(token_rewards.sum(axis=1), settings.group), mask), None

    return estimator


def _spread(advantages: Array, mask: Array) -> Array:
    """[B] -> [B, T], the sample's at each of its tokens."""
    return jnp.where(mask, advantages[:, None], 0.0)


ESTIMATORS = {
    "gae": Estimator(_gae, critic=True),
    "grpo": Estimator(_same_for_all_tokens(grpo), groups=True),
    "dr_grpo": Estimator(_same_for_all_tokens(dr_grpo), groups=True),
    "rloo": Estimator(_same_for_all_tokens(rloo), groups=True),
    "reinforce++": Estimator(_reinforce_plus_plus),
    "reinforce++-baseline": Estimator(_reinforce_plus_plus_baseline, groups=True),
}
