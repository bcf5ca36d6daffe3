"""On-policy distillation: a policy learns from a teacher's log-probabilities of its own samples.

(Agarwal et al. 2024, GKD, with the reverse KL; Gu et al. 2024, MiniLLM.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.config.checks import require
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.kl import kl_k2
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import Share, TokenLoss, TokenTerms


def reverse_kl(terms: TokenTerms) -> Share:
    """Compute the loss of each token [S, W], and metrics.

    The loss is (log p_policy - log p_teacher - baseline)^2 / 2. Its gradient on the policy's own
    samples is that of the reverse KL of a token, with the difference as the token's price; the
    baseline does not change its mean. `kl/mean` is the reverse KL a token, in nats, by its unbiased
    estimator.
    """
    teacher = terms.column("reference_logprobs")
    assert teacher is not None, "The teacher scores the samples."
    losses = jnp.asarray(kl_k2(terms.scores, teacher + terms.batch.columns["kl_baseline"]))
    difference = jax.lax.stop_gradient(terms.scores - teacher)
    return losses, {
        "loss/policy": terms.mean(losses),
        "kl/mean": terms.mean(difference),
        "reference/nats": terms.mean(-teacher),
    }


def with_baseline(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the samples with their mean price of a token as `kl_baseline`.

    Otherwise every token that is likelier for the policy than for the teacher is made less likely,
    also one of small difference, and gradients of single samples spread more around their mean.
    """
    del config
    columns = batch.columns
    prices = np.asarray(columns["sampled_logprobs"]) - np.asarray(columns["reference_logprobs"])
    mask = np.asarray(batch.mask)
    baseline = prices[mask].mean(dtype=np.float64) if mask.any() else 0.0
    return batch.with_columns(kl_baseline=np.array(baseline, np.float32)), {}


def check(config: Config) -> None:
    """Raise ValueError where the policy would be its own teacher."""
    require(
        bool(config.kl.reference),
        "kl.reference is empty, and the policy would teach itself; name the folder of the teacher.",
    )


ON_POLICY_DISTILL = Algorithm(
    title="on-policy distillation",
    losses={
        "policy": TokenLoss(
            reverse_kl, reads=("reference_logprobs", "kl_baseline", "temperatures", "top_k_ids")
        )
    },
    scores=("reference",),
    prepare=with_baseline,
    check=check,
    rewarded=False,
)
