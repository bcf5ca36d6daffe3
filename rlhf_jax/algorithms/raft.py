"""RAFT: a policy imitates the best of its own answers to each prompt.

(Dong et al. 2023; also called rejection-sampling fine-tuning.)
"""

from __future__ import annotations

import math

import numpy as np

from rlhf_jax.algorithms.sft import negative_log_likelihood
from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.config.checks import require
from rlhf_jax.config.schema import Config
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import TokenLoss


def best_of_n(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the samples with the highest reward of each prompt.

    A prompt whose rewards are equal has none. `best/kl` bounds the KL of best-of-n sampling to the
    policy, log n - (n - 1) / n nats a response (Beirami et al. 2024).
    """
    count = config.generation.samples_per_prompt
    rewards = np.asarray(batch.columns["rewards"]).reshape(-1, count)
    known = ~np.isnan(rewards)
    low = np.where(known, rewards, np.inf)
    high = np.where(known, rewards, -np.inf)
    differ = low.min(axis=1) < high.max(axis=1)  # of equal answers none is best
    chosen = (np.arange(count) == high.argmax(axis=1)[:, None]) & differ[:, None]
    metrics = {"best/kl": math.log(count) - (count - 1) / count}
    if chosen.any():
        metrics["best/reward"] = float(rewards[chosen].mean())
    rows = np.flatnonzero(chosen)
    return batch.select(rows, multiple=config.training.minibatches), metrics


def check(config: Config) -> None:
    """Raise ValueError where there is only one sample to choose from."""
    count = config.generation.samples_per_prompt
    require(
        count > 1,
        f"generation.samples_per_prompt is {count}; raft chooses the best of two or more.",
    )


RAFT = Algorithm(
    title="RAFT",
    losses={"policy": TokenLoss(negative_log_likelihood, reads=("top_k_ids",))},
    choose=best_of_n,
    chosen=lambda config: (1, 1),
    check=check,
)
