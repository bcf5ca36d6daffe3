"""Train language models by reinforcement learning in JAX, with speculative decoding.

These are the public names. Each is imported from its module on first use, so that `import rlhf_jax`
is light and the processes that compute rewards never import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_jax.algorithms.grpo import GRPO, POLICY_LOSS
    from rlhf_jax.algorithms.ppo import PPO
    from rlhf_jax.cache.state import DecodeState
    from rlhf_jax.config import default as default_config
    from rlhf_jax.config.algorithms import Algorithm, option
    from rlhf_jax.config.algorithms import register as register_algorithm
    from rlhf_jax.generation.decoding import decoding_weights
    from rlhf_jax.generation.engine import generate
    from rlhf_jax.generation.requests import GenerationConfig, Request, Sample, as_sequences
    from rlhf_jax.generation.speculative.protocol import Drafter
    from rlhf_jax.generation.speculative.protocol import register as register_drafter
    from rlhf_jax.generation.speculative.sampling import Sampling
    from rlhf_jax.generation.speculative.tree import parse as parse_strategy
    from rlhf_jax.inference.scoring import score_sequences
    from rlhf_jax.iteration import step
    from rlhf_jax.losses.advantages import (
        ESTIMATORS,
        Estimator,
        EstimatorConfig,
        dr_grpo,
        gae,
        grpo,
        of_samples,
        rloo,
    )
    from rlhf_jax.losses.advantages import register as register_estimator
    from rlhf_jax.losses.policy import LossTerms, aggregated_by
    from rlhf_jax.mesh import Layout, make_mesh
    from rlhf_jax.models.families import Family
    from rlhf_jax.models.families import register as register_family
    from rlhf_jax.models.files.source import open_source
    from rlhf_jax.models.transformer import unstack
    from rlhf_jax.monitoring.callbacks import Callback
    from rlhf_jax.rewards.sources import RewardSource
    from rlhf_jax.rewards.sources import register as register_reward_source
    from rlhf_jax.run import Run, StepReport
    from rlhf_jax.sequences.batch import Sequences
    from rlhf_jax.state import RunState
    from rlhf_jax.trainer import Result, train
    from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
    from rlhf_jax.training.gradients import Learner
    from rlhf_jax.training.kinds import GroupLoss, TokenLoss, ValueLoss
    from rlhf_jax.training.learn import learn, trained
    from rlhf_jax.training.optimizer import make_optimizer
    from rlhf_jax.training.settings import TrainingSettings
    from rlhf_jax.types import Model, ModelConfig, Strategy, Trained

__all__ = [
    "ESTIMATORS",
    "GRPO",
    "POLICY_LOSS",
    "PPO",
    "AdvantageConfig",
    "Algorithm",
    "Callback",
    "DecodeState",
    "Drafter",
    "Estimator",
    "EstimatorConfig",
    "Family",
    "GenerationConfig",
    "GroupLoss",
    "Layout",
    "Learner",
    "LossTerms",
    "Model",
    "ModelConfig",
    "Request",
    "Result",
    "RewardSource",
    "Run",
    "RunState",
    "Sample",
    "Sampling",
    "Sequences",
    "StepReport",
    "Strategy",
    "TokenLoss",
    "Trained",
    "TrainingSettings",
    "ValueLoss",
    "aggregated_by",
    "as_sequences",
    "compute_advantages",
    "decoding_weights",
    "default_config",
    "dr_grpo",
    "gae",
    "generate",
    "grpo",
    "learn",
    "make_mesh",
    "make_optimizer",
    "of_samples",
    "open_source",
    "option",
    "parse_strategy",
    "register_algorithm",
    "register_drafter",
    "register_estimator",
    "register_family",
    "register_reward_source",
    "rloo",
    "score_sequences",
    "step",
    "train",
    "trained",
    "unstack",
]

# The module of each public name: `module`, or `module:name` where the name differs there.
_PLACES = {
    # Types that cross stage boundaries.
    "DecodeState": "cache.state",
    "Model": "types",
    "ModelConfig": "types",
    "Sequences": "sequences.batch",
    "Strategy": "types",
    "Trained": "types",
    # Where and how a call runs.
    "Layout": "mesh",
    "make_mesh": "mesh",
    # Weights.
    "decoding_weights": "generation.decoding",
    "open_source": "models.files.source",
    "unstack": "models.transformer",
    # Generation.
    "GenerationConfig": "generation.requests",
    "Request": "generation.requests",
    "Sample": "generation.requests",
    "Sampling": "generation.speculative.sampling",
    "as_sequences": "generation.requests",
    "generate": "generation.engine",
    "parse_strategy": "generation.speculative.tree:parse",
    # Inference.
    "score_sequences": "inference.scoring",
    # Advantages.
    "AdvantageConfig": "training.experience",
    "ESTIMATORS": "losses.advantages",
    "EstimatorConfig": "losses.advantages",
    "compute_advantages": "training.experience",
    "dr_grpo": "losses.advantages",
    "gae": "losses.advantages",
    "grpo": "losses.advantages",
    "rloo": "losses.advantages",
    # Training.
    "Learner": "training.gradients",
    "GroupLoss": "training.kinds",
    "TokenLoss": "training.kinds",
    "ValueLoss": "training.kinds",
    "POLICY_LOSS": "algorithms.grpo",
    "TrainingSettings": "training.settings",
    "make_optimizer": "training.optimizer",
    "learn": "training.learn",
    "trained": "training.learn",
    # Whole runs.
    "Callback": "monitoring.callbacks",
    "Result": "trainer",
    "Run": "run",
    "RunState": "state",
    "StepReport": "run",
    "default_config": "config:default",
    "step": "iteration",
    "train": "trainer",
    # Extension points.
    "Algorithm": "config.algorithms",
    "GRPO": "algorithms.grpo",
    "PPO": "algorithms.ppo",
    "option": "config.algorithms",
    "Drafter": "generation.speculative.protocol",
    "Estimator": "losses.advantages",
    "Family": "models.families",
    "LossTerms": "losses.policy",
    "RewardSource": "rewards.sources",
    "aggregated_by": "losses.policy",
    "of_samples": "losses.advantages",
    "register_drafter": "generation.speculative.protocol:register",
    "register_estimator": "losses.advantages:register",
    "register_family": "models.families:register",
    "register_algorithm": "config.algorithms:register",
    "register_reward_source": "rewards.sources:register",
}


# Type checkers read the imports above instead, so that they report missing names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name from its module (PEP 562)."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, own_name = _PLACES[name].partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), own_name or name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
