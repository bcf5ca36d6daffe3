"""Make the input shapes of programs, for absent devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.mesh import Layout
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import abstract_weights, pad_vocab, unstack
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.sequences.packing import Extent, line_lengths, live_pairs, pair_count
from rlhf_jax.training.gradients import Gradient, Learner
from rlhf_jax.training.learn import trained
from rlhf_jax.training.optimizer import take_step
from rlhf_jax.types import Model, ModelConfig, Trained


def placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes with shardings."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )


def repeated(shapes: Any, layout: Layout) -> Any:
    """Return replicated shapes on every device of a layout."""
    assert isinstance(layout.mesh, jax.sharding.Mesh), "Shapes lie on devices."
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return placed(shapes, jax.tree.map(lambda _: everywhere, shapes))


def row_shapes(make: Callable[[], Any], layout: Layout) -> Any:
    """Return the shapes of a row-first tree on its devices."""
    shapes = jax.eval_shape(make)
    return placed(shapes, meshes.row_shardings(shapes, layout))


def prompt_shapes(rows: int, width: int, layout: Layout) -> Any:
    """Return the shapes of prompts [rows, width], and of one number for each."""
    return row_shapes(
        lambda: (jnp.zeros((rows, width), jnp.int32), jnp.zeros(rows, jnp.int32)), layout
    )


def model_shapes(model: ModelConfig, layout: Layout, dtype: DTypeLike | None = None) -> Model:
    """Return the shapes of a model in its layout; generation's layers are unrolled.

    dtype: the layout's if None. A vocabulary that generation splits is padded to whole blocks.
    """
    shapes = abstract_weights(model, layout.dtype if dtype is None else dtype)
    if layout.role == "generation":
        split = layout.extent("tensor")
        block = BLOCK * split if split > 1 else 1
        shapes = jax.eval_shape(lambda made: pad_vocab(unstack(made), block), shapes)
    return placed(shapes, model_shardings(shapes, layout))


def run_step(learner: Learner, weights: Model, execute: Execute) -> Trained:
    """Run the step of a learner's optimizer, on shapes of its weights and of a gradient."""
    layout = learner.settings.layout
    finite = repeated(jax.ShapeDtypeStruct((), jnp.bool_), layout)
    before = trained(weights, learner.optimizer, layout)
    return take_step(learner, before, Gradient(weights, {}), finite, execute)


def packed_shapes(
    config: Config, layout: Layout, rows: int, reads: Collection[str]
) -> PackedSequences:
    """Return the shapes of `packed_zeros` on the devices of a layout."""
    return row_shapes(lambda: packed_zeros(config, layout, rows, reads), layout)


def packed_zeros(
    config: Config, layout: Layout, rows: int, reads: Collection[str]
) -> PackedSequences:
    """Return lines of zeros with room for `rows` sequences of full length.

    reads: the columns to include, of those that the run makes.
    """
    block = packed_block(layout)
    length = line_lengths(Extent(rows), derived.text_tokens(config), block, layout.row_shards)[-1]
    names = ("tokens", "positions", "predict_from", "targets", "mask", "segment_ids", "groups")
    sizes = dict.fromkeys(names, (layout.row_shards, length)) | {
        "segments": (layout.row_shards, length, 2),
        "pairs": (layout.row_shards, pair_count(length, block), 2),
    }
    made: dict[str, Any] = {name: jnp.zeros(size, jnp.int32) for name, size in sizes.items()}
    made["mask"] = made["mask"] == 0
    batch = PackedSequences(**made)
    return batch.with_columns(**_columns(config, reads, batch.shapes))


def pairs_of_texts(config: Config, layout: Layout, rows: int) -> int:
    """Count the pairs of blocks of a line of such sequences that see each other."""
    block = packed_block(layout)
    longest = derived.text_tokens(config)
    length = line_lengths(Extent(rows), longest, block, layout.row_shards)[-1]
    texts = np.full(length, -1)
    texts[: length // longest * longest] = np.arange(length // longest).repeat(longest)
    return len(live_pairs(np.stack([texts, texts], axis=1), block))


def micro_batch_shapes(
    config: Config, layout: Layout, rows: int, reads: Collection[str]
) -> PackedSequences:
    """Return the shapes of a micro-batch of `rows` sequences of full length, for losses."""
    reads = (*reads, "weights", "total_tokens", "total_sequences", "total_groups")
    return packed_shapes(config, layout, rows, reads)


def _columns(
    config: Config, reads: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Return zeros for the read columns that a run makes."""
    scorers = derived.scorers(config)
    made = {
        "logprobs": "policy" in scorers,
        # A loss that does not read the policy's scores as such has them as its reference.
        "reference_logprobs": "reference" in scorers
        or ("policy" in scorers and "logprobs" not in reads),
        "values": "critic" in scorers,
        "top_k_ids": bool(config.generation.top_k),
        "temperatures": derived.samples_dynamically(config),
    }
    columns = {}
    for name in reads:
        column = declaration(name)
        width = (config.generation.top_k,) if name == "top_k_ids" else ()
        size = (*shapes[column.per], *width)
        if made.get(name, True):
            columns[name] = jnp.zeros(size, column.dtype)
    return columns
