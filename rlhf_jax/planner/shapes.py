"""Make the shapes of what programs are given, for devices that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.mesh import Layout
from rlhf_jax.model.transformer import pad_vocab, unstack
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.setup.models import weight_shapes
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.types import Model, ModelConfig


def placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes that know where they lie."""

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)


def repeated(shapes: Any, layout: Layout) -> Any:
    """Return shapes of what is whole on every device of a layout."""
    assert isinstance(layout.mesh, jax.sharding.Mesh), "Shapes lie on devices."
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return placed(shapes, jax.tree.map(lambda _: everywhere, shapes))


def row_shapes(make: Callable[[], Any], layout: Layout) -> Any:
    """Return the shapes of a row-first tree on its devices."""
    shapes = jax.eval_shape(make)
    return placed(shapes, meshes.row_shardings(shapes, layout))


def model_shapes(model: ModelConfig, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return the shapes of a model as its layout has it; generation's layers are unrolled.

    dtype: the layout's if None. A vocabulary that generation splits is padded to whole blocks.
    """
    shapes = weight_shapes(model, layout.dtype if dtype is None else dtype)
    if layout.role == "generation":
        split = layout.extent("tensor")
        block = BLOCK * split if split > 1 else 1
        shapes = jax.eval_shape(lambda made: pad_vocab(unstack(made), block), shapes)
    return placed(shapes, meshes.model_shardings(shapes, layout))


def step_shapes(
    weights: Model, optimizer: optax.GradientTransformation, layout: Layout
) -> tuple[Model, Any, Gradient, Any]:
    """Return the shapes that an optimizer's step is given: weights, moments, a gradient, a bool."""
    moments = jax.eval_shape(optimizer.init, weights)
    moments = placed(moments, meshes.model_shardings(moments, layout))
    finite = repeated(jax.ShapeDtypeStruct((), jnp.bool_), layout)
    return weights, moments, Gradient(weights, {}), finite


def packed_shapes(
    config: Config, layout: Layout, rows: int, reads: Collection[str]
) -> PackedSequences:
    """Return the shapes of `rows` packed sequences of full length, prompts all unlike.

    reads: the columns that they have, of those that the run makes.
    """
    own = meshes.rows_of_shard(rows, layout.row_shards)
    response = config.generation.max_new_tokens
    slots = config.data.max_prompt_tokens + response
    line = (layout.row_shards, own * slots)
    predicted = (layout.row_shards, own * response)
    sizes = {
        "tokens": line,
        "positions": line,
        "sequences": (layout.row_shards, own, slots),
        "slot": line,
        "predict_from": predicted,
        "targets": predicted,
        "mask": predicted,
        "segment_ids": predicted,
        "groups": (layout.row_shards, own),
    }

    def make() -> PackedSequences:
        made: dict[str, Any] = {name: jnp.zeros(size, jnp.int32) for name, size in sizes.items()}
        made["mask"] = made["mask"] == 0
        batch = PackedSequences(**made)
        return batch.with_columns(**_columns(config, reads, batch.shapes))

    return row_shapes(make, layout)


def micro_batch_shapes(
    config: Config, layout: Layout, rows: int, reads: Collection[str]
) -> PackedSequences:
    """Return the shapes of a micro-batch of `rows` sequences of full length, for losses."""
    shares = ("weights", "total_tokens", "total_sequences", "total_groups", "kl_weight")
    return packed_shapes(config, layout, rows, (*reads, *shares))


def _columns(
    config: Config, reads: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Return zeros for the columns that a run makes, of those that are read."""
    made = {
        "logprobs": derived.needs_old_logprobs(config),
        "reference_logprobs": derived.needs_reference(config),
        "values": derived.needs_critic(config),
        "returns": derived.needs_critic(config),
        "top_k_ids": bool(config.generation.top_k),
    }
    found = {}
    for name in reads:
        column = declaration(name)
        width = (config.generation.top_k,) if name == "top_k_ids" else ()
        size = (*shapes[column.per], *width)
        if made.get(name, True):
            found[name] = jnp.zeros(size, column.dtype)
    return found
