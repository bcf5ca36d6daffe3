"""From scored samples to the columns that losses read, by the algorithm of a run.

Samples of older weights are weighed by truncated importance sampling.
"""

from __future__ import annotations

import math

import numpy as np

from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.losses.kl import bounded
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.types import Array, Memory

__all__ = ["importance_weights", "prepare", "truncated_importance_sampling"]


def prepare(
    scored: Sequences,
    kl_coefficient: float,
    config: Config,
    memory: Memory,
    behind: int | None = None,
) -> tuple[Sequences, Memory, dict[str, float]]:
    """Return scored samples with the columns that losses read, the algorithm's memory, and metrics.

    behind: the updates since the weights of prefetched samples; None otherwise. Non-finite numbers
    are dropped from the metrics: the update reports them.
    """
    known = scored.with_columns(kl_weight=np.array(kl_coefficient, np.float32))
    batch, metrics = algorithm_of(config).prepare(known, config)
    if behind is not None:
        batch, weights = truncated_importance_sampling(batch, config.training.lag_clip)
        metrics = metrics | weights | {"lag/updates": float(behind)}
    drawn_from, now = (scored.columns.get(name) for name in ("sampled_logprobs", "logprobs"))
    tempered = algorithm_of(config).temperatures(config)  # drawn at other temperatures
    if drawn_from is not None and now is not None and not (behind or tempered):
        metrics = metrics | mismatch(drawn_from, now, scored.mask)
    batch, memory = algorithm_of(config).recall(batch, memory, config)
    return batch, memory, {name: value for name, value in metrics.items() if math.isfinite(value)}


def importance_weights(logprobs: Array, sampled: Array, mask: Array, clip: float) -> np.ndarray:
    """Compute min(p_now / p_sampled, clip) of each token: [B, T] float32, 1 where masked out.

    logprobs and sampled [B, T] float32, in nats. (Truncated importance sampling: Ionides 2008;
    token by token as in IMPALA, Espeholt et al. 2018, eq. 1.)
    """
    log_ratio = np.where(mask, np.asarray(logprobs) - np.asarray(sampled), 0.0)
    return np.minimum(np.exp(bounded(log_ratio)), clip).astype(np.float32)


def truncated_importance_sampling(
    batch: Sequences, clip: float
) -> tuple[Sequences, dict[str, float]]:
    """Multiply the advantages of host arrays by `importance_weights`; return metrics of these.

    `lag/kl` estimates KL(sampler || policy now), in nats per token, by mean(r - 1 - log r); the
    others are the mean weight, and the share of truncated ones. Log-probs must have been scored.
    """
    mask = batch.mask
    sampled = batch.columns["sampled_logprobs"]
    logprobs = batch.columns["logprobs"]
    weights = importance_weights(logprobs, sampled, mask, clip)
    log_ratio = np.asarray(logprobs, np.float64)[mask] - np.asarray(sampled)[mask]
    metrics = {"lag/kl": 0.0, "lag/weight": 1.0, "lag/truncated": 0.0}
    if log_ratio.size:
        metrics = {
            "lag/kl": float(np.mean(np.expm1(bounded(log_ratio)) - log_ratio)),
            "lag/weight": float(np.mean(weights[mask])),
            "lag/truncated": float(np.mean(log_ratio > np.log(clip))),
        }
    weighed = np.where(mask, np.asarray(batch.columns["advantages"]) * weights, 0.0)
    return batch.with_columns(advantages=weighed.astype(np.float32)), metrics
