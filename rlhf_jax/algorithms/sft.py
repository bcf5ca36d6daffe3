"""Supervised fine-tuning: a policy learns to write the answers given in the data."""

from __future__ import annotations

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.training.kinds import Share, TokenLoss, TokenTerms


def negative_log_likelihood(terms: TokenTerms) -> Share:
    """Compute the negative log-prob of each token [S, W], in nats, and its mean."""
    losses = -terms.scores
    return losses, {"loss/policy": terms.mean(losses)}


def rate_by_demonstrations(weights: int) -> float:
    """Return the default learning rate of AdamW, as in TRL, for any model size."""
    del weights
    return 2e-5


SFT = Algorithm(
    title="supervised fine-tuning",
    losses={"policy": TokenLoss(negative_log_likelihood)},
    given=("completion",),
    learning_rate=rate_by_demonstrations,
)
