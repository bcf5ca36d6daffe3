"""The inference stage: what policy, reference and critic say of finished samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax.config.schema import Config
from rlhf_jax.inference.overlap import PER_TOKEN_SCORES, Scored, dispatch_scores, scores_of_row
from rlhf_jax.mesh import Layout, bring_weights
from rlhf_jax.model.transformer import cast
from rlhf_jax.runtime import distributed
from rlhf_jax.types import Model, Rollout


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
    """Say how samples are scored; nothing here changes from step to step."""

    layout: Layout
    # the one that was sampled with
    temperature: float
    # rows of one forward pass
    microbatch_rows: int

    @classmethod
    def from_config(cls, config: Config, layout: Layout) -> ScoringSettings:
        """Settle how samples are scored."""
        return cls(layout, config.generation.temperature, config.training.microbatch_rows)


class TokenScores(NamedTuple):
    """Hold what models say of the tokens of a rollout, each [B, T] float32, zero off the mask."""

    logprobs: np.ndarray
    # those of the policy where there is no reference
    reference_logprobs: np.ndarray
    # of what is known before each token; None without a critic
    values: np.ndarray | None


def score(
    policy: Model,
    reference: Model | None,
    critic: Model | None,
    rollout: Rollout,
    settings: ScoringSettings,
    scored: Mapping[int, Scored] | None = None,
) -> TokenScores:
    """Score a rollout of host arrays in canonical order and fixed shapes.

    Under top-k the reference, too, is renormalised on the sampled sets. `scored`, by sample id, is
    what slices had time for beside generation; the rest is then scored in parts of a fixed size.
    """
    rows = settings.microbatch_rows
    layout = settings.layout
    trained = [model and _cast(model, layout.dtype) for model in (policy, critic)]
    own_policy, own_critic = bring_weights(trained, layout)
    models = (own_policy, reference, own_critic)
    how = (settings.temperature, rows, layout)
    if scored is None:
        found = distributed.fetch(dispatch_scores(models, rollout, *how))
    else:
        ids = rollout.sample_id.tolist()
        of_rows = {row: scored[sample] for row, sample in enumerate(ids) if sample in scored}
        rest = [row for row, sample in enumerate(ids) if sample not in scored]
        for start in range(0, len(rest), rows):
            part = np.resize(rest[start : start + rows], rows)  # filled up by some of them again
            chosen = jax.tree.map(lambda leaf, part=part: leaf[part], rollout)
            results = distributed.fetch(dispatch_scores(models, chosen, *how))
            of_rows |= {row: scores_of_row(results, index) for index, row in enumerate(part)}
        columns = [
            [getattr(of_rows[row], name) for row in range(len(ids))] for name in PER_TOKEN_SCORES
        ]
        found = [None if leaves[0] is None else np.stack(leaves) for leaves in columns]

    logprobs, reference_logprobs, values = found
    assert logprobs is not None
    return TokenScores(
        logprobs, logprobs if reference_logprobs is None else reference_logprobs, values
    )


_cast = jax.jit(cast, static_argnums=1)
