"""Losses of a pair of answers to one prompt, of which one is preferred: one equation a function.

Log-probabilities are summed over an answer's tokens, in nats, as those of the reference are. The
odds of an answer are those of its mean token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

log_sigmoid = jax.nn.log_sigmoid


class Pairs(NamedTuple):
    """Hold arrays of one shape [...] about chosen and rejected answers."""

    chosen: jax.Array  # log p by the policy, in nats
    rejected: jax.Array
    reference_chosen: jax.Array  # log p by the reference; 0 where there is none
    reference_rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array

    @property
    def gains(self) -> tuple[jax.Array, jax.Array]:
        """Return by how many nats the policy likes either answer more than the reference does."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def margin(self) -> jax.Array:
        """Return how much more the policy gained for the chosen answer, in nats."""
        chosen, rejected = self.gains
        return chosen - rejected

    @property
    def means(self) -> tuple[jax.Array, jax.Array]:
        """Return log p of a token of either answer on average, in nats."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class Constants(Protocol):
    """Describe what the losses read beside the pairs."""

    @property
    def beta(self) -> float:
        """Return the weight of a nat."""
        ...

    @property
    def label_smoothing(self) -> float:
        """Return the share of labels that are taken to be wrong."""
        ...

    @property
    def margin(self) -> float:
        """Return by how much `simpo` wants the chosen answer to be ahead, times beta."""
        ...


def dpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return -log sigmoid(beta * margin) (Rafailov et al. 2023, eq. 7)."""
    return -log_sigmoid(constants.beta * pairs.margin)


def cdpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return the cross-entropy of labels that are smoothed (Mitchell 2023, conservative DPO)."""
    wrong = constants.label_smoothing
    logits = constants.beta * pairs.margin
    return -(1 - wrong) * log_sigmoid(logits) - wrong * log_sigmoid(-logits)


def robust(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return DPO without the bias of labels of which a share is wrong (Chowdhury et al. 2024)."""
    wrong = constants.label_smoothing
    logits = constants.beta * pairs.margin
    right = (1 - wrong) * log_sigmoid(logits) - wrong * log_sigmoid(-logits)
    return -right / (1 - 2 * wrong)


def ipo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return (margin - 1 / (2 beta))^2, of gains a token (Azar et al. 2023, eq. 17)."""
    chosen, rejected = pairs.gains
    margin = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
    return (margin - 1 / (2 * constants.beta)) ** 2


def hinge(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return max(0, 1 - beta * margin) (Zhao et al. 2023, SLiC)."""
    return jnp.maximum(1 - constants.beta * pairs.margin, 0.0)


def simpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return -log sigmoid(beta * difference of means - margin) (Meng et al. 2024, eq. 6)."""
    chosen, rejected = pairs.means
    return -log_sigmoid(constants.beta * (chosen - rejected) - constants.margin)


def orpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return what a chosen token costs, and beta times what the odds do (Hong et al. 2024, eq. 6).

    Odds are p / (1 - p), of p = exp(mean log p).
    """
    chosen, rejected = pairs.means
    odds_chosen, odds_rejected = (
        mean - jnp.log(-jnp.expm1(jnp.minimum(mean, -1e-7))) for mean in (chosen, rejected)
    )
    return -chosen - constants.beta * log_sigmoid(odds_chosen - odds_rejected)


# By the name in `algorithm.loss`.
PREFERENCE_LOSSES: dict[str, Callable[[Pairs, Constants], jax.Array]] = {
    loss.__name__: loss for loss in (dpo, cdpo, robust, ipo, hinge, simpo, orpo)
}
# Those that read no reference.
WITHOUT_REFERENCE = ("simpo", "orpo")


def kto(gain: jax.Array, sign: jax.Array, baseline: jax.Array, beta: float) -> jax.Array:
    """Return 1 - sigmoid of beta times how far a gain is on its side (Ethayarajh et al. 2024).

    sign: 1 of desirable answers, -1 of others. baseline: the mean gain of answers to other prompts,
    at least 0, in nats as gains are.
    """
    return 1 - jax.nn.sigmoid(beta * sign * (gain - baseline))


def bradley_terry(chosen: jax.Array, rejected: jax.Array, margin: float = 0.0) -> jax.Array:
    """Return -log sigmoid(reward of the chosen - reward of the rejected - margin).

    (Bradley and Terry 1952; the margin of Touvron et al. 2023.)
    """
    return -log_sigmoid(chosen - rejected - margin)
