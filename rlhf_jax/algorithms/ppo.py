"""PPO: GRPO's policy and a critic, whose values the advantages read."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from rlhf_jax.algorithms import grpo
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.value import explained_variance, value_loss
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import Share, TokenTerms, ValueLoss


def clipped_values(terms: TokenTerms) -> Share:
    """Compute the critic's `value_loss` of each token [S, W], and metrics."""
    columns = terms.batch.columns
    mask = terms.batch.mask
    clip = terms.settings.critic_clip
    losses = value_loss(terms.scores, columns["values"], columns["returns"], mask=mask, clip=clip)
    outside = jnp.abs(terms.scores - columns["values"]) > clip
    return losses, {
        "loss/value": terms.mean(losses),
        "critic/mean": terms.mean(terms.scores),
        "critic/clipped": terms.mean(outside.astype(jnp.float32)),
    }


def advantages(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return `grpo.advantages`, with the explained variance of the critic as a metric."""
    prepared, metrics = grpo.advantages(batch, config)
    columns = prepared.columns
    explained = explained_variance(columns["values"], columns["returns"], prepared.mask)
    return prepared, metrics | {"critic/explained_variance": explained}


CRITIC_LOSS = ValueLoss(clipped_values, reads=("values", "returns"))
PPO = dataclasses.replace(
    grpo.GRPO,
    losses={**grpo.GRPO.losses, "critic": CRITIC_LOSS},
    scores=lambda config: (*grpo.scores(config), "critic"),
    prepare=advantages,
)
