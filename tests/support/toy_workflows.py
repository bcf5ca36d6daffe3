"""Workflows as a user's own file outside the package would have them."""

from __future__ import annotations

import dataclasses

import rlhf_jax
from rlhf_jax.algorithms.grpo import GRPOOptions


@dataclasses.dataclass(frozen=True)
class Anchored(GRPOOptions):
    anchor: float = rlhf_jax.option(0.0, "how much a nat of its own samples weighs")


def anchored(terms):
    losses, metrics = rlhf_jax.POLICY_LOSS.function(terms)
    pulled = -terms.settings.options.anchor * terms.scores
    return losses + pulled, metrics | {"anchor/loss": terms.mean(pulled)}


ANCHORED = dataclasses.replace(
    rlhf_jax.GRPO,
    title="GRPO with an anchor",
    losses={"policy": rlhf_jax.TokenLoss(anchored, rlhf_jax.POLICY_LOSS.reads)},
    options=Anchored,
)
