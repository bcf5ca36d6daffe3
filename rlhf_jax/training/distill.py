"""A student: a draft model made of a few of the policy's layers, taught to draw what the policy
draws.

Its own are the layers and the final norm; embedding and head are those of the policy that
generates, and cost no memory. It learns by forward KL on the policy's own text (Hinton et al. 2015;
for drafting: Zhou et al. 2024, DistillSpec), so it may be made before a run, and kept current
within one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from typing import cast as typed

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rlhf_jax.generation.speculative.sampling import Sampling, draw
from rlhf_jax.mesh import model_shardings
from rlhf_jax.model.columns import join_columns, split_columns
from rlhf_jax.model.decoding import completed
from rlhf_jax.model.transformer import cast, forward, logits, stack
from rlhf_jax.training.batching import micro_batches, minibatches
from rlhf_jax.training.update import Gradient, UpdateConfig, apply
from rlhf_jax.types import Array, Model, ModelConfig, Rollout, TrainState

# of no token
NOTHING = {"drafter/loss": 0.0, "drafter/acceptance": 0.0, "drafter/gradient_norm": 0.0}


@dataclasses.dataclass(frozen=True)
class Distillation:
    """How a student is taught after each step."""

    optimizer: optax.GradientTransformation
    config: UpdateConfig  # its epochs, minibatches, rows, temperature and dtype
    samples: int  # of a step that it learns from


@struct.dataclass
class DistillBatch:
    """What one gradient is taken of: R rows of a minibatch, and what the policy made of them."""

    tokens: Array  # [R, T] int32
    mask: Array  # [R, T] bool, the tokens that the policy drew
    key: Array  # [R, 2] uint32: (seed, sample id) of their noise
    total: Array  # [] float32, the minibatch's tokens, which the loss is a mean over
    hidden: Array | None = None  # [R, T, M], the policy's last hidden states


def student_config(policy: ModelConfig, layers: int) -> ModelConfig:
    """The shape of a student of so many layers."""
    return dataclasses.replace(policy, num_layers=layers)


def student_of(model: Model, layers: int) -> Model:
    """Copies of `layers` of the model's layers, evenly chosen, first and last included, and of its
    norm; no embedding and no head.
    """
    depth = model.config.num_layers
    if not 1 <= layers <= depth:
        raise ValueError(
            f"A student of {layers} layers cannot be made of {depth}; choose 1 to {depth}."
        )
    chosen = np.linspace(0, depth - 1, layers).round().astype(np.int32)
    own = jax.tree.map(lambda leaf: leaf[chosen], stack(model).layers)
    config = student_config(model.config, layers)
    return Model(embed=None, layers=own, norm=jnp.copy(model.norm), head=None, config=config)


def with_student(
    state: TrainState,
    source: Model,
    layers: int,
    optimizer: optax.GradientTransformation | None,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """The state with a student of `source` (the policy, or a student made before), in float32,
    stacked, split as training wants it; one without an optimizer stays as it is.
    """

    def make(source: Model) -> tuple[Model, Any, Array]:
        student = cast(student_of(source, layers), jnp.float32)
        return student, optimizer and optimizer.init(student), jnp.zeros((), jnp.int32)  # pyright: ignore[reportArgumentType]

    shardings = (
        None if mesh is None else model_shardings(jax.eval_shape(make, source), mesh, "training")
    )
    student, moments, version = jax.jit(make, out_shardings=shardings)(source)
    return dataclasses.replace(
        state, drafter=student, drafter_optimizer=moments, drafter_version=version
    )


def distill(
    state: TrainState,
    rollout: Rollout,
    distillation: Distillation,
    place: Callable[[DistillBatch], DistillBatch] = jax.device_put,
    observe: Callable[[], None] = lambda: None,
    begun: Model | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Teach the student, by the policy as it is now, on `samples` rows of a rollout of host arrays.

    The policy reads each row once; the student then learns `epochs` times from `minibatches` of
    them. The student's leaves of the given state are used up; the version counts calls.
    `drafter/loss`, in nats a token, and `drafter/acceptance`, the share of the tokens that the
    student draws too with the same noise (rank 0 of replayable acceptance after a known text), are
    of the first epoch, before each minibatch is learned from. `drafter/acceptance_frozen` is that
    of `begun`, a student that never learns, on the same rows. Where one is not finite the step was
    not taken: `drafter/not_finite` is all there is.
    """
    config = distillation.config
    order = next(minibatches(len(rollout.length), 1, 1, config.seed, int(state.step)))[
        : distillation.samples
    ]
    parts = [rows for rows in order.reshape(config.minibatches, -1) if rollout.mask[rows].any()]
    lessons = [
        [_heard(state.policy, place(lesson), config) for lesson in _lessons(rollout, p, config)]
        for p in parts
    ]
    if not lessons:
        return state, dict(NOTHING)
    beside = (
        {}
        if begun is None
        else {"drafter/acceptance_frozen": _acceptance(begun, state.policy, lessons, config)}
    )
    history = []
    for epoch in range(config.epochs):
        for index in np.random.default_rng([config.seed, int(state.step), epoch]).permutation(
            len(lessons)
        ):
            observe()
            state, metrics = _learn(state, lessons[index], distillation)
            history.append(metrics)
    first = jax.device_get(history)[: len(lessons)]
    metrics = {
        name: float(np.mean([figures[name] for figures in first])) for name in first[0]
    } | beside
    if not all(map(math.isfinite, metrics.values())):
        return state, {"drafter/not_finite": 1.0}
    return dataclasses.replace(
        state, drafter_version=typed(Array, state.drafter_version) + 1
    ), metrics


def _lessons(rollout: Rollout, rows: np.ndarray, config: UpdateConfig) -> Iterator[DistillBatch]:
    """The micro-batches of a minibatch, on the host."""
    total = np.float32(rollout.mask[rows].sum())
    for part, slots in micro_batches(rows, rollout.length, config.microbatch_rows, config.bucket):
        ids = rollout.sample_id[part].astype(np.uint32)
        key = np.stack([np.full_like(ids, config.seed), ids], axis=1)
        yield DistillBatch(rollout.tokens[part, :slots], rollout.mask[part, :slots], key, total)


def _acceptance(
    student: Model, policy: Model, lessons: list[list[DistillBatch]], config: UpdateConfig
) -> float:
    """The share of tokens that a student draws too, the mean over minibatches."""
    ends = dataclasses.replace(policy, layers=())
    shares = [
        [drawn_alike(student, ends, lesson, config=config) for lesson in part] for part in lessons
    ]
    return float(np.mean([np.sum(part) for part in jax.device_get(shares)]))


@functools.partial(jax.jit, static_argnames="config")
def drawn_alike(
    student: Model, policy: Model, lesson: DistillBatch, *, config: UpdateConfig
) -> Array:
    """[] float32: the share of the minibatch's tokens that lie in this lesson and that the student
    draws too with the same noise, each after the known text. Of the policy, embedding and head are
    read.
    """
    chex.assert_rank([lesson.tokens, lesson.mask, lesson.key], [2, 2, 2])
    ends = cast(policy, config.dtype)
    hidden = _read(completed(cast(student, config.dtype), ends), lesson.tokens, config)

    def measure(states, *following):
        return _count_alike(logits(ends, states) / config.temperature, lesson.key, *following)

    def count(block):
        return jax.lax.cond(
            block[2].any(), lambda: measure(*block), lambda: jnp.zeros((), jnp.float32)
        )

    return jax.lax.map(count, _blocks(lesson, config, hidden)).sum() / lesson.total


def _learn(
    state: TrainState, lessons: list[DistillBatch], distillation: Distillation
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step of the student, on one minibatch."""
    student = typed(Model, state.drafter)
    ends = dataclasses.replace(state.policy, layers=())
    gradient = None
    for lesson in lessons:
        gradient = accumulate(gradient, student, ends, lesson, config=distillation.config)
    assert gradient is not None
    student, moments, norm = apply(
        student, state.drafter_optimizer, gradient, optimizer=distillation.optimizer
    )
    state = dataclasses.replace(state, drafter=student, drafter_optimizer=moments)
    return state, gradient.metrics | {"drafter/gradient_norm": norm}


@functools.partial(jax.jit, static_argnames="config")
def _heard(policy: Model, lesson: DistillBatch, config: UpdateConfig) -> DistillBatch:
    """The lesson with the policy's hidden states."""
    return dataclasses.replace(
        lesson, hidden=_read(cast(policy, config.dtype), lesson.tokens, config)
    )


def _read(model: Model, tokens: Array, config: UpdateConfig) -> Array:
    """Hidden states [R, T, M] of whole rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(model, tokens, positions, attend=config.attend, remat=config.remat)[0]


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def accumulate(
    total: Gradient | None,
    student: Model,
    policy: Model,
    lesson: DistillBatch,
    *,
    config: UpdateConfig,
) -> Gradient:
    """`total`, which is overwritten, plus one lesson's gradient of the student's own weights, and
    its metrics.

    Of the policy, embedding and head are read and not learned. The loss is differentiated by the
    student's hidden states a block of columns at a time, while its logits are there: they are made
    once and [R, T, V] never exists.
    """
    chex.assert_rank([lesson.tokens, lesson.mask, lesson.key, lesson.hidden], [2, 2, 2, 3])
    ends = cast(policy, config.dtype)
    own = cast(student, config.dtype)
    hidden, pull = jax.vjp(lambda model: _read(completed(model, ends), lesson.tokens, config), own)
    slopes, losses, drawn = _slopes(ends, hidden, lesson, config)
    (weights,) = pull(slopes)
    metrics = {"drafter/loss": losses, "drafter/acceptance": drawn}
    new = Gradient(cast(weights, jnp.float32), metrics)
    return new if total is None else jax.tree.map(jnp.add, total, new)


def _slopes(
    head: Model, hidden: Array, lesson: DistillBatch, config: UpdateConfig
) -> tuple[Array, Array, Array]:
    """The loss's derivative [R, T, M] by the student's hidden states, the loss, and the share drawn
    alike.
    """
    measure = functools.partial(_block_slopes, head, lesson.key, config.temperature)
    slopes, losses, drawn = jax.lax.map(
        lambda block: measure(*block), _blocks(lesson, config, hidden, lesson.hidden)
    )
    slopes = join_columns(slopes, lesson.tokens.shape[1])
    return (
        slopes / lesson.total.astype(slopes.dtype),
        losses.sum() / lesson.total,
        drawn.sum() / lesson.total,
    )


def _blocks(lesson: DistillBatch, config: UpdateConfig, *hidden: Array | None) -> tuple[Array, ...]:
    """Hidden states [R, T, M], and the tokens, mask and positions that they predict, in blocks of
    columns.
    """
    after = jnp.arange(1, lesson.tokens.shape[1] + 1, dtype=jnp.int32)
    positions = jnp.broadcast_to(after, lesson.tokens.shape)
    # what hidden[t] predicts
    following = [jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (lesson.tokens, lesson.mask)]
    return split_columns((*hidden, *following, positions), config.chunk)


def _block_slopes(
    head: Model, key: Array, temperature: float, student, policy, tokens, mask, positions
):
    """d loss / d student of hidden states [R, C, M], the summed loss, and how many tokens are drawn
    alike.
    """

    def loss(hidden):
        scores = logits(head, hidden) / temperature
        losses = forward_kl(logits(head, policy) / temperature, scores)
        return jnp.sum(jnp.where(mask, losses, 0.0)), scores

    def measure():
        (total, scores), slope = jax.value_and_grad(loss, has_aux=True)(student)
        return slope, total, _count_alike(scores, key, tokens, mask, positions)

    nothing = jnp.zeros((), jnp.float32)
    return jax.lax.cond(mask.any(), measure, lambda: (jnp.zeros_like(student), nothing, nothing))


def _count_alike(scores: Array, key: Array, tokens: Array, mask: Array, positions: Array) -> Array:
    """How many of the tokens [R, C] under the mask are drawn from tempered logits [R, C, V] with
    their own noise.
    """
    alike = draw(scores, key[:, None], positions, Sampling()).token == tokens
    return jnp.sum(alike & mask, dtype=jnp.float32)


def forward_kl(teacher: Array, student: Array) -> Array:
    """sum p (log p - log q) with p, q the softmax of teacher and student logits [..., V] float32:
    [...], in nats (Hinton et al. 2015, with the gradient to the student alone).
    """
    chex.assert_equal_shape([teacher, student])
    law = jax.lax.stop_gradient(jax.nn.log_softmax(teacher))
    return jnp.sum(jnp.exp(law) * (law - jax.nn.log_softmax(student)), axis=-1)
