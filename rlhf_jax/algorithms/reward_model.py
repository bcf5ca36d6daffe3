"""A reward model: a scalar head learns which of two answers people prefer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from rlhf_jax.config.algorithms import Algorithm, option
from rlhf_jax.config.checks import require_not_negative
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.preference import bradley_terry, comparison_metrics
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import GroupLoss, GroupTerms, Share


@dataclasses.dataclass(frozen=True)
class RewardModelOptions:
    """Hold the options of the pair loss."""

    margin: float = option(
        0.0,
        "by which the chosen answer's reward is to be higher, beside a row's own `margin`",
        require_not_negative,
    )
    centering: float = option(
        0.0, "weight of the squared sum of a pair's rewards, as 0.01", require_not_negative
    )


def preferred_reward(terms: GroupTerms) -> Share:
    """Compute the loss of each pair [S, R] from the rewards at the ends of its texts, and metrics.

    Centring is as in Eisenstein et al. 2023.
    """
    options = terms.settings.options
    signs = terms.column("preference")
    assert signs is not None, "Pairs have the column `preference`."
    rewards = terms.at_end(terms.scores)
    chosen, rejected = (
        terms.per_group(jnp.where(side, rewards, 0.0)) for side in (signs > 0, signs < 0)
    )
    own = terms.column("margin")
    margins = options.margin
    if own is not None:
        margins += terms.per_group(jnp.where(signs > 0, own, 0.0))
    losses = bradley_terry(chosen, rejected, margins)
    losses += options.centering * (chosen + rejected) ** 2
    means = {
        "loss/reward": losses,
        **comparison_metrics(chosen - rejected),
        "reward/chosen": chosen,
        "reward/rejected": rejected,
    }
    return losses, {name: terms.mean(x) for name, x in means.items()}


def whole_texts(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return texts with one place after their end, where a model has read the whole text."""
    del config
    return batch.past_end(), {}


def rate_by_pairs(weights: int) -> float:
    """Return the default learning rate of AdamW by model size: 2e-6 at 8 billion weights.

    (Dong et al. 2024, RLHF Workflow.) It is larger for smaller models, up to TRL's 1e-4.
    """
    return float(f"{min(1e-4, 2e-6 * (8e9 / weights) ** 0.75):.1e}")


REWARD_MODEL = Algorithm(
    title="a reward model",
    losses={"reward_model": GroupLoss(preferred_reward, reads=("preference", "margin"))},
    prepare=whole_texts,
    options=RewardModelOptions,
    given=("chosen", "rejected"),
    learning_rate=rate_by_pairs,
)
