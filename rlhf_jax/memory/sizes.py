"""Compute the bytes of models, rows and layers on one device, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.shapes import LANES
from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.models.attention import QUERY_BLOCK, kernel_of, packed_block
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.placement import pipelined
from rlhf_jax.types import ModelConfig, ModelConfigs


class Temporaries(NamedTuple):
    """Hold the working memory of a platform's compiler besides results, as seen in programs."""

    scores: int  # float32 copies of scores, in a forward pass without an attention kernel
    attended: int  # float32 copies of the sums of attention in packed lines, in a forward pass
    logits: int  # of a round's logits
    padded_logits: int  # additional ones if the vocabulary is not whole blocks
    matrices: float  # of the three of a layer's feed-forward, gathered at a time
    head_sums: int  # float32 copies of a head whose gradient is summed over several chunks
    distilled: int  # logits of two models, with gradients, at a time
    padded_head: float  # copies of a head gathered from parts that are not whole lanes
    turns: bool  # weights [F, M] with a split M are transposed, all layers at once, to be gathered


TEMPORARIES = {
    "cpu": Temporaries(
        2, 1, 2, 1, matrices=3, head_sums=3, distilled=7, padded_head=1, turns=False
    ),
    "gpu": Temporaries(
        1, 0, 1, 0, matrices=1.5, head_sums=2, distilled=5, padded_head=1, turns=True
    ),
    "tpu": Temporaries(
        2, 0, 2, 1, matrices=1.5, head_sums=3, distilled=7, padded_head=2.75, turns=False
    ),
}


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Hold the facts that determine the memory of a run; the layout's mesh may be abstract."""

    config: Config
    models: ModelConfigs
    layout: meshes.Layout  # of the current call
    remat: bool  # Only each layer's input is kept for the backward pass.
    # of each call of the devices
    layouts: Mapping[str, meshes.Layout] = dataclasses.field(default_factory=dict)

    @property
    def text_tokens(self) -> int:
        """Return the tokens of the longest prompt and sample."""
        return derived.text_tokens(self.config)

    @property
    def batch_rows(self) -> int:
        """Return the rows of a device's part of a micro-batch."""
        rows = derived.microbatch_rows(self.config)
        return meshes.rows_of_shard(rows, self.layout.row_shards)

    @property
    def scored_rows(self) -> int:
        """Return the rows of a device's part of a micro-batch of the samples that are scored."""
        return min(self.batch_rows, row_share(derived.chosen_samples(self.config), self.layout))

    @property
    def line_tokens(self) -> int:
        """Return the tokens of a device's line of a micro-batch.

        It has room for a group that must be whole, even if that is larger than a micro-batch.
        """
        group = derived.group_tokens(self.config) if derived.keeps_groups(self.config) else 0
        return max(self.batch_rows * self.text_tokens, group)

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a minibatch of the longest texts."""
        minibatch = derived.chosen_samples(self.config) / self.config.training.minibatches
        return math.ceil(minibatch / (self.layout.row_shards * self.batch_rows))

    @property
    def is_pipelined(self) -> bool:
        """Return whether a training call splits its layers over slices."""
        return self.layout.role == "pipelined"

    def at(self, call: str) -> PlannedRun | None:
        """Return the run for one of its calls; None if the devices do not have it."""
        layout = self.layouts.get(call)
        return layout and dataclasses.replace(self, layout=layout)

    def models_of(self, stage: str) -> list[tuple[str, PlannedRun, ModelConfig]]:
        """List the models of the devices' calls of a stage: role, the run for it, shape."""
        named = [(call.rpartition("_"), call) for call in self.layouts]
        return [
            (role, dataclasses.replace(self, layout=self.layouts[call]), model)
            for (role, _, own), call in named
            if own == stage
            for model in self.models.of(call)
        ]

    def weights(
        self,
        model: ModelConfig | None,
        dtype: DTypeLike | None = None,
        role: str = "",
        ends: bool = True,
    ) -> int:
        """Return the bytes of a model's weights, split as in "training", or in another role.

        dtype: that of computation if None. role: '' for that of a training call, "pipelined" if its
        layers are split over slices. ends: with embedding and head, which a student lacks.
        """
        if model is None:
            return 0
        own = "pipelined" if self.is_pipelined else "training"
        layout = dataclasses.replace(self.layout, role=role or own)
        return weight_bytes(model, np.dtype(dtype or layout.dtype), layout, ends)

    def cast_weights(self, model: ModelConfig, *, ends: bool = True) -> int:
        """Return the bytes of a copy of float32 weights in the compute dtype; 0 if that is float32.

        ends: with embedding and head.
        """
        return 0 if self.layout.dtype == meshes.FLOAT32 else self.weights(model, ends=ends)

    def rows(self, tree: Any) -> int:
        """Return the bytes of a pytree whose leaves all have rows as their first axis."""
        return meshes.bytes_per_device(tree, meshes.row_shardings(tree, self.layout))

    def tensor_share(self, size: int) -> int:
        """Return the size of one device's part of a dimension that `tensor` splits.

        It is the whole if the mesh's `tensor` does not divide it.
        """
        tensor = self.layout.extent("tensor")
        return size if size % tensor else size // tensor

    def outputs(self, model: ModelConfig) -> int:
        """Return the number of the head's outputs on one device."""
        return 1 if model.scalar_head else self.tensor_share(model.vocab_size)

    def logits(self, model: ModelConfig) -> int:
        """Return the float32 bytes of the logits that exist at a time outside generation."""
        tokens = self.batch_rows * self.text_tokens
        return 4 * min(CHUNK, tokens) * self.outputs(model)

    def token_values(self, model: ModelConfig) -> int:
        """Return the bytes of all values that one layer computes for a token.

        They are norms and residuals [M], attention [H, D] and [G, D], also by block, and products
        [F].
        """
        heads = (4 * model.num_heads + 4 * model.num_kv_heads) * model.head_dim
        split = self.tensor_share(heads + 4 * model.ffn_width)
        return (10 * model.width + split) * self.layout.dtype.itemsize

    def kept_values(self, model: ModelConfig) -> int:
        """Return the bytes that the backward pass keeps for a token and a layer.

        They are the layer's input, and without remat its products with weights and the output of
        attention, with the float32 sums of softmax.
        """
        if self.remat:
            return model.width * self.layout.dtype.itemsize
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        split = self.tensor_share(heads + 2 * model.ffn_width)
        sums = 4 * self.tensor_share(model.num_heads)
        return (2 * model.width + split) * self.layout.dtype.itemsize + sums

    def forward(self, model: ModelConfig, rows: int, tokens: int) -> int:
        """Return the working bytes of one layer's forward pass over `rows` of a device.

        They are a third of its values and, without an attention kernel, float32 scores of the
        largest block of queries, shared out to all tokens.
        """
        values = self.token_values(model) // 3
        if kernel_of(self.layout, self.layout.dtype, model.head_dim):
            return rows * tokens * values
        blocks, rest = divmod(tokens, QUERY_BLOCK)
        largest = max(QUERY_BLOCK * blocks * QUERY_BLOCK, rest * tokens)
        scores = 4 * self.tensor_share(model.num_heads) * largest // tokens
        return rows * tokens * (values + self.temporaries.scores * scores)

    def forward_packed(self, model: ModelConfig, tokens: int) -> int:
        """Return the working bytes of one layer's forward pass over a line of a device.

        They are a third of its values, the sums of attention and the scores of a pair of blocks.
        """
        sums = 4 * self.temporaries.attended * self.tensor_share(model.num_heads) * model.head_dim
        of_tokens = tokens * (self.token_values(model) // 3 + sums)
        return of_tokens + self._block_scores(model, tokens)

    def backward_packed(self, model: ModelConfig, tokens: int) -> int:
        """Return the working bytes of one layer's backward pass over a line of a device.

        Its weights are left out. They are its values, attention's sums and gradients, both in
        float32, and the scores of a pair of blocks four times; without remat a third of the values
        is kept from the forward pass.
        """
        values = self.token_values(model)
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        of_token = (values if self.remat else 2 * values // 3) + 4 * self.tensor_share(heads)
        return tokens * of_token + 4 * self._block_scores(model, tokens)

    def _block_scores(self, model: ModelConfig, tokens: int) -> int:
        """Return the float32 bytes of the scores of a pair of blocks of a line."""
        block = min(packed_block(self.layout), tokens)
        return 4 * self.tensor_share(model.num_heads) * block**2

    def gathered(self, model: ModelConfig) -> int:
        """Return the bytes of one layer's weights, gathered over `fsdp`."""
        return self.weights(dataclasses.replace(model, num_layers=1), role="generation", ends=False)

    def gathered_block(self, model: ModelConfig) -> int:
        """Return the bytes of feed-forward weights that a forward pass has gathered at a time.

        On a CPU the three matrices come one after the other. Attention's are smaller, and freed
        before.
        """
        if self.width_shards == 1:
            return 0
        matrix = model.width * self.tensor_share(model.ffn_width) * self.layout.dtype.itemsize
        return int(self.temporaries.matrices * matrix)

    def gathered_head(self, model: ModelConfig) -> int:
        """Return the bytes of the head, gathered for one forward pass.

        If a device's part of the width is not whole lanes of a TPU, it is padded, and summed from
        copies.
        """
        if model.scalar_head or self.width_shards == 1:
            return 0
        padded = model.width // self.width_shards % LANES != 0
        copies = self.temporaries.padded_head if padded else 1
        return int(copies * self.layout.dtype.itemsize * model.width * self.outputs(model))

    @property
    def width_shards(self) -> int:
        """Return the number of devices over which the width of weights is split in training."""
        return self.layout.extent("fsdp" if self.is_pipelined else ("slices", "fsdp"))

    @property
    def temporaries(self) -> Temporaries:
        """Return the working memory of the devices' compiler; a TPU's for unknown platforms."""
        return TEMPORARIES[self.layout.platform or "tpu"]

    def turned(self, model: ModelConfig) -> int:
        """Return the bytes of all layers' weights that are transposed before they are gathered."""
        if not self.temporaries.turns or self.width_shards == 1:
            return 0
        inputs = self.tensor_share(model.num_heads) * model.head_dim
        inputs += self.tensor_share(model.ffn_width)
        entries = model.num_layers * inputs * model.width // self.width_shards
        return entries * self.layout.dtype.itemsize


@functools.cache
def count_weights(model: ModelConfig) -> int:
    """Return the number of a model's weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(model, np.float32)))


def parameter_counts(models: ModelConfigs) -> dict[str, int]:
    """Count the weights of each model of a run, by the names that a plan uses."""
    named = {f"reward model {number}": model for number, model in enumerate(models.rewards, 1)}
    return {name: count_weights(model) for name, model in (models.trunks | named).items()}


def weight_bytes(model: ModelConfig, dtype: np.dtype, layout: meshes.Layout, ends: bool) -> int:
    """Return a device's bytes of a model's weights; without ends, of the layers and norm.

    It is cached, as a search needs it for the same shapes again and again.
    """
    made = abstract_weights(model, dtype)
    if not ends:
        made = dataclasses.replace(made, embed=None, head=None)
    return meshes.bytes_per_device(made, model_shardings(made, layout))


def bubble_warnings(run: PlannedRun) -> list[str]:
    """Yield a warning for each call that trains as a pipeline of few micro-batches."""
    each = {call: dataclasses.replace(run, layout=own) for call, own in run.layouts.items()}
    return pipelined.bubble_warnings(
        (call, own.micro_batches, own.layout.slices)
        for call, own in each.items()
        if own.is_pipelined
    )


def row_share(rows: int, layout: meshes.Layout) -> int:
    """Return the number of rows on one device."""
    return -(-rows // layout.row_shards)
