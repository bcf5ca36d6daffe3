"""From scored samples to the columns that losses read, by the algorithm of a run."""

from __future__ import annotations

import math

import numpy as np

from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.importance import truncated_importance_sampling
from rlhf_jax.types import Memory


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
