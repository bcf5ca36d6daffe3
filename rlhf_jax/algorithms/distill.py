"""Distillation: a student learns to draft for the policy, which is not trained."""

from __future__ import annotations

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.config.checks import require, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.training.distill import DISTILLATION


def check(config: Config) -> None:
    """Raise ValueError if no student can be trained, or if the fixed policy would be evaluated."""
    require_positive(config, "drafter.layers", "drafter.learning_rate")
    require(
        not config.evaluation.every,
        f"evaluation.every is {config.evaluation.every}, but algorithm 'distill' leaves the policy"
        " as it is; set it to 0.",
    )


DISTILL = Algorithm(
    title="distillation of a drafter", losses={"drafter": DISTILLATION}, check=check, rewarded=False
)
