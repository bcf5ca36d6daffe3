"""KTO: a policy learns from single answers that people found desirable or not."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from rlhf_jax.config.algorithms import Algorithm, option
from rlhf_jax.config.checks import require, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.preference import comparison_metrics, kto
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import GroupLoss, GroupTerms, Share


@dataclasses.dataclass(frozen=True)
class KTOOptions:
    """Hold the options of the loss."""

    beta: float = option(0.1, "weight of a nat in the loss", require_positive)
    desirable_weight: float = option(1.0, "of the loss of desirable answers", require_positive)
    undesirable_weight: float = option(1.0, "of the loss of other answers", require_positive)


def desirable(terms: GroupTerms) -> Share:
    """Compute the loss of each answer [S, R] from its gain over the reference, and metrics."""
    options = terms.settings.options
    signs = terms.column("preference")
    reference = terms.column("reference_logprobs")
    baseline = terms.column("kl_baseline")
    assert signs is not None and reference is not None and baseline is not None
    gain = terms.per_group(terms.per_sequence(terms.scores - reference))
    sign = terms.per_group(signs)
    weight = jnp.where(sign > 0, options.desirable_weight, options.undesirable_weight)
    losses = weight * kto(gain, sign, jnp.asarray(baseline), options.beta)
    means = {"loss/policy": losses, **comparison_metrics(sign * (gain - baseline))}
    return losses, {name: terms.mean(x) for name, x in means.items()}


def baseline(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the rows' own answers, with the mean gain of mismatched answers as the KL baseline.

    The baseline is the policy's before the update, at least 0; no gradient flows through it.
    """
    del config
    columns = batch.columns
    gains = np.where(batch.mask, columns["logprobs"] - columns["reference_logprobs"], 0.0)
    others = np.asarray(columns["preference"]) == 0
    mean = max(0.0, float(gains.sum(axis=1)[others].mean()))
    answers = dataclasses.replace(batch, mask=batch.mask & ~others[:, None])
    known = answers.with_columns(kl_baseline=np.array(mean, np.float32))
    return known, {"preference/baseline": mean}


def check(config: Config) -> None:
    """Check that a step has other rows, whose answers do not belong to a row's prompt."""
    require(
        config.data.rows_per_step != 1,
        "data.rows_per_step is 1, and KTO compares with answers to other prompts of a step; raise"
        " it to at least 2.",
    )


KTO = Algorithm(
    title="KTO",
    losses={
        "policy": GroupLoss(desirable, reads=("reference_logprobs", "preference", "kl_baseline"))
    },
    scores=("policy", "reference"),
    prepare=baseline,
    options=KTOOptions,
    check=check,
    given=("completion",),
    label="label",
)
