"""Advantages: how much better than expected each token was, by an estimator of `ESTIMATORS`.

An estimator is one function and one `register` line, here or in a file of a user's own
(docs/examples/new_estimator.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.losses import own
from rlhf_jax.runtime.extensions import Registry
from rlhf_jax.types import Array

__all__ = [
    "ESTIMATORS",
    "Estimate",
    "Estimator",
    "EstimatorConfig",
    "dr_grpo",
    "gae",
    "groups_with_signal",
    "grpo",
    "of_samples",
    "register",
    "rloo",
    "whiten",
]

FLAT = 1e-6  # A standard deviation up to this is rounding; such rewards are not divided by it.
SAME = 1e-6  # Rewards that differ by no more than this are equal.


def groups_with_signal(rewards: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Return which prompts have different rewards: [B] -> [B / samples_per_prompt] bool.

    Samples of a prompt are in neighbouring rows; a NaN reward (scoring failed) is ignored. Equal
    rewards give no gradient, so dynamic sampling replaces such prompts (DAPO, Yu et al. 2025, 3.2).
    """
    groups = rewards.reshape(-1, samples_per_prompt)
    unknown = np.isnan(groups)
    highest = np.where(unknown, -np.inf, groups).max(axis=1)
    lowest = np.where(unknown, np.inf, groups).min(axis=1)
    return highest - lowest > SAME


@dataclasses.dataclass(frozen=True)
class EstimatorConfig:
    """Hold the settings that an estimator may depend on; static, so a change recompiles."""

    samples_per_prompt: int = 1  # in neighbouring rows
    deviation: str = "sample"  # of a group: over n - 1 rewards; or "population", over n
    discount: float = 1.0
    gae_lambda: float = 0.95


class Estimate(Protocol):
    """Declare the function of an estimator; it is traced within `compute_advantages`."""

    def __call__(
        self, token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig, /
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return advantages [B, T] float32, and the returns [B, T] as targets of a critic.

        token_rewards and values (None without a critic) [B, T] float32; mask [B, T] bool marks the
        tokens that are trained on. Both results are 0 where masked out; returns are None without a
        critic. Samples that are not trained on have an empty mask, but their rewards still count in
        the mean of their group. If scoring failed, the reward of the last token is the mean of the
        group's other rewards, or NaN for an estimator with `reads_missing`. So is that of a sample
        that was not drawn, which has no token: it is at place 0.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Describe an estimator: its name in a config, its function, and its requirements."""

    name: str
    estimate: Estimate
    title: str = ""  # of a run that uses it; default: its name
    needs_critic: bool = False  # Reads values, so a critic is trained along with the policy.
    compares_group: bool = False  # Needs two or more samples of each prompt.
    reads_missing: bool = False  # Accepts NaN as the reward of a sample whose scoring failed.
    # How a minibatch's losses are summed if neither config nor loss defines it: a name of
    # `training.aggregate`; default: token_mean.
    aggregate: str = ""


def _no_estimator(candidate: object) -> str:
    """Return why an object is not an estimator, or ''."""
    if not isinstance(candidate, Estimator):
        return "is no rlhf_jax.Estimator"

    def advantages(rewards: Array, values: Array, mask: Array):
        known = values if candidate.needs_critic else None
        return candidate.estimate(rewards, known, mask, EstimatorConfig(samples_per_prompt=2))

    return own.refusal(advantages, jnp.float32, jnp.float32, jnp.bool_)


ESTIMATORS: Registry[Estimator] = Registry("algorithm.estimator", _no_estimator)  # by name


def register(estimator: Estimator) -> None:
    """Add an estimator to `ESTIMATORS`; ValueError if its name is taken."""
    if estimator.name in ESTIMATORS:
        raise ValueError(f"There is an estimator {estimator.name!r} already; choose another name.")
    ESTIMATORS[estimator.name] = estimator


def whiten(x: Array, mask: Array, shift_mean: bool = True) -> jax.Array:
    """Compute (x - mean) / std over the entries of the mask, and 0 elsewhere.

    x float32 and mask bool, of one shape. The deviation is the population's. Without `shift_mean`
    it is x / std. If all entries are equal, nothing is divided: they become 0, or stay unchanged
    without `shift_mean`.
    """
    chex.assert_equal_shape([x, mask])
    x = jnp.where(mask, x, 0.0)
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    centred = jnp.where(mask, x - x.sum() / count, 0.0)
    std = jnp.sqrt((centred**2).sum() / count)
    return (centred if shift_mean else x) / jnp.where(std > FLAT, std, 1.0)


def gae(
    rewards: Array, values: Array, mask: Array, discount: float, gae_lambda: float
) -> tuple[jax.Array, jax.Array]:
    """Compute A_t = d_t + discount * gae_lambda * A_{t+1}, and the returns A_t + V_t.

    There d_t = r_t + discount * V_{t+1} - V_t, where V_t is the value before the token at t, and
    t + 1 the next token under the mask; after the last one both V and A are 0. rewards and values
    [B, T] float32, mask [B, T] bool -> two of [B, T] float32, 0 where masked out (Schulman et al.
    2016, eq. 16).
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])

    def step_back(later: tuple[Array, Array], token: tuple[Array, Array, Array]):
        later_advantage, later_value = later
        reward, value, real = token
        advantage = (
            reward + discount * later_value - value + discount * gae_lambda * later_advantage
        )
        here = jnp.where(real, advantage, later_advantage), jnp.where(real, value, later_value)
        return here, jnp.where(real, advantage, 0.0)

    zeros = jnp.zeros(rewards.shape[:1], jnp.float32)
    _, advantages = jax.lax.scan(
        step_back, (zeros, zeros), (rewards.T, values.T, mask.T), reverse=True
    )
    return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def grpo(rewards: Array, samples_per_prompt: int, deviation: str = "sample") -> jax.Array:
    """Compute A_i = (r_i - mean(r)) / std(r) within each group of one prompt's samples.

    rewards [B] float32, NaN where scoring failed -> [B] float32, NaN there, too; groups are
    neighbouring rows. The variance is the sum of squares over n - 1, as in TRL and verl, or over n
    for the deviation "population", where n counts the rewards of the group. A group whose deviation
    is at most `FLAT` gets 0 (DeepSeekMath, Shao et al. 2024, 4.1.2). ValueError if the rows do not
    fall into whole groups.
    """
    centred = dr_grpo(rewards, samples_per_prompt).reshape(-1, samples_per_prompt)
    count = (~jnp.isnan(centred)).sum(axis=1, keepdims=True).astype(jnp.float32)
    divisor = jnp.maximum(count - float(deviation == "sample"), 1.0)
    std = jnp.sqrt(jnp.nansum(centred**2, axis=1, keepdims=True) / divisor)
    return jnp.where(std > FLAT, centred / jnp.maximum(std, FLAT), 0.0).reshape(-1)


def dr_grpo(rewards: Array, samples_per_prompt: int) -> Array:
    """Compute A_i = r_i - mean(r) within each group of one prompt's samples.

    rewards [B] float32, NaN where scoring failed -> [B] float32, NaN there, too; groups are
    neighbouring rows (Dr. GRPO, Liu et al. 2025, 3.2). ValueError if the rows do not fall into
    whole groups.
    """
    chex.assert_rank(rewards, 1)
    if len(rewards) % samples_per_prompt:
        raise ValueError(f"{len(rewards)} rewards do not fall into groups of {samples_per_prompt}.")
    groups = rewards.reshape(-1, samples_per_prompt)
    return (groups - jnp.nanmean(groups, axis=1, keepdims=True)).reshape(-1)


def rloo(rewards: Array, samples_per_prompt: int) -> Array:
    """Compute A_i = r_i - the mean of the other rewards of its group: [B] -> [B] float32.

    With k rewards that is k / (k - 1) * (r_i - mean(r)) (Kool et al. 2019; Ahmadian et al. 2024,
    eq. 8); NaN where scoring failed. ValueError for groups of one sample.
    """
    if samples_per_prompt < 2:
        raise ValueError(
            f"Leave-one-out needs groups of two samples or more, not {samples_per_prompt}."
        )
    centred = dr_grpo(rewards, samples_per_prompt).reshape(-1, samples_per_prompt)
    count = (~jnp.isnan(centred)).sum(axis=1, keepdims=True).astype(jnp.float32)
    return (centred * (count / jnp.maximum(count - 1.0, 1.0))).reshape(-1)


def of_samples(function: Callable[[Array, int], Array]) -> Estimate:
    """Turn an estimator of samples, [B] -> [B], into one that gives each token its sample's value.

    function: takes the rewards of samples [B] float32 and the number of samples per prompt.
    """

    def estimate(token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig):
        del values
        advantages = function(token_rewards.sum(axis=1), config.samples_per_prompt)
        return jnp.where(mask, advantages[:, None], 0.0), None

    return estimate


def _grpo(token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig):
    """Compute GRPO's advantages with the configured deviation."""
    function = functools.partial(grpo, deviation=config.deviation)
    return of_samples(function)(token_rewards, values, mask, config)


def _whitened_gae(token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig):
    """Compute GAE with advantages whitened over the batch, as is usual for language models."""
    assert values is not None, "GAE needs the values of a critic."
    advantages, returns = gae(
        token_rewards, values, mask, discount=config.discount, gae_lambda=config.gae_lambda
    )
    return whiten(advantages, mask), returns


def _reinforce_plus_plus(
    token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig
):
    """Compute A_t = sum over s >= t of discount^(s - t) * r_s, whitened over all tokens.

    (REINFORCE++, Hu et al. 2025.)
    """
    del values
    zeros = jnp.zeros_like(token_rewards)
    sums, _ = gae(token_rewards, zeros, mask, discount=config.discount, gae_lambda=1.0)
    return whiten(sums, mask), None


def _reinforce_plus_plus_baseline(
    token_rewards: Array, values: Array | None, mask: Array, config: EstimatorConfig
):
    """Compute A_t = r_i - mean(r) of the sample's group, whitened over all tokens.

    (REINFORCE++ with baseline, Hu et al. 2025.)
    """
    advantages, _ = of_samples(dr_grpo)(token_rewards, values, mask, config)
    return whiten(advantages, mask), None


register(Estimator("gae", _whitened_gae, "PPO", needs_critic=True))
_comparing = functools.partial(Estimator, compares_group=True, reads_missing=True)
register(_comparing("grpo", _grpo, "GRPO"))
register(_comparing("dr_grpo", of_samples(dr_grpo), "Dr. GRPO", aggregate="constant"))
register(_comparing("rloo", of_samples(rloo), "RLOO"))
register(Estimator("reinforce++", _reinforce_plus_plus, "REINFORCE++"))
_baseline = "REINFORCE++ with baseline"
register(_comparing("reinforce++-baseline", _reinforce_plus_plus_baseline, _baseline))
