"""Cut a model into the stages of a pipeline, and compute each stage forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.mesh import ROW_AXES, Layout, on_slice, pin_rows
from rlhf_jax.models.packed import predicting_states, run_packed
from rlhf_jax.models.shardings import model_shardings, pin_weights
from rlhf_jax.models.transformer import cast, embed_tokens
from rlhf_jax.placement.transfer import move, transfer_ends
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.runtime.shards import send_shards
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.gradients import Gradient, Learner, add_gradient
from rlhf_jax.training.kinds import Loss, Metrics, is_maximum
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model


@dataclasses.dataclass(frozen=True)
class Stage:
    """Define the computation of a stage; static, so equal stages differ only in their devices."""

    settings: TrainingSettings  # the layout is that of the stage's slice
    reads_tokens: bool  # of the first stage: it has the embedding, and gets no hidden states
    loss: Loss | None  # of the last stage, whose result is its share of it

    def needed(self, batch: PackedSequences) -> PackedSequences:
        """Return the parts of a micro-batch that the stage reads; columns only for the last."""
        return batch if self.loss else dataclasses.replace(batch, columns={})

    def without_others(self, model: Model) -> Model:
        """Return a model without other stages' weights outside the layers.

        The first stage has the embedding, and the last one the final norm and the head. A tied head
        is the embedding, which both then have.
        """
        last = self.loss is not None
        tied = model.head is None
        return dataclasses.replace(
            model,
            embed=model.embed if self.reads_tokens or (last and tied) else None,
            norm=model.norm if last else None,
            head=model.head if last else None,
        )


def copies_of(learner: Learner) -> list[Learner]:
    """Return the learner of each copy of a pipeline, which has a part of each micro-batch's rows.

    Those are the parts of `data`.
    """
    return [
        dataclasses.replace(learner, settings=dataclasses.replace(learner.settings, layout=layout))
        for layout in learner.settings.layout.split("data")
    ]


def model_of_copy(model: Model, copy: Learner, learner: Learner) -> Model:
    """Return a learner's model for a copy of its pipeline; they share their buffers."""
    layout = copy.settings.layout
    return model if layout == learner.settings.layout else on_slice(model, layout)


def rows_of_copy(batch: PackedSequences, copy: int, copies: int) -> PackedSequences:
    """Return a copy's rows of a micro-batch of host arrays."""
    return jax.tree.map(lambda leaf: np.split(leaf, copies)[copy] if np.ndim(leaf) else leaf, batch)


def stages_of(learner: Learner) -> list[Stage]:
    """Return the stages of a copy of a pipeline, one for each slice of its layout."""
    layouts = learner.settings.layout.split()
    return [
        Stage(
            dataclasses.replace(learner.settings, layout=layout),
            reads_tokens=index == 0,
            loss=learner.loss if index == len(layouts) - 1 else None,
        )
        for index, layout in enumerate(layouts)
    ]


def split_model(model: Model, stages: list[Stage]) -> list[Model]:
    """Return each stage's part of a copy's float32 model, which is in a pipelined layout.

    A stage's layers are on its slice already, and stay in float32: it casts them when it runs. Of
    embedding, norm and head each slice has a part, and all of them move to the stages that need
    them, in the compute dtype.
    """
    parts = []
    for stage in stages:
        layout = stage.settings.layout
        ends = transfer_ends(stage.without_others(model), layout, layout.dtype)
        parts.append(dataclasses.replace(ends, layers=on_slice(model.layers, layout)))
    return parts


def join_gradients(sums: list[Gradient], layout: Layout, execute: Execute) -> Gradient:
    """Return the gradient of a copy from those of its stages, the inverse of `split_model`.

    sums: by stage, float32. layout: the copy's, in which the result is placed like a model, for the
    optimizer. Layers stay in place, the other weights of a stage are divided among the slices, and
    the metrics, which only the last stage has, are sent to all. execute: see `Execute`; it may
    compile or trace the program that it gets, for shapes instead of arrays.
    """
    slices = layout.split()
    last = sums[-1].weights
    embed = sums[0].weights.embed
    if last.head is None:  # tied: both the first stage and the last one have a gradient of it
        embed = execute(_add, embed, send(last.embed, slices[0]))
    ends = {"embed": embed, "norm": last.norm, "head": last.head}
    joined = dataclasses.replace(last, layers=(), **ends)
    places = model_shardings(joined, layout)
    for name, leaf in ends.items():
        ends[name] = None if leaf is None else move(leaf, getattr(places, name))

    depth = last.config.num_layers
    stacked = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((depth, *leaf.shape[1:]), leaf.dtype), last.layers
    )
    layers = jax.tree.map(
        _join_shards,
        stacked,
        model_shardings(stacked, layout),
        *[of_stage.weights.layers for of_stage in sums],
    )
    metrics = sums[-1].metrics
    metrics_of_slices = [
        jax.tree.map(functools.partial(send, layout=part), metrics) for part in slices
    ]
    metrics = jax.tree.map(
        _join_shards, metrics, model_shardings(metrics, layout), *metrics_of_slices
    )
    return Gradient(dataclasses.replace(joined, layers=layers, **ends), metrics)


@functools.partial(jax.jit, donate_argnums=0)
def _add(left: jax.Array, right: jax.Array) -> jax.Array:
    """Add two arrays in place of the first."""
    return left + right


def _join_shards(like: Any, place: NamedSharding, *parts: Any) -> Any:
    """Return an array of the shape and dtype of `like` from its parts on devices, uncopied.

    place: its sharding. For shapes it returns the shape.
    """
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, place, shards, dtype=like.dtype)


def sum_copies(gradients: list[Gradient], layout: Layout, execute: Execute) -> Gradient:
    """Return the sum of the gradients of a pipeline's copies, placed as in the layout.

    The copies' gradients are donated.
    """
    if len(gradients) == 1:
        return gradients[0]

    def stacked(*leaves: Any) -> Any:
        """Return the arrays of copies as one array [copies * n, ...], without moving them."""
        first, *rest = [*leaves[0].sharding.spec, *[None] * leaves[0].ndim][: leaves[0].ndim]
        axes = ("data", *(first if isinstance(first, tuple) else filter(None, [first])))
        size, *others = leaves[0].shape
        like = jax.ShapeDtypeStruct((len(leaves) * size, *others), leaves[0].dtype)
        place = NamedSharding(typed(Mesh, layout.mesh), PartitionSpec(axes, *rest))
        return _join_shards(like, place, *leaves)

    rows = [Gradient(copy.weights, execute(_as_rows, copy.metrics)) for copy in gradients]
    total = execute(_sum_stacked, jax.tree.map(stacked, *rows), layout=layout)
    # renamed to the weights' shardings, where XLA has found other names for the same ones
    return jax.tree.map(_join_shards, total, model_shardings(total, layout), total)


@jax.jit
def _as_rows(metrics: Metrics) -> Metrics:
    """Return numbers as arrays [1]."""
    return {name: value[None] for name, value in metrics.items()}


@functools.partial(jax.jit, static_argnames="layout", donate_argnums=0)
def _sum_stacked(copies: Gradient, layout: Layout) -> Gradient:
    """Return the sum of gradients that are stacked in one, copy by copy."""
    count = layout.extent("data")

    def total(leaf: jax.Array) -> jax.Array:
        """Return the sum over the copies of one leaf."""
        return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]).sum(axis=0)

    metrics = {
        name: value.max() if is_maximum(name) else value.sum()
        for name, value in copies.metrics.items()
    }
    return pin_weights(Gradient(jax.tree.map(total, copies.weights), metrics), layout)


def send(array: Any, layout: Layout) -> Any:
    """Return an array of one slice on another, split alike; a shape gives a shape."""
    return send_shards(array, NamedSharding(typed(Mesh, layout.mesh), array.sharding.spec))


@functools.partial(jax.jit, static_argnames="stage")
def forward(
    part: Model, hidden: jax.Array | None, batch: PackedSequences, *, stage: Stage
) -> jax.Array:
    """Run the layers of a stage other than the last: [S, C, M], the input of the next one.

    hidden: the output of the previous stage; None at the first one.
    """
    return _run(cast(part, stage.settings.layout.dtype), hidden, batch, stage)[0]


@functools.partial(jax.jit, static_argnames="stage", donate_argnums=(0, 2))
def backward(
    total: Gradient | None,
    part: Model,
    hidden: jax.Array | None,
    batch: PackedSequences,
    cotangent: jax.Array | None,
    *,
    stage: Stage,
) -> tuple[Gradient, jax.Array | None]:
    """Return `total` plus a stage's gradient of one micro-batch, and that of its input.

    `total` and `hidden`, the input [S, C, M], are donated; the forward pass is recomputed from it.
    cotangent: the gradient [S, C, M] of the stage's output; None at the last one, where the loss
    begins. The first one reads tokens, so its input has no gradient.
    """
    settings = stage.settings

    def run(part: Model, hidden: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return _run(part, hidden, batch, stage)

    part = cast(part, settings.layout.dtype)
    output, vjp, metrics = jax.vjp(run, part, hidden, has_aux=True)
    weights, of_input = vjp(jnp.ones_like(output) if cotangent is None else cotangent)
    of_input = None if of_input is None else _pin(of_input, settings.layout)
    return add_gradient(total, weights, metrics, settings), of_input


def _run(
    part: Model, hidden: jax.Array | None, batch: PackedSequences, stage: Stage
) -> tuple[jax.Array, Metrics]:
    """Compute a stage's output, [S, C, M], or for the last one the loss [] and its metrics."""
    settings = stage.settings
    # Between stages the width is over tensor, and inside not: XLA would otherwise sum and gather at
    # every product.
    hidden = (
        embed_tokens(part, batch.tokens) if hidden is None else pin_rows(hidden, settings.layout)
    )
    # Only one micro-batch is in a stage's layers at a time: a third computation is not needed.
    hidden = run_packed(part, hidden, batch, settings.layout, remat=False)
    if stage.loss is None:
        return _pin(pin_rows(hidden, settings.layout), settings.layout), {}
    before = predicting_states(part, hidden, batch, settings.layout)
    return stage.loss(part, before, batch, settings)


def hidden_sharding(shape: tuple[int, ...], layout: Layout) -> NamedSharding:
    """Return the sharding of hidden states [S, C, M] between stages: the width is over tensor.

    So no two devices send the same, and the receiving slice gathers it over its own links.
    """
    place = layout.fit((ROW_AXES, None, "tensor"), shape)
    return NamedSharding(typed(Mesh, layout.mesh), place)


def _pin(hidden: jax.Array, layout: Layout) -> jax.Array:
    """Constrain hidden states [S, C, M] to the parts in which they travel."""
    place = hidden_sharding(hidden.shape, layout)
    return jax.lax.with_sharding_constraint(hidden, place)
