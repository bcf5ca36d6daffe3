"""The inference stage: what policy, reference and critic say of finished samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import score_rollout
from rlhf_jax.inference.overlap import PER_TOKEN_SCORES, Scored, scores_of_row
from rlhf_jax.inference.values import score_values
from rlhf_jax.mesh import Layout
from rlhf_jax.model.transformer import cast
from rlhf_jax.runtime import distributed
from rlhf_jax.types import Array, Model, Rollout


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
    what slices had time for beside generation; the rest is scored
    in parts of a fixed size then.
    """
    dtype = settings.layout.dtype
    critic = critic and _cast(critic, dtype)
    dispatch = functools.partial(
        _dispatch, _cast(policy, dtype), reference, critic, settings=settings
    )
    if scored is not None:
        found = _score_the_rest(dispatch, rollout, settings.microbatch_rows, scored)
    else:
        found = distributed.fetch(dispatch(rollout))
    logprobs, reference_logprobs, values = found
    return TokenScores(
        logprobs, logprobs if reference_logprobs is None else reference_logprobs, values
    )


def _dispatch(
    policy: Model,
    reference: Model | None,
    critic: Model | None,
    rollout: Rollout,
    settings: ScoringSettings,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Begin to score a rollout [B, T]: log-probs, the reference's, values, on their way."""
    rows = settings.microbatch_rows
    placed = meshes.place_rows(rollout, settings.layout)
    logprobs = functools.partial(
        score_rollout,
        rollout=placed,
        temperature=settings.temperature,
        rows=rows,
        layout=settings.layout,
    )
    values = critic and score_values(critic, placed, rows=rows, layout=settings.layout)
    return logprobs(policy), reference and logprobs(reference), values


def _score_the_rest(
    dispatch: Callable[[Rollout], tuple[Array, Array | None, Array | None]],
    rollout: Rollout,
    rows: int,
    scored: Mapping[int, Scored],
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Join what slices have scored with the rest, which is scored in parts of a fixed size."""
    ids = rollout.sample_id.tolist()
    found = {row: scored[sample] for row, sample in enumerate(ids) if sample in scored}
    rest = [row for row, sample in enumerate(ids) if sample not in scored]
    for start in range(0, len(rest), rows):
        part = np.resize(rest[start : start + rows], rows)  # filled up by some of them again
        chosen = jax.tree.map(lambda leaf, part=part: leaf[part], rollout)
        results = distributed.fetch(dispatch(chosen))
        found |= {row: scores_of_row(results, index) for index, row in enumerate(part)}

    def column(name: str) -> np.ndarray | None:
        leaves = [getattr(found[row], name) for row in range(len(ids))]
        return None if leaves[0] is None else np.stack(leaves)

    logprobs, reference_logprobs, values = map(column, PER_TOKEN_SCORES)
    assert logprobs is not None
    return logprobs, reference_logprobs, values


_cast = jax.jit(cast, static_argnums=1)
