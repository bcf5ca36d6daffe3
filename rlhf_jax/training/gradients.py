"""Gradients of policy and critic: of one micro-batch, and summed over those of a minibatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.inference.logprobs import head_logprobs
from rlhf_jax.inference.values import head_values
from rlhf_jax.mesh import Layout, pin_weights
from rlhf_jax.model.packed import read_packed
from rlhf_jax.model.transformer import cast
from rlhf_jax.training.batching import MicroBatch
from rlhf_jax.training.losses import is_maximum, summed_policy_loss, summed_value_loss
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model

Metrics = dict[str, jax.Array]

# Of a model and a micro-batch: its share of the loss, [] float32, and metrics.
LossFunction = Callable[[Model, MicroBatch, TrainingSettings], tuple[jax.Array, Metrics]]

# The same of the hidden states [S, W, M] before the predicted tokens; of the model it reads what
# follows the layers.
HeadLoss = Callable[[Model, jax.Array, MicroBatch, TrainingSettings], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class Learner:
    """Hold a model that is trained, and by which loss; the critic's settings are its own."""

    call: str  # policy_training or critic_training
    model: Model  # as the settings' layout has it
    objective: LossFunction
    head_loss: HeadLoss  # the same of the hidden states
    settings: TrainingSettings


@struct.dataclass
class Gradient:
    """Hold the gradient of a minibatch, summed over the micro-batches so far, and its metrics."""

    weights: Model  # float32
    metrics: Metrics


def policy_objective(
    policy: Model, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, Metrics]:
    """Compute a micro-batch's share of the policy's loss, and metrics: see `summed_policy_loss`."""
    hidden = read_packed(policy, batch.packed, settings.layout, settings.remat)
    return policy_head_loss(policy, hidden, batch, settings)


def critic_objective(
    critic: Model, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, Metrics]:
    """Compute a micro-batch's share of the critic's loss, and metrics: see `summed_value_loss`."""
    hidden = read_packed(critic, batch.packed, settings.layout, settings.remat)
    return critic_head_loss(critic, hidden, batch, settings)


def policy_head_loss(
    policy: Model, hidden: jax.Array, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, Metrics]:
    """Compute `policy_objective` from the hidden states [S, W, M] before predicted tokens."""
    logprobs, entropy = head_logprobs(
        policy,
        hidden,
        batch.packed.targets,
        batch.mask,
        support=batch.support,
        temperature=settings.temperature,
        entropy=settings.entropy_coefficient != 0,
        chunk=settings.chunk,
        layout=settings.layout,
        head_dtype=jnp.float32,
    )
    return summed_policy_loss(
        logprobs,
        entropy,
        batch,
        loss=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_estimator=settings.kl_estimator,
        entropy_coefficient=settings.entropy_coefficient,
    )


def critic_head_loss(
    critic: Model, hidden: jax.Array, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, Metrics]:
    """Compute `critic_objective` from the hidden states [S, W, M] before predicted tokens."""
    return summed_value_loss(
        head_values(critic, hidden, batch.packed), batch, clip=settings.critic_clip
    )


def policy_learner(policy: Model, settings: TrainingSettings) -> Learner:
    """Return a policy that is trained."""
    return Learner("policy_training", policy, policy_objective, policy_head_loss, settings)


def critic_learner(critic: Model, settings: TrainingSettings) -> Learner:
    """Return a critic that is trained, by the settings of the policy beside it."""
    return Learner(
        "critic_training", critic, critic_objective, critic_head_loss, settings.of_critic
    )


@functools.partial(jax.jit, static_argnames=("names", "layout"))
def no_gradient(model: Model, names: tuple[str, ...], layout: Layout) -> Gradient:
    """Return the sum of no gradients, to which `accumulate` adds, with metrics of these names.

    A sum that begins with it needs one program, and not another for the first micro-batch.
    """
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), model)
    least = {name: -jnp.inf if is_maximum(name) else 0.0 for name in names}
    metrics = {name: jnp.full((), value, jnp.float32) for name, value in least.items()}
    return pin_weights(Gradient(weights, metrics), layout)


@functools.partial(jax.jit, static_argnames=("objective", "settings"), donate_argnums=0)
def accumulate(
    total: Gradient | None,
    model: Model,
    batch: MicroBatch,
    *,
    objective: LossFunction,
    settings: TrainingSettings,
) -> Gradient:
    """Return `total` plus the gradient of one micro-batch, both float32, and the metrics so far.

    `total` is overwritten; it may be None before the first micro-batch. The gradient is taken in
    the compute dtype, so that what exists beside the sum is no larger than that.
    """
    weights, metrics = jax.grad(objective, has_aux=True)(
        cast(model, settings.layout.dtype), batch, settings
    )
    return add_gradient(total, weights, metrics, settings)


def add_gradient(
    total: Gradient | None, weights: Model, metrics: Metrics, settings: TrainingSettings
) -> Gradient:
    """Return `total`, or nothing yet, plus one micro-batch's gradient, inside a jitted function."""
    # Pinned, or XLA keeps the whole sum on every device.
    weights = pin_weights(cast(weights, jnp.float32), settings.layout)
    if total is None:
        return Gradient(weights, metrics)
    merged = {
        name: (jnp.maximum if is_maximum(name) else jnp.add)(total.metrics[name], value)
        for name, value in metrics.items()
    }
    return Gradient(jax.tree.map(jnp.add, total.weights, weights), merged)
