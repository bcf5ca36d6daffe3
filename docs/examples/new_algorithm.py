"""Add online DPO: --config.algorithm.name=docs/examples/new_algorithm.py:ONLINE_DPO"""

import dataclasses

import jax
import numpy as np

from rlhf_jax import Algorithm, GroupLoss, option
from rlhf_jax.config.checks import require_positive


@dataclasses.dataclass(frozen=True)
class Options:
    beta: float = option(0.1, "weight of a nat of preference", require_positive)


def dpo(terms):  # Rafailov et al. 2023, equation 7
    gain = terms.per_sequence(terms.scores - terms.column("reference_logprobs"))
    margin = terms.settings.options.beta * terms.per_group(gain * terms.column("preference"))
    losses = -jax.nn.log_sigmoid(margin)
    return losses, {"loss/policy": terms.mean(losses), "dpo/margin": terms.mean(margin)}


def best_and_worst(batch, config):
    rewards = batch.columns["rewards"].reshape(-1, config.generation.samples_per_prompt)
    preference = np.zeros(rewards.shape, np.float32)
    each, failed = np.arange(len(rewards)), np.isnan(rewards)
    preference[each, np.where(failed, -np.inf, rewards).argmax(axis=1)] += 1
    preference[each, np.where(failed, np.inf, rewards).argmin(axis=1)] -= 1
    mask = batch.mask & (preference.reshape(-1, 1) != 0)  # the others are not trained on
    batch = dataclasses.replace(batch, mask=mask).with_columns(preference=preference.reshape(-1))
    return batch, {"dpo/pairs": float(mask.any(axis=1).sum() / 2)}


loss = GroupLoss(dpo, reads=("reference_logprobs", "preference"))
ONLINE_DPO = Algorithm("online DPO", {"policy": loss}, ("reference",), best_and_worst, Options)
