"""Losses of a pair of answers to one prompt, of which one is preferred; one equation each.

Log-probabilities are summed over an answer's tokens, in nats, as are the reference's. The odds of
an answer are those of its mean token.
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
    reference_chosen: jax.Array  # log p by the reference; 0 if there is none
    reference_rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array

    @property
    def gains(self) -> tuple[jax.Array, jax.Array]:
        """Return log p - log p_ref of the chosen and of the rejected answer, in nats."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def margin(self) -> jax.Array:
        """Return the gain of the chosen answer minus that of the rejected one, in nats."""
        chosen, rejected = self.gains
        return chosen - rejected

    @property
    def means(self) -> tuple[jax.Array, jax.Array]:
        """Return the mean log p per token of the chosen and of the rejected answer, in nats."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class Constants(Protocol):
    """Declare the constants of the losses."""

    @property
    def beta(self) -> float:
        """Return the scale of a nat."""
        ...

    @property
    def label_smoothing(self) -> float:
        """Return the share of labels that are assumed to be wrong."""
        ...

    @property
    def margin(self) -> float:
        """Return the target margin of `simpo`, times beta."""
        ...


def dpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return -log sigmoid(beta * margin) (Rafailov et al. 2023, eq. 7)."""
    return -log_sigmoid(constants.beta * pairs.margin)


def cdpo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return the cross-entropy with smoothed labels (Mitchell 2023, conservative DPO)."""
    wrong = constants.label_smoothing
    logits = constants.beta * pairs.margin
    return -(1 - wrong) * log_sigmoid(logits) - wrong * log_sigmoid(-logits)


def robust(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return DPO, unbiased under a known share of wrong labels (Chowdhury et al. 2024)."""
    wrong = constants.label_smoothing
    logits = constants.beta * pairs.margin
    right = (1 - wrong) * log_sigmoid(logits) - wrong * log_sigmoid(-logits)
    return -right / (1 - 2 * wrong)


def ipo(pairs: Pairs, constants: Constants) -> jax.Array:
    """Return (margin - 1 / (2 beta))^2, with gains per token (Azar et al. 2023, eq. 17)."""
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
    """Return -mean log p of the chosen answer, plus beta times the odds-ratio loss.

    Odds are p / (1 - p), of p = exp(mean log p) (Hong et al. 2024, eq. 6).
    """
    chosen, rejected = pairs.means
    odds_chosen, odds_rejected = (
        mean - jnp.log(-jnp.expm1(jnp.minimum(mean, -1e-7))) for mean in (chosen, rejected)
    )
    return -chosen - constants.beta * log_sigmoid(odds_chosen - odds_rejected)


# By the values of `algorithm.loss`.
PREFERENCE_LOSSES: dict[str, Callable[[Pairs, Constants], jax.Array]] = {
    loss.__name__: loss for loss in (dpo, cdpo, robust, ipo, hinge, simpo, orpo)
}
# Losses without a reference.
WITHOUT_REFERENCE = ("simpo", "orpo")


def kto(gain: jax.Array, sign: jax.Array, baseline: jax.Array, beta: float) -> jax.Array:
    """Return 1 - sigmoid(beta * sign * (gain - baseline)) (Ethayarajh et al. 2024).

    sign: 1 for desirable answers, -1 for others. baseline: the mean gain of answers to other
    prompts, at least 0, in nats as gains are.
    """
    return 1 - jax.nn.sigmoid(beta * sign * (gain - baseline))


def comparison_metrics(margin: jax.Array) -> dict[str, jax.Array]:
    """Return the metrics of pairs, by how far the chosen side is ahead; of ties half are right."""
    return {"preference/accuracy": jnp.heaviside(margin, 0.5), "preference/margin": margin}


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | float = 0.0
) -> jax.Array:
    """Return -log sigmoid(reward of the chosen - reward of the rejected - margin).

    (Bradley and Terry 1952; the margin of Touvron et al. 2023.)
    """
    return -log_sigmoid(chosen - rejected - margin)
