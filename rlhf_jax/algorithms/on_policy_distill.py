"""On-policy distillation: a policy learns from a teacher's log-probabilities of its own samples.

(Agarwal et al. 2024, GKD, with the reverse KL; Gu et al. 2024, MiniLLM.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.config.checks import require
from rlhf_jax.config.schema import Config
from rlhf_jax.losses.kl import kl_k2
from rlhf_jax.training.kinds import Share, TokenLoss, TokenTerms


def reverse_kl(terms: TokenTerms) -> Share:
    """Compute the loss of each token [S, W], and metrics.

    The loss is (log p_policy - log p_teacher)^2 / 2. Its gradient on the policy's own samples is
    that of the reverse KL of a token, with the difference as the token's price. `kl/mean` is the
    reverse KL a token, in nats, by its unbiased estimator.
    """
    teacher = terms.column("reference_logprobs")
    assert teacher is not None, "The teacher scores the samples."
    losses = jnp.asarray(kl_k2(terms.scores, teacher))
    difference = jax.lax.stop_gradient(terms.scores - teacher)
    return losses, {
        "loss/policy": terms.mean(losses),
        "kl/mean": terms.mean(difference),
        "reference/nats": terms.mean(-teacher),
    }


def check(config: Config) -> None:
    """Raise ValueError where the policy would be its own teacher."""
    require(
        bool(config.kl.reference),
        "kl.reference is empty, and the policy would teach itself; name the folder of the teacher.",
    )


ON_POLICY_DISTILL = Algorithm(
    title="on-policy distillation",
    losses={
        "policy": TokenLoss(reverse_kl, reads=("reference_logprobs", "temperatures", "top_k_ids"))
    },
    scores=("reference",),
    check=check,
    rewarded=False,
)
