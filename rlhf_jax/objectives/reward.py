"""The objective 'reward': the policy learns to earn more, by the estimator of the config."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_jax import rlhf
from rlhf_jax.config.schema import Config
from rlhf_jax.monitoring.report.page import ALGORITHMS


class RewardObjective:
    """Train a policy, and a critic where the estimator has one, on rewards of its samples."""

    uses_rewards = True
    trains_policy = True
    distills = False
    may_lag = True
    may_pipeline = True

    def title(self, config: Config) -> str:
        """Name the algorithm that the advantage estimator makes it: "GRPO"."""
        name = config.advantage.estimator
        return ALGORITHMS.get(name) or name

    def validate(self, config: Config) -> None:
        """Accept what `config.validation` has accepted of rewards, advantages and KL."""

    compile_step = staticmethod(rlhf.compile_step)
    step = staticmethod(rlhf.step)

    def report_names(self) -> Mapping[str, str]:
        """Name nothing otherwise: the metrics mean what they say."""
        return {}
