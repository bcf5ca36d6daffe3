"""A student: a draft model of a few of the policy's layers, trained to draw the policy's tokens.

It owns its layers and final norm. Embedding and head are those of the policy that generates, and
cost no memory. It learns by forward KL on the policy's own text (Hinton et al. 2015; for drafting:
Zhou et al. 2024, DistillSpec), so it may be made before a run, and updated during one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import cast as typed

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.decoding import completed
from rlhf_jax.generation.speculative.sampling import draw
from rlhf_jax.mesh import place_rows
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.columns import map_tokens
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.transformer import cast, logits, stack
from rlhf_jax.placement.transfer import is_in_place, transfer
from rlhf_jax.runtime import to_host
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.minibatches import minibatches
from rlhf_jax.sequences.packing import pack
from rlhf_jax.training.gradients import Learner, sum_gradients
from rlhf_jax.training.kinds import Share
from rlhf_jax.training.optimizer import norms_and_finite, take_step
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array, Model, ModelConfig, Models, Trained


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Hold the settings of a student's training after each step."""

    learner: Learner  # its settings have epochs, minibatches, rows, temperature, dtype
    samples: int  # of a step that the student learns from
    frozen: Model | None = None  # the initial student, to compare with
    alone: bool = False  # whether nothing else is trained


class DistillationLoss:
    """Compute the divergence of the policy from a student: a loss of tokens by hidden states.

    It is differentiated by the student's hidden states a block of tokens at a time, while its
    logits exist: they are made once and [S, W, V] never exists.
    """

    reads = ("noise_keys", "positions", "hidden")
    whole_groups = False

    def __call__(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> Share:
        """Compute the share from the student's states [S, W, M]; only the model's head is read."""
        columns = batch.columns
        chex.assert_rank(
            [columns["noise_keys"], columns["positions"], columns["hidden"]], [3, 2, 3]
        )

        def measure(head: Model, student: Array, policy: Array, *drawn: Array):
            """Return slopes [C, M], losses [C] in nats, and whether the student draws alike [C]."""

            def loss(states: Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
                scores = logits(head, states) / settings.temperature
                losses = forward_kl(logits(head, policy) / settings.temperature, scores)
                losses = jnp.where(drawn[-1], losses, 0.0)
                return losses.sum(), (losses, scores)

            (_, (losses, scores)), slope = jax.value_and_grad(loss, has_aux=True)(student)
            return slope, losses, _drawn_alike(scores, *drawn)

        ends = jax.lax.stop_gradient(dataclasses.replace(model, layers=()))
        states = jax.lax.stop_gradient(hidden)
        arrays = (states, columns["hidden"], *_drawn(batch))
        slopes, losses, alike = map_tokens(
            measure, ends, arrays, settings.chunk, settings.layout, wanted=batch.mask
        )
        total = columns["total_tokens"]
        # Linear in the states, with the loss's slopes: so that is its gradient.
        share = jnp.sum(slopes / total.astype(slopes.dtype) * hidden)
        metrics = {"drafter/loss": losses.sum() / total, "drafter/acceptance": alike.sum() / total}
        return share, metrics


DISTILLATION = DistillationLoss()


def student_config(policy: ModelConfig, layers: int) -> ModelConfig:
    """Return the shape of a student with `layers` layers."""
    return dataclasses.replace(policy, num_layers=layers)


def student_of(model: Model, layers: int) -> Model:
    """Return a student: copies of `layers` of the model's layers, and of its final norm.

    The layers are evenly chosen, the first and, of several, the last included; dtypes stay. There
    is no embedding and no head. ValueError if the model has fewer layers.
    """
    depth = model.config.num_layers
    if not 1 <= layers <= depth:
        raise ValueError(
            f"A student of {layers} layers cannot be made of {depth}; choose 1 to {depth}."
        )
    chosen = np.linspace(0, depth - 1, layers).round().astype(np.int32)
    return Model(
        embed=typed(Array, None),  # the policy's, which `completed` adds
        layers=jax.tree.map(lambda leaf: leaf[chosen], stack(model).layers),
        norm=jnp.copy(model.norm),  # a training step donates the student's
        head=None,
        config=student_config(model.config, layers),
    )


def distill(
    student: Trained,
    policy: Model,
    batch: Sequences,
    distillation: Distillation,
    step: int,
    observe: Callable[[], None] = lambda: None,
) -> tuple[Trained, dict[str, float]]:
    """Train a student by the current policy, on `samples` of the sequences of host arrays.

    The policy reads each once; the student then learns `epochs` times from `minibatches` of them,
    in an order by the seed and `step`. The student is donated; its version counts calls. `observe`
    is called before each optimizer step.

    `drafter/loss`, in nats per token, and `drafter/acceptance` are of the first epoch, before each
    minibatch is learned from. The latter is the share of the tokens that the student draws too with
    the same noise: of drafts that replayable acceptance would take after a known text.
    `drafter/acceptance_frozen` is the share of the initial student, on the same rows. If one is not
    finite the step was not taken, and `drafter/not_finite` is the only metric.
    """
    learner = distillation.learner
    settings = learner.settings
    ends = dataclasses.replace(policy, layers=())
    reader = policy
    if not is_in_place(policy, settings.layout):  # a pipeline's: no device has all layers
        reader = transfer(policy, settings.layout, settings.layout.dtype)
    shuffled = next(minibatches(len(batch.tokens), 1, 1, seed=settings.seed, step=step))
    parts = shuffled[: distillation.samples].reshape(settings.minibatches, -1)
    batches = [
        read_by_policy(reader, batch.take(rows), settings=settings)
        for rows in parts
        if batch.mask[rows].any()
    ]
    del reader
    if not batches:
        names = ("drafter/loss", "drafter/acceptance", learner.norm_metric)
        return student, dict.fromkeys(names, 0.0)

    of_frozen = {}
    if (frozen := distillation.frozen) is not None:
        shares = [
            [share_drawn_alike(frozen, ends, part, settings=settings) for part in minibatch]
            for minibatch in batches
        ]
        of_minibatch = [np.sum(part) for part in to_host.fetch(shares)]
        of_frozen["drafter/acceptance_frozen"] = float(np.mean(of_minibatch))

    history = []
    for epoch in range(settings.epochs):
        random = np.random.default_rng([settings.seed, step, epoch])
        for index in random.permutation(len(batches)):
            observe()
            gradient = sum_gradients(learner, student.weights, batches[index], ends)
            (norm,), (finite,) = norms_and_finite([gradient])
            history.append(gradient.metrics | {learner.norm_metric: norm})
            student = take_step(learner, student, gradient, finite)

    first = to_host.fetch(history)[: len(batches)]
    metrics = {name: float(np.mean([row[name] for row in first])) for name in first[0]} | of_frozen
    if not all(map(math.isfinite, metrics.values())):
        return student, {"drafter/not_finite": 1.0}
    return student.counted(), metrics


def keep_current(
    models: Models,
    batch: Sequences,
    distillation: Distillation,
    step: int,
    observe: Callable[[], None],
) -> tuple[Models, dict[str, float]]:
    """Train the student by the current policy, after `step` of its updates.

    ValueError if one that is trained alone has a loss that is not finite.
    """
    start = time.perf_counter()
    observe()
    policy = models["policy"].weights
    student, metrics = distill(models["drafter"], policy, batch, distillation, step, observe)
    metrics["drafter/seconds"] = time.perf_counter() - start
    if distillation.alone:
        if "drafter/not_finite" in metrics:
            raise ValueError("The student's loss is not finite; lower drafter.learning_rate.")
        metrics["training/seconds"] = metrics["drafter/seconds"]
    return {**models, "drafter": student}, metrics


def drafter_age(models: Models, step: int, distilled_at: int) -> dict[str, float]:
    """Count a student's updates, the policy's at the drafter's last training, and those since."""
    version = int(to_host.fetch(models["drafter"].version)) if "drafter" in models else 0
    return {
        "drafter/version": version,
        "drafter/policy_step": distilled_at,
        "drafter/behind": step - distilled_at,
    }


def read_by_policy(
    policy: Model, batch: Sequences, *, settings: TrainingSettings
) -> list[PackedSequences]:
    """Return the micro-batches of a minibatch, placed, with the policy's hidden states."""
    mask = batch.mask
    ids = np.broadcast_to(batch.columns["sample_ids"][:, None], mask.shape)
    positions = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int32), mask.shape)
    known = batch.reading().with_columns(
        noise_keys=np.stack([np.full_like(ids, settings.seed), ids], axis=-1),
        positions=positions,
        total_tokens=np.array(mask.sum(), np.float32),
    )
    layout = settings.layout
    packed = pack(known, settings.extent, packed_block(layout), layout.row_shards)
    return [with_hidden_states(policy, place_rows(part.batch, layout), settings) for part in packed]


@functools.partial(jax.jit, static_argnames="settings")
def with_hidden_states(
    policy: Model, batch: PackedSequences, settings: TrainingSettings
) -> PackedSequences:
    """Return the sequences with the policy's hidden states before the predicted tokens."""
    read = cast(policy, settings.layout.dtype)
    return batch.with_columns(hidden=read_packed(read, batch, settings.layout, settings.remat))


@functools.partial(jax.jit, static_argnames="settings")
def share_drawn_alike(
    student: Model, policy: Model, batch: PackedSequences, *, settings: TrainingSettings
) -> jax.Array:
    """Compute the share of a minibatch's tokens that are in this batch and drawn alike.

    [] float32. The student draws each with the policy's noise, after the known text. Of the policy,
    embedding and head are read.
    """
    ends = cast(policy, settings.layout.dtype)
    whole = completed(cast(student, settings.layout.dtype), ends)
    hidden = read_packed(whole, batch, settings.layout, settings.remat)

    def measure(head: Model, states: Array, *drawn: Array) -> jax.Array:
        scores = logits(head, states) / settings.temperature
        return _drawn_alike(scores, *drawn)

    arrays = (hidden, *_drawn(batch))
    alike = map_tokens(measure, ends, arrays, settings.chunk, settings.layout, wanted=batch.mask)
    return alike.sum() / batch.columns["total_tokens"]


def _drawn(batch: PackedSequences) -> tuple[Array, Array, Array, Array]:
    """Return the inputs of `_drawn_alike` at predicted tokens: [S, W, 2] and three of [S, W]."""
    columns = batch.columns
    return columns["noise_keys"], columns["positions"], batch.targets, batch.mask


def _drawn_alike(
    scores: jax.Array, key: Array, positions: Array, tokens: Array, mask: Array
) -> jax.Array:
    """Return 1 for each token [C] under the mask that the student draws too: [C] float32.

    It draws from its tempered logits `scores` [C, V] with the tokens' own noise.
    """
    alike = draw(scores, key, positions, 1.0).token == tokens
    return (alike & mask).astype(jnp.float32)


def forward_kl(teacher: Array, student: Array) -> jax.Array:
    """Compute sum p (log p - log q), with p and q the softmax of teacher and student logits.

    [..., V] float32 -> [...] float32, in nats. The gradient goes to the student alone (Hinton et
    al. 2015).
    """
    chex.assert_equal_shape([teacher, student])
    log_p = jax.lax.stop_gradient(jax.nn.log_softmax(teacher))
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(student)), axis=-1)
