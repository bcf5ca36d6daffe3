"""A student: a draft model of a few of the policy's layers, trained to draw what the policy draws.

Its own are the layers and the final norm. Embedding and head are those of the policy that
generates, and cost no memory. It learns by forward KL on the policy's own text (Hinton et al. 2015;
for drafting: Zhou et al. 2024, DistillSpec), so it may be made before a run, and kept current
within one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast as typed

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rlhf_jax.generation.speculative.sampling import Sampling, draw
from rlhf_jax.inference.packing import pack
from rlhf_jax.mesh import ONE_DEVICE, Layout, model_shardings, pin_weights, place_rows
from rlhf_jax.model.columns import map_tokens
from rlhf_jax.model.decoding import completed
from rlhf_jax.model.packed import read_packed
from rlhf_jax.model.transformer import cast, logits, stack
from rlhf_jax.placement.transfer import is_in_place, transfer
from rlhf_jax.runtime import to_host
from rlhf_jax.training.batching import minibatches
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.training.optimizer import apply, examine
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array, Model, ModelConfig, PackedBatch, Rollout, TrainState

__all__ = [
    "DistillBatch",
    "Distillation",
    "accumulate",
    "distill",
    "forward_kl",
    "read_by_policy",
    "share_drawn_alike",
    "student_config",
    "student_of",
    "with_hidden_states",
    "with_student",
]


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Say how a student is trained after each step."""

    optimizer: optax.GradientTransformation
    settings: TrainingSettings  # epochs, minibatches, rows, temperature, dtype
    samples: int  # of a step that the student learns from


@struct.dataclass
class DistillBatch:
    """Hold what one gradient is taken of: packed samples, and the policy's hidden states.

    What is [S, W] speaks of the tokens that are predicted, which the policy drew.
    """

    packed: PackedBatch
    key: Array  # [S, W, 2] uint32: (seed, sample id) of their noise
    positions: Array  # [S, W] int32, of the tokens in their samples
    total: Array  # [] float32, the minibatch's tokens, which the loss is a mean over
    hidden: Array | None = None  # [S, W, M], of the policy's last layer; None until it has read


def student_config(policy: ModelConfig, layers: int) -> ModelConfig:
    """Return the shape of a student of so many layers."""
    return dataclasses.replace(policy, num_layers=layers)


def student_of(model: Model, layers: int) -> Model:
    """Return a student: copies of `layers` of the model's layers, and of its final norm.

    The layers are evenly chosen, first and last included. There is no embedding and no head.
    ValueError where the model has fewer layers.
    """
    depth = model.config.num_layers
    if not 1 <= layers <= depth:
        raise ValueError(
            f"A student of {layers} layers cannot be made of {depth}; choose 1 to {depth}."
        )
    chosen = np.linspace(0, depth - 1, layers).round().astype(np.int32)
    own = jax.tree.map(lambda leaf: leaf[chosen], stack(model).layers)
    config = student_config(model.config, layers)
    return Model(
        embed=typed(Array, None), layers=own, norm=jnp.copy(model.norm), head=None, config=config
    )


def with_student(
    state: TrainState,
    source: Model,
    layers: int,
    optimizer: optax.GradientTransformation | None,
    layout: Layout = ONE_DEVICE,
) -> TrainState:
    """Return the state with a student of `source`, in float32, stacked.

    It lies as the layout says. source: the policy, or a student made before. A
    student without an optimizer stays as it is.
    """

    def make(source: Model) -> tuple[Model, optax.OptState | None, jax.Array]:
        student = cast(student_of(source, layers), jnp.float32)
        return student, optimizer and optimizer.init(student), jnp.zeros((), jnp.int32)  # pyright: ignore[reportArgumentType]

    shardings = None
    if layout.mesh is not None:
        shardings = model_shardings(jax.eval_shape(make, source), layout)
    student, moments, version = jax.jit(make, out_shardings=shardings)(source)
    return dataclasses.replace(
        state, drafter=student, drafter_optimizer=moments, drafter_version=version
    )


def distill(
    state: TrainState,
    rollout: Rollout,
    distillation: Distillation,
    observe: Callable[[], None] = lambda: None,
    frozen: Model | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Train the student by the policy as it is now, on `samples` rows of a rollout of host arrays.

    The policy reads each row once; the student then learns `epochs` times from `minibatches` of
    them. The student's leaves of the given state are used up; the version counts calls. `observe`
    is called before each optimizer step.

    `drafter/loss`, in nats a token, and `drafter/acceptance` are of the first epoch, before each
    minibatch is learned from. The latter is the share of the tokens that the student draws too with
    the same noise: of drafts that replayable acceptance would take after a known text.
    `drafter/acceptance_frozen` is the share of `frozen`, a student that never learns, on the same
    rows. Where one is not finite the step was not taken: `drafter/not_finite` is all there is.
    """
    settings = distillation.settings
    step = int(state.step)
    policy = state.policy
    if not is_in_place(policy, settings.layout):  # a pipeline's: no device has all layers
        policy = transfer(policy, settings.layout, settings.layout.dtype)
    shuffled = next(minibatches(len(rollout.length), 1, 1, seed=settings.seed, step=step))
    parts = shuffled[: distillation.samples].reshape(settings.minibatches, -1)
    batches = [
        read_by_policy(policy, rollout, rows, settings=settings)
        for rows in parts
        if rollout.mask[rows].any()
    ]
    del policy
    if not batches:
        names = ("drafter/loss", "drafter/acceptance", "drafter/gradient_norm")
        return state, dict.fromkeys(names, 0.0)

    of_frozen = {}
    if frozen is not None:
        ends = dataclasses.replace(state.policy, layers=())
        shares = [
            [share_drawn_alike(frozen, ends, batch, settings=settings) for batch in minibatch]
            for minibatch in batches
        ]
        of_minibatch = [np.sum(part) for part in to_host.fetch(shares)]
        of_frozen["drafter/acceptance_frozen"] = float(np.mean(of_minibatch))

    history = []
    for epoch in range(settings.epochs):
        random = np.random.default_rng([settings.seed, step, epoch])
        for index in random.permutation(len(batches)):
            observe()
            state, metrics = _learn(state, batches[index], distillation)
            history.append(metrics)

    first = to_host.fetch(history)[: len(batches)]
    metrics = {name: float(np.mean([one[name] for one in first])) for name in first[0]} | of_frozen
    if not all(map(math.isfinite, metrics.values())):
        return state, {"drafter/not_finite": 1.0}
    version = typed(Array, state.drafter_version) + 1
    return dataclasses.replace(state, drafter_version=version), metrics


def read_by_policy(
    policy: Model, rollout: Rollout, rows: np.ndarray, *, settings: TrainingSettings
) -> list[DistillBatch]:
    """Return the micro-batches of a minibatch, placed, with the policy's hidden states."""
    chosen = jax.tree.map(lambda leaf: leaf[rows], rollout)
    mask = chosen.mask
    packed = pack(
        chosen, mask, settings.microbatch_rows, settings.length_bucket, settings.layout.row_shards
    )
    ids = np.broadcast_to(chosen.sample_id[:, None].astype(np.uint32), mask.shape)
    key = np.stack([np.full_like(ids, settings.seed), ids], axis=-1)
    positions = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int32), mask.shape)
    total = np.array(mask.sum(), np.float32)
    found = []
    for part in packed:
        key_of, position_of = (typed(Array, part.take(array)) for array in (key, positions))
        host = DistillBatch(part.batch, key_of, position_of, total)
        batch = place_rows(host, settings.layout)
        found.append(with_hidden_states(policy, batch, settings))
    return found


@functools.partial(jax.jit, static_argnames="settings")
def with_hidden_states(
    policy: Model, batch: DistillBatch, settings: TrainingSettings
) -> DistillBatch:
    """Return the batch with the policy's hidden states of its rows."""
    hidden = _read(cast(policy, settings.layout.dtype), batch, settings)
    return dataclasses.replace(batch, hidden=hidden)


def _read(model: Model, batch: DistillBatch, settings: TrainingSettings) -> jax.Array:
    """Compute the hidden states [S, W, M] before the predicted tokens."""
    return read_packed(model, batch.packed, settings.layout, settings.remat)


def _learn(
    state: TrainState, batches: list[DistillBatch], distillation: Distillation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take one optimizer step of the student, on one minibatch."""
    student = typed(Model, state.drafter)
    ends = dataclasses.replace(state.policy, layers=())
    gradient = None
    for batch in batches:
        gradient = accumulate(gradient, student, ends, batch, settings=distillation.settings)
    assert gradient is not None
    (norm,), finite = examine((gradient,))
    student, moments = apply(
        student, state.drafter_optimizer, gradient, finite, optimizer=distillation.optimizer
    )
    state = dataclasses.replace(state, drafter=student, drafter_optimizer=moments)
    return state, gradient.metrics | {"drafter/gradient_norm": norm}


@functools.partial(jax.jit, static_argnames="settings", donate_argnums=0)
def accumulate(
    total: Gradient | None,
    student: Model,
    policy: Model,
    batch: DistillBatch,
    *,
    settings: TrainingSettings,
) -> Gradient:
    """Return `total` plus one batch's gradient of the student's own weights, and its metrics.

    `total` is overwritten. Of the policy, embedding and head are read and not learned. The loss is
    differentiated by the student's hidden states a block of columns at a time, while its logits are
    there: they are made once and [S, W, V] never exists.
    """
    chex.assert_rank([batch.key, batch.positions, batch.hidden], [3, 2, 3])
    ends = cast(policy, settings.layout.dtype)
    own = cast(student, settings.layout.dtype)
    hidden, pull = jax.vjp(lambda model: _read(completed(model, ends), batch, settings), own)

    def measure(head: Model, student: Array, policy: Array, *drawn: Array):
        """Return slopes [C, M], losses [C] and whether the student draws alike [C]."""

        def loss(states: Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            scores = logits(head, states) / settings.temperature
            losses = forward_kl(logits(head, policy) / settings.temperature, scores)
            losses = jnp.where(drawn[-1], losses, 0.0)
            return losses.sum(), (losses, scores)

        (_, (losses, scores)), slope = jax.value_and_grad(loss, has_aux=True)(student)
        return slope, losses, _drawn_alike(scores, *drawn)

    arrays = (hidden, batch.hidden, *_drawn(batch))
    slopes, losses, alike = map_tokens(measure, ends, arrays, settings.chunk, settings.layout)
    (weights,) = pull(slopes / batch.total.astype(slopes.dtype))
    metrics = {
        "drafter/loss": losses.sum() / batch.total,
        "drafter/acceptance": alike.sum() / batch.total,
    }
    new = Gradient(pin_weights(cast(weights, jnp.float32), settings.layout), metrics)
    return new if total is None else jax.tree.map(jnp.add, total, new)


@functools.partial(jax.jit, static_argnames="settings")
def share_drawn_alike(
    student: Model, policy: Model, batch: DistillBatch, *, settings: TrainingSettings
) -> jax.Array:
    """Compute the share of a minibatch's tokens that lie in this batch and are drawn alike.

    [] float32. The student draws each with the policy's noise, after the known text. Of the policy,
    embedding and head are read.
    """
    chex.assert_rank([batch.key, batch.positions], [3, 2])
    ends = cast(policy, settings.layout.dtype)
    hidden = _read(completed(cast(student, settings.layout.dtype), ends), batch, settings)

    def measure(head: Model, states: Array, *drawn: Array) -> jax.Array:
        scores = logits(head, states) / settings.temperature
        return _drawn_alike(scores, *drawn)

    arrays = (hidden, *_drawn(batch))
    alike = map_tokens(measure, ends, arrays, settings.chunk, settings.layout)
    return alike.sum() / batch.total


def _drawn(batch: DistillBatch) -> tuple[Array, Array, Array, Array]:
    """Return what `_drawn_alike` reads of the predicted tokens: [S, W, 2] and three of [S, W]."""
    return batch.key, batch.positions, batch.packed.targets, batch.packed.mask


def _drawn_alike(
    scores: jax.Array, key: Array, positions: Array, tokens: Array, mask: Array
) -> jax.Array:
    """Return 1 for each token [C] under the mask that the student draws too: [C] float32.

    It draws from its tempered logits `scores` [C, V] with the tokens' own noise.
    """
    alike = draw(scores, key, positions, Sampling()).token == tokens
    return (alike & mask).astype(jnp.float32)


def forward_kl(teacher: Array, student: Array) -> jax.Array:
    """Compute sum p (log p - log q), with p and q the softmax of teacher and student logits.

    [..., V] float32 -> [...] float32, in nats. The gradient goes to the student alone (Hinton et
    al. 2015).
    """
    chex.assert_equal_shape([teacher, student])
    log_p = jax.lax.stop_gradient(jax.nn.log_softmax(teacher))
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(student)), axis=-1)
