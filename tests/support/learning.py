"""Policies and critics that tests train, and token sequences from arrays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.learn import learn, trained
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, Models


class Optimizers(NamedTuple):
    """Those of a policy and, where there is one, of its critic."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation | None = None


def learners_of(
    optimizers: Optimizers,
    settings: TrainingSettings,
    critic_layout: Layout | None = None,
    waits: int = 0,
) -> dict[str, Learner]:
    """A policy that learns, some updates later, and a critic where it has an optimizer, maybe
    elsewhere.
    """
    learners = {"policy": Learner("policy", POLICY_LOSS, optimizers.policy, settings, waits)}
    if optimizers.critic is not None:
        own = dataclasses.replace(settings, layout=critic_layout or settings.layout)
        learners["critic"] = Learner("critic", CRITIC_LOSS, optimizers.critic, own)
    return learners


def new_models(
    policy: Model,
    optimizers: Optimizers,
    layout: Layout = ONE_DEVICE,
    critic: Model | None = None,
    critic_layout: Layout | None = None,
) -> Models:
    """Policy and critic as they are trained; both are used up."""
    models = {"policy": trained(policy, optimizers.policy, layout)}
    if critic is not None:
        models["critic"] = trained(critic, optimizers.critic, critic_layout or layout)
    return models


def update(
    models: Models,
    batch: Sequences,
    optimizers: Optimizers,
    settings: TrainingSettings,
    kl_weight: float = 0.0,
    critic_layout: Layout | None = None,
    waits: int = 0,
    **more,
) -> tuple[Models, dict[str, float]]:
    """One update of policy and critic, the first that the models see."""
    step = int(models["policy"].version)
    learners = learners_of(optimizers, settings, critic_layout, waits)
    batch = batch.with_columns(kl_weight=np.array(kl_weight, np.float32))
    return learn(models, batch, learners, step=step, **more)


def sequences_of(tokens, mask, **columns) -> Sequences:
    """Sequences each of a group of its own, with ids from 0."""
    rows = np.arange(len(tokens))
    columns = {"sample_ids": rows.astype(np.uint32)} | columns
    given = {name: column for name, column in columns.items() if column is not None}
    return Sequences(tokens, mask, rows.astype(np.int32)).with_columns(**given)


def packed_of(mask, segments, count: int, **columns) -> PackedSequences:
    """Packed sequences of which only the predicted tokens matter: mask and segments [S, W]."""
    lines = jnp.zeros(mask.shape, jnp.int32)
    pairs = jnp.zeros((len(mask), 1, 2), jnp.int32)
    groups = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (len(mask), count))
    packed = PackedSequences(
        *(lines, lines, jnp.stack([lines, lines], axis=-1), pairs, lines, lines),
        jnp.asarray(mask),
        segments,
        groups,
    )
    return packed.with_columns(**columns)
