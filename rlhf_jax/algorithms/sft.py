"""Supervised fine-tuning: a policy learns to write the answers that rows give."""

from __future__ import annotations

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.training.kinds import Share, TokenLoss, TokenTerms


def negative_log_likelihood(terms: TokenTerms) -> Share:
    """Compute what each token [S, W] costs the policy, in nats, and its mean."""
    losses = -terms.scores
    return losses, {"loss/policy": terms.mean(losses)}


def rate_by_demonstrations(weights: int) -> float:
    """Return the learning rate of AdamW for any number of weights, as TRL has it."""
    del weights
    return 2e-5


SFT = Algorithm(
    title="supervised fine-tuning",
    losses={"policy": TokenLoss(negative_log_likelihood)},
    given=("completion",),
    learning_rate=rate_by_demonstrations,
)
