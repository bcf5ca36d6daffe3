"""Losses of the policy, per token; one function per equation, selected by `algorithm.loss`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.losses import own
from rlhf_jax.losses.kl import bounded
from rlhf_jax.runtime.extensions import Registry
from rlhf_jax.types import Array

DUAL_CLIP = 3.0  # c of Ye et al. 2020, table 2


class LossTerms(NamedTuple):
    """Hold the inputs of a policy loss at the predicted tokens, each [S, W] (`PackedSequences`).

    Log-probabilities are float32 in nats, and 0 where masked out.
    """

    logprobs: Array  # of the current policy, with gradient
    old_logprobs: Array  # of the policy before the update
    advantages: Array  # float32
    mask: Array  # bool
    segment_ids: Array  # int32, the sequence of each token, from 0
    sequences: int  # of a row shard, static
    clip_low: float
    clip_high: float

    @property
    def ratios(self) -> jax.Array:
        """Compute p / p_old of each token, 1 where masked out: [S, W] float32."""
        return jnp.exp(bounded(jnp.where(self.mask, self.logprobs - self.old_logprobs, 0.0)))

    def sample_means(self, x: Array) -> jax.Array:
        """Compute for each token the mean of x [S, W] over its sample: [S, W] float32."""

        def of_shard(x: Array, segment_ids: Array, mask: Array) -> jax.Array:
            sum_by_sequence = functools.partial(
                jax.ops.segment_sum, segment_ids=segment_ids, num_segments=self.sequences
            )
            tokens = sum_by_sequence(mask.astype(jnp.float32))
            means = sum_by_sequence(jnp.where(mask, x, 0.0)) / jnp.maximum(tokens, 1.0)
            return means[segment_ids]

        return jax.vmap(of_shard)(x, self.segment_ids, self.mask)


PolicyLoss = Callable[[LossTerms], Array]  # the loss of each token, [S, W] float32
OwnLoss = TypeVar("OwnLoss", bound=PolicyLoss)


def aggregated_by(name: str) -> Callable[[OwnLoss], OwnLoss]:
    """Let a loss define how a minibatch's losses are summed, by a value of `training.aggregate`.

    It applies if the config leaves it open. Without it the estimator of advantages decides.
    """

    def bring(loss: OwnLoss) -> OwnLoss:
        vars(loss)["aggregate"] = name
        return loss

    return bring


def ppo(terms: LossTerms) -> Array:
    """Compute -min(r A, clip(r, 1 - low, 1 + high) A), with r = p / p_old.

    (PPO, Schulman et al. 2017, eq. 7; two clip widths as in DAPO, Yu et al. 2025.)
    """
    return _clipped(terms.ratios, terms)


def dual_clip(terms: LossTerms) -> Array:
    """Compute PPO's loss, at most -c A where A < 0 (Ye et al. 2020, eq. 2), with c = 3."""
    losses = ppo(terms)
    bounded = jnp.minimum(losses, -DUAL_CLIP * terms.advantages)
    return jnp.where(terms.advantages < 0, bounded, losses)


@aggregated_by("sequence_mean")
def gspo(terms: LossTerms) -> Array:
    """Compute PPO's loss with the ratio of a whole sample: the mean over its tokens, in nats.

    It is GSPO-token (Zheng et al. 2025, eq. 13 to 15): equal to GSPO if the advantages within a
    sample are equal and each sample weighs the same.
    """
    apart = terms.logprobs - terms.old_logprobs
    of_sample = jax.lax.stop_gradient(terms.sample_means(apart))
    moved = terms.logprobs - jax.lax.stop_gradient(terms.logprobs)
    return _clipped(jnp.exp(bounded(jnp.where(terms.mask, of_sample + moved, 0.0))), terms)


def cispo(terms: LossTerms) -> Array:
    """Compute -stop(clip(r, 1 - low, 1 + high)) A log p, so that every token keeps its gradient.

    (MiniMax-M1, Chen et al. 2025, eq. 4 and 5.)
    """
    weights = jnp.clip(terms.ratios, 1.0 - terms.clip_low, 1.0 + terms.clip_high)
    return -jax.lax.stop_gradient(weights) * terms.advantages * terms.logprobs


def reinforce(terms: LossTerms) -> Array:
    """Compute -A log p, without ratio or clip (Williams 1992); exact for one step per roll-out."""
    return -terms.advantages * terms.logprobs


def _clipped(ratios: Array, terms: LossTerms) -> Array:
    """Compute -min(r A, clip(r) A) of given ratios [S, W]."""
    clipped = jnp.clip(ratios, 1.0 - terms.clip_low, 1.0 + terms.clip_high)
    return -jnp.minimum(ratios * terms.advantages, clipped * terms.advantages)


def _no_loss(candidate: object) -> str:
    """Return why an object is not a loss, or ''."""
    if not callable(candidate):
        return "is no function of rlhf_jax.LossTerms"

    def losses(now: Array, old: Array, advantages: Array, mask: Array, ids: Array) -> object:
        return candidate(LossTerms(now, old, advantages, mask, ids, 2, clip_low=0.2, clip_high=0.2))

    return own.refusal(losses, *[jnp.float32] * 3, jnp.bool_, jnp.int32)


# By the values of algorithm.loss.
LOSSES: Registry[PolicyLoss] = Registry(
    "algorithm.loss",
    _no_loss,
    {"ppo": ppo, "dual_clip": dual_clip, "gspo": gspo, "cispo": cispo, "reinforce": reinforce},
)
