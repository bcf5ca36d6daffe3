"""The inference stage: what policy, reference and critic say of finished samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.overlap import PER_TOKEN_SCORES, PendingScores, Scored, dispatch_scores
from rlhf_jax.mesh import Layout
from rlhf_jax.model.transformer import cast
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.placement.idle import fetched, fetched_shapes
from rlhf_jax.placement.plan import CallLayouts
from rlhf_jax.placement.transfer import is_in_place, transfer
from rlhf_jax.runtime.compilation import Execute, compile_only, run_now
from rlhf_jax.types import Model, Rollout


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
    """Say how samples are scored; nothing here changes from step to step."""

    layout: Layout  # of the policy
    # the one that was sampled with
    temperature: float
    # the longest samples that one forward pass has room for
    microbatch_rows: int
    # lengths are rounded up to some multiples of it
    length_bucket: int = 64
    # False: the update's own forward pass gives them
    policy_logprobs: bool = True
    # None: as the policy
    reference_layout: Layout | None = None
    critic_layout: Layout | None = None

    @classmethod
    def from_config(cls, config: Config, layouts: CallLayouts) -> ScoringSettings:
        """Settle how samples are scored."""
        training = config.training
        return cls(
            layouts.policy_inference,
            config.generation.temperature,
            training.microbatch_rows,
            length_bucket=training.length_bucket,
            policy_logprobs=derived.needs_old_logprobs(config),
            reference_layout=layouts.reference_inference,
            critic_layout=layouts.critic_inference,
        )


class TokenScores(NamedTuple):
    """Hold what models say of the tokens of a rollout, each [B, T] float32, zero off the mask."""

    # None where the update computes them itself
    logprobs: np.ndarray | None
    # None without a reference
    reference_logprobs: np.ndarray | None
    # of what is known before each token; None without a critic
    values: np.ndarray | None
    # the share of computed tokens that were padding
    padding: float = 0.0


def score(
    policy: Model,
    reference: Model | None,
    critic: Model | None,
    rollout: Rollout,
    settings: ScoringSettings,
    scored: Mapping[int, Scored] | None = None,
    observe: Callable[[PhaseParts], None] = lambda parts: None,
) -> TokenScores:
    """Score a rollout of host arrays, in an order and in shapes that follow from its tokens.

    Under top-k the reference, too, is renormalised on the sampled sets. `scored`, by sample id, is
    what slices had time for beside generation; only the rest is then scored. `observe` hears of
    what the devices work on.
    """
    scored = scored or {}
    ids = rollout.sample_id.tolist()
    rest = [row for row, sample in enumerate(ids) if sample not in scored]
    unscored = jax.tree.map(lambda leaf: leaf[rest], rollout)
    observe(progress := PhaseParts(0))
    reference = reference and fetched(reference)
    pending = _dispatch(policy, reference, critic, unscored, settings, progress=progress)
    progress.of = len(progress.handed)
    found = []
    for name, of_rest in zip(PER_TOKEN_SCORES, pending.fetch(), strict=True):
        of_rows = {row: getattr(scored[one], name) for row, one in enumerate(ids) if one in scored}
        of_rows |= {} if of_rest is None else dict(zip(rest, of_rest, strict=True))
        known = len(of_rows) == len(ids) and all(leaf is not None for leaf in of_rows.values())
        found.append(np.stack([of_rows[row] for row in range(len(ids))]) if known else None)
    return TokenScores(*found, padding=pending.padding)


def compile_scores(
    policy: Model,
    reference: Model | None,
    critic: Model | None,
    rollout: Rollout,
    settings: ScoringSettings,
) -> None:
    """Compile what `score` runs of such a rollout, and run nothing."""
    reference = reference and fetched_shapes(reference)
    _dispatch(policy, reference, critic, rollout, settings, compile_only)


def _dispatch(
    policy: Model,
    reference: Model | None,
    critic: Model | None,
    rollout: Rollout,
    settings: ScoringSettings,
    execute: Execute = run_now,
    progress: PhaseParts | None = None,
) -> PendingScores:
    """Start to score by weights as inference has them, all models of a layout together."""
    layout = settings.layout
    places = (layout, settings.reference_layout or layout, settings.critic_layout or layout)
    trained = [policy if settings.policy_logprobs else None, critic]
    brought = []
    for model, place in zip(trained, places[::2], strict=True):
        if model is not None and is_in_place(model, place):
            model = execute(_cast, model, place.dtype)
        brought.append(model and transfer(model, place, place.dtype))
    models = (brought[0], reference, brought[1])
    how = (settings.temperature, settings.microbatch_rows, settings.length_bucket)
    pending = []
    for layout in dict.fromkeys(places):
        pairs = zip(models, places, strict=True)
        there = [model if place == layout else None for model, place in pairs]
        pending.append(dispatch_scores(there, rollout, *how, layout, execute, progress))
    return PendingScores(
        [part for one in pending for part in one.parts],
        pending[0].shape,
        present=tuple(model is not None for model in models),
    )


_cast = jax.jit(cast, static_argnums=1)
