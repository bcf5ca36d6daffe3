"""Make the shapes of what programs are given, for devices that need not be here."""

from __future__ import annotations

from collections.abc import Callable
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
from rlhf_jax.setup.models import weight_shapes
from rlhf_jax.training.batching import MicroBatch
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.types import Model, ModelConfig, PackedBatch


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


def packed_batch(config: Config, layout: Layout, rows: int) -> PackedBatch:
    """Return the shapes of a packed batch of `rows` samples of full length, prompts all unlike."""
    own = meshes.rows_of_shard(rows, layout.row_shards)
    response = config.generation.max_new_tokens
    slots = config.data.max_prompt_tokens + response

    def make() -> PackedBatch:
        line = jnp.zeros((layout.row_shards, own * slots), jnp.int32)
        samples = jnp.zeros((layout.row_shards, own, slots), jnp.int32)
        told = jnp.zeros((layout.row_shards, own * response), jnp.int32)
        return PackedBatch(line, line, samples, line, told, told, told == 0, told)

    return row_shapes(make, layout)


def support_shape(config: Config, packed: PackedBatch) -> Any:
    """Return the shape of the likeliest tokens at each predicted one; None without a top_k."""
    top_k = config.generation.top_k
    if not top_k:
        return None
    targets: Any = packed.targets
    return targets.update(shape=(*targets.shape, top_k))


def micro_batch_shapes(config: Config, layout: Layout, rows: int) -> MicroBatch:
    """Return the shapes of a micro-batch of `rows` samples of full length."""
    packed = packed_batch(config, layout, rows)
    mask: Any = packed.mask
    tokens = mask.update(dtype=jnp.float32)
    one = repeated(jax.ShapeDtypeStruct((), jnp.float32), layout)
    values = tokens if derived.needs_critic(config) else None
    return MicroBatch(
        packed,
        weights=tokens,
        sampled_logprobs=tokens,
        advantages=tokens,
        total=one,
        samples=one,
        kl_weight=one,
        logprobs=tokens if derived.needs_old_logprobs(config) else None,
        reference_logprobs=tokens if derived.needs_reference(config) else None,
        values=values,
        returns=values,
        support=support_shape(config, packed),
    )
