"""Gradients of trained models: of one micro-batch, and summed over those of a minibatch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rlhf_jax.generation.decoding import completed
from rlhf_jax.mesh import Layout, place_rows
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.shardings import pin_weights
from rlhf_jax.models.transformer import cast
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.runtime.compilation import Execute, run_now
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.kinds import Loss, Metrics, is_maximum
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model


@dataclasses.dataclass(frozen=True)
class Learner:
    """Hold how the model of a role is trained: loss, optimizer, layout, and first update."""

    role: str
    loss: Loss
    optimizer: optax.GradientTransformation
    settings: TrainingSettings  # its own: the layout is the model's
    first_update: int = 0  # earlier updates leave the model unchanged
    # the optimizer's, for its metric; None: there is none
    learning_rate: optax.ScalarOrSchedule | None = None

    @property
    def call(self) -> str:
        """Return the call of a plan that trains it."""
        return f"{self.role}_training"

    @property
    def norm_metric(self) -> str:
        """Return the name of the metric of its gradient's norm."""
        return "gradient/norm" if self.role == "policy" else f"{self.role}/gradient_norm"


@struct.dataclass
class Gradient:
    """Hold the gradient of a minibatch, summed over the micro-batches so far, and its metrics."""

    weights: Model  # float32
    metrics: Metrics


@functools.partial(jax.jit, static_argnames=("names", "layout"))
def no_gradient(model: Model, names: tuple[str, ...], layout: Layout) -> Gradient:
    """Return a zero sum of gradients for `accumulate`, with metrics of these names.

    Beginning with it needs one program, without another for the first micro-batch.
    """
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), model)
    least = {name: -jnp.inf if is_maximum(name) else 0.0 for name in names}
    metrics = {name: jnp.full((), value, jnp.float32) for name, value in least.items()}
    return pin_weights(Gradient(weights, metrics), layout)


@functools.partial(jax.jit, static_argnames=("loss", "settings"), donate_argnums=0)
def accumulate(
    total: Gradient | None,
    model: Model,
    batch: PackedSequences,
    ends: Model | None = None,
    *,
    loss: Loss,
    settings: TrainingSettings,
) -> Gradient:
    """Return `total` plus the gradient of one micro-batch, both float32, and the metrics so far.

    `total` is overwritten; it may be None before the first micro-batch. The gradient is taken in
    the compute dtype, which bounds the memory besides the sum. ends: the model whose embedding and
    head a student reads; they are not learned.
    """
    borrowed = None if ends is None else cast(ends, settings.layout.dtype)

    def share(model: Model) -> tuple[jax.Array, Metrics]:
        whole = model if borrowed is None else completed(model, borrowed)
        hidden = read_packed(whole, batch, settings.layout, settings.remat)
        return loss(whole, hidden, batch, settings)

    weights, metrics = jax.grad(share, has_aux=True)(cast(model, settings.layout.dtype))
    return add_gradient(total, weights, metrics, settings)


@functools.partial(jax.jit, static_argnames=("loss", "settings"))
def measure_loss(
    model: Model, batch: PackedSequences, *, loss: Loss, settings: TrainingSettings
) -> Metrics:
    """Return the metrics of one micro-batch, without a gradient."""
    model = cast(model, settings.layout.dtype)
    return loss(model, read_packed(model, batch, settings.layout), batch, settings)[1]


def add_gradient(
    total: Gradient | None, weights: Model, metrics: Metrics, settings: TrainingSettings
) -> Gradient:
    """Return `total`, if any, plus one micro-batch's gradient, inside a jitted function."""
    # Constrained, or XLA keeps the whole sum on every device.
    weights = pin_weights(cast(weights, jnp.float32), settings.layout)
    if total is None:
        return Gradient(weights, metrics)
    merged = {
        name: (jnp.maximum if is_maximum(name) else jnp.add)(total.metrics[name], value)
        for name, value in metrics.items()
    }
    return Gradient(jax.tree.map(jnp.add, total.weights, weights), merged)


def sum_gradients(
    learner: Learner,
    model: Model,
    batches: Sequence[PackedSequences],
    ends: Model | None = None,
    progress: PhaseParts | None = None,
    execute: Execute = run_now,
) -> Gradient:
    """Return the gradient of a minibatch, of at least one micro-batch, of the host or placed.

    Each micro-batch is placed when the previous one is summed, and recorded in `progress` as one of
    the learner's call.
    """
    total = None
    settings = learner.settings
    how = {"loss": learner.loss, "settings": settings}
    for batch in batches:
        began = time.perf_counter()
        on_host = isinstance(batch.tokens, np.ndarray)
        placed = place_rows(batch, settings.layout) if on_host else batch
        if total is None:
            first = accumulate.eval_shape(None, model, placed, ends, **how)
            names = tuple(first.metrics)
            total = execute(no_gradient, model, names=names, layout=settings.layout)
        total = execute(accumulate, total, model, placed, ends, **how)
        if progress is not None:  # a copy, for the next call donates the sum itself
            metric = jnp.copy(next(iter(total.metrics.values())))
            progress.hand(learner.call, began, metric, batch)
    assert total is not None
    return total
