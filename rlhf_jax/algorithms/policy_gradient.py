"""The losses of policy and critic in reinforcement learning, and what is measured of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.losses.kl import bounded, kl_k1, kl_k3
from rlhf_jax.losses.policy import LossTerms
from rlhf_jax.losses.value import value_loss
from rlhf_jax.training.kinds import Metrics, Share, TokenLoss, TokenTerms, ValueLoss
from rlhf_jax.types import Array


def policy_gradient(terms: TokenTerms) -> Share:
    """Compute the policy's loss + KL penalty - entropy bonus of each token [S, W], and metrics.

    The settings' loss gives the policy's. The penalty is kl_weight * kl_estimator(policy,
    reference), the bonus entropy_coefficient * entropy. The policy's log-probs now are the old
    ones, too, where the batch has none. `kl/mean` is to the reference, `kl/old` is KL(old || now),
    both in nats by k3.
    """
    batch = terms.batch
    settings = terms.settings
    mask = batch.mask
    now = terms.scores
    scored = terms.column("logprobs")
    old = jax.lax.stop_gradient(now) if scored is None else scored
    reference = terms.column("reference_logprobs")
    reference = old if reference is None else reference
    own = LossTerms(
        now,
        old,
        batch.columns["advantages"],
        mask,
        batch.segment_ids,
        batch.sequences.shape[1],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    losses = jnp.where(mask, settings.loss(own), 0.0)
    ratios = own.ratios
    outside = (ratios < 1.0 - settings.clip_low) | (ratios > 1.0 + settings.clip_high)
    means = {
        "loss/policy": losses,
        "kl/mean": kl_k3(now, reference),
        "kl/old": kl_k3(old, now),
        "ratio/mean": ratios,
        "ratio/clipped": outside.astype(jnp.float32),
        "entropy/estimate": -now,
    }
    if terms.entropy is not None:
        means["entropy/mean"] = terms.entropy
    metrics = {name: terms.mean(x) for name, x in means.items()}
    metrics["ratio/max"] = jnp.where(mask, ratios, 0.0).max()
    if scored is None:
        metrics |= _measured_by_inference(terms, reference)

    losses += batch.columns["kl_weight"] * settings.kl_estimator(now, reference)
    if terms.entropy is not None:
        losses -= settings.entropy_coefficient * jnp.where(mask, terms.entropy, 0.0)
    return losses, metrics


def _measured_by_inference(terms: TokenTerms, reference: Array) -> Metrics:
    """Measure what inference does not where the old log-probs are those of now.

    `kl/response` is the KL of a sample to the reference by k1, and `mismatch/...` as of
    `inference.logprobs.mismatch`: both in nats.
    """
    batch = terms.batch
    apart = jnp.where(batch.mask, terms.scores - batch.columns["sampled_logprobs"], 0.0)
    of_response = jnp.sum(kl_k1(terms.scores, reference)) / batch.columns["total_sequences"]
    return {
        "kl/response": of_response,
        "mismatch/kl": terms.mean(jnp.expm1(bounded(apart)) - apart),
        "mismatch/mean": terms.mean(jnp.abs(apart)),
        "mismatch/max": jnp.max(jnp.abs(apart)),
    }


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


POLICY_LOSS = TokenLoss(
    policy_gradient,
    reads=("logprobs", "reference_logprobs", "sampled_logprobs", "advantages", "top_k_ids"),
)
CRITIC_LOSS = ValueLoss(clipped_values, reads=("values", "returns"))
