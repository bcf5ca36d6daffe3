"""Workflows as a user's own file outside the package would have them."""

from __future__ import annotations

import dataclasses

import jax

import rlhf_jax
from rlhf_jax.algorithms.grpo import GRPOOptions
from rlhf_jax.config.checks import require_positive


def likelihood(terms):
    losses = -terms.scores
    return losses, {"loss/policy": terms.mean(losses)}


SFT = rlhf_jax.Algorithm(
    "supervised fine-tuning", {"policy": rlhf_jax.TokenLoss(likelihood)}, given=("response",)
)


@dataclasses.dataclass(frozen=True)
class Preference:
    beta: float = rlhf_jax.option(0.1, "how much a nat of preference weighs", require_positive)


def dpo(terms):
    gain = terms.per_sequence(terms.scores - terms.column("reference_logprobs"))
    margin = terms.settings.options.beta * terms.per_group(gain * terms.column("preference"))
    losses = -jax.nn.log_sigmoid(margin)
    return losses, {"loss/policy": terms.mean(losses), "dpo/margin": terms.mean(margin)}


DPO = rlhf_jax.Algorithm(
    "DPO on given pairs",
    {"policy": rlhf_jax.GroupLoss(dpo, reads=("reference_logprobs", "preference"))},
    scores=("reference",),
    options=Preference,
    given=("chosen", "rejected"),
)


def bradley_terry(terms):
    margin = terms.per_group(terms.at_end(terms.scores) * terms.column("preference"))
    losses = -jax.nn.log_sigmoid(margin)
    right = (margin > 0).astype(losses.dtype)
    return losses, {"loss/reward": terms.mean(losses), "reward/accuracy": terms.mean(right)}


def whole_texts(batch, config):
    return batch.past_end(), {}


REWARD_MODEL = rlhf_jax.Algorithm(
    "a Bradley-Terry reward model",
    {"judge": rlhf_jax.GroupLoss(bradley_terry, reads=("preference",))},
    prepare=whole_texts,
    given=("chosen", "rejected"),
)


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
