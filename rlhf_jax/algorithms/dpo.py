"""DPO and related losses: a policy learns from pairs of answers, of which people prefer one."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from rlhf_jax.config.algorithms import Algorithm, option
from rlhf_jax.config.checks import require, require_not_negative, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.preference import (
    PREFERENCE_LOSSES,
    WITHOUT_REFERENCE,
    Pairs,
    comparison_metrics,
)
from rlhf_jax.training.kinds import GroupLoss, GroupTerms, Share


@dataclasses.dataclass(frozen=True)
class DPOOptions:
    """Hold the options of the pair loss."""

    loss: str = option(
        "dpo",
        "of a pair: " + ", ".join(PREFERENCE_LOSSES),
        lambda config, key: require_one_of(config, key, tuple(PREFERENCE_LOSSES)),
    )
    beta: float = option(0.1, "weight of a nat in the loss", require_positive)
    label_smoothing: float = option(
        0.0,
        "share of labels that are assumed to be wrong, for cdpo and robust",
        require_not_negative,
    )
    margin: float = option(
        0.5, "by which simpo wants the chosen answer to be ahead", require_not_negative
    )


def preferred(terms: GroupTerms) -> Share:
    """Compute the loss of each pair [S, R], and metrics.

    `preference/accuracy` is the share of pairs whose chosen answer gained more, against the
    reference if there is one; `preference/margin` how much more, in nats; `chosen/...` and
    `rejected/...` are nats of the sequences.
    """
    options = terms.settings.options
    signs = terms.column("preference")
    assert signs is not None, "Pairs have the column `preference`."
    reference = terms.column("reference_logprobs")
    tokens = terms.per_sequence(jnp.ones_like(terms.scores))
    policy = terms.per_sequence(terms.scores)
    known = jnp.zeros_like(policy) if reference is None else terms.per_sequence(reference)
    chosen, rejected = (
        [terms.per_group(jnp.where(side, x, 0.0)) for x in (policy, known, tokens)]
        for side in (signs > 0, signs < 0)
    )
    pairs = Pairs(
        chosen[0],
        rejected[0],
        reference_chosen=chosen[1],
        reference_rejected=rejected[1],
        # padding slots of a line have no group, hence no token to divide by
        chosen_tokens=jnp.maximum(chosen[2], 1.0),
        rejected_tokens=jnp.maximum(rejected[2], 1.0),
    )
    losses = PREFERENCE_LOSSES[options.loss](pairs, options)
    margin = pairs.chosen - pairs.rejected if reference is None else pairs.margin
    means = {
        "loss/policy": losses,
        **comparison_metrics(margin),
        "chosen/logprob": pairs.chosen,
        "rejected/logprob": pairs.rejected,
    }
    return losses, {name: terms.mean(x) for name, x in means.items()}


def scores(config: Config) -> tuple[str, ...]:
    """Return the reference if the loss reads one."""
    return () if config.algorithm.loss in WITHOUT_REFERENCE else ("reference",)


def check(config: Config) -> None:
    """Check that label smoothing is below 0.5 and is set only for losses that read it."""
    options = config.algorithm
    smoothed = options.loss in ("cdpo", "robust")
    require(
        smoothed or not options.label_smoothing,
        f"algorithm.label_smoothing is {options.label_smoothing}, which the loss {options.loss!r}"
        " does not read; choose cdpo or robust, or 0.",
    )
    require(
        options.label_smoothing < 0.5,
        f"algorithm.label_smoothing is {options.label_smoothing}; from 0.5 on labels carry no"
        " information.",
    )


def title(config: Config) -> str:
    """Return the title of the algorithm, by its loss: "DPO"."""
    loss = str(config.algorithm.loss)
    return {"cdpo": "conservative DPO", "robust": "robust DPO"}.get(loss, loss.upper())


DPO = Algorithm(
    title=title,
    losses={"policy": GroupLoss(preferred, reads=("reference_logprobs", "preference"))},
    scores=scores,
    options=DPOOptions,
    check=check,
    given=("chosen", "rejected"),
)
