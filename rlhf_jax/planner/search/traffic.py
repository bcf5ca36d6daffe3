"""Formulas for the bytes that each device receives in a pass of a model, by sharding.

The formulas follow XLA's compiled programs; `collectives.py` counts the bytes in a compiled one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from rlhf_jax import mesh as meshes
from rlhf_jax.mesh import Layout
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.planner.search.collectives import received_bytes
from rlhf_jax.types import ModelConfig

WIDTH_AXES = ("slices", "fsdp")  # that split the width of weights in training
MANY_SHARDS = 64  # 8 to 32 are gathered differently; seen for v5p with libtpu 0.0.42.1


class Compiler(NamedTuple):
    """Describe how XLA implements a platform's communication, as seen in compiled programs."""

    scatters: bool  # layers' gradients are reduce-scattered; else each device gets the whole sum
    input_sums: int  # all-reduces over `tensor` of gradients by a layer's inputs
    lanes: int  # of a register; see `ShardedModel.sums_to_gather`


COMPILERS = {
    "cpu": Compiler(scatters=False, input_sums=5, lanes=1),
    "gpu": Compiler(scatters=True, input_sums=2, lanes=1),
    "tpu": Compiler(scatters=True, input_sums=2, lanes=128),
}


class Tokens(NamedTuple):
    """Count the tokens of one device's part of a micro-batch."""

    fed: int
    predicted: int  # to which the head is applied


class Traffic(NamedTuple):
    """Hold the bytes that a device receives, by the axes over which they are sent."""

    width: float = 0.0  # weights, their gradients and embeddings, over `WIDTH_AXES`
    tensor: float = 0.0  # activations
    data: float = 0.0  # gradients

    @property
    def total(self) -> float:
        """Return all bytes that a device receives."""
        return sum(self)

    def times(self, count: float) -> Traffic:
        """Return the traffic of several passes."""
        return Traffic(*(count * part for part in self))

    def plus(self, other: Traffic) -> Traffic:
        """Return the traffic of both."""
        return Traffic(*(one + two for one, two in zip(self, other, strict=True)))

    def minus(self, other: Traffic) -> Traffic:
        """Return the traffic without a part of it."""
        return self.plus(other.times(-1))


class GatheredWeights(NamedTuple):
    """Hold the bytes of a model's weights on a device, gathered for a product."""

    layers: int
    head: int
    held: int  # of both, and of the embedding, before they are gathered


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """Hold a model, its sharding in training, and the platform whose compiler splits it."""

    model: ModelConfig
    layout: Layout  # its mesh may be abstract
    platform: str

    @property
    def compiler(self) -> Compiler:
        """Return how the platform's compiler implements communication."""
        return COMPILERS[self.platform]

    @property
    def width(self) -> int:
        """Return the number of devices over which the width is split."""
        return self.layout.extent(WIDTH_AXES)

    @property
    def sums_to_gather(self) -> bool:
        """Return whether weights are gathered by an all-reduce: for many shards smaller than lanes.

        XLA gathers them if there are fewer, or if `tensor` splits them, too.
        """
        fills = self.model.width // self.width % self.compiler.lanes == 0
        return not fills and self.width >= MANY_SHARDS and self.layout.extent("tensor") == 1

    @property
    def is_joint(self) -> bool:
        """Return whether layers are gathered among all rows, as XLA first cuts shards for `data`.

        It does if nothing is split over `tensor`.
        """
        return self.width > 1 and self.layout.extent("tensor") == 1

    @property
    def gatherers(self) -> int:
        """Return the number of devices that gather a layer together."""
        return self.layout.row_shards if self.is_joint else self.width

    @property
    def layer_sums(self) -> int:
        """Return the all-reduces over `tensor` of a layer: attention's and feed-forward's."""
        tensor = self.layout.extent("tensor")
        return (self.model.num_heads % tensor == 0) + (self.model.ffn_width % tensor == 0)

    @property
    def weights(self) -> GatheredWeights:
        """Return the bytes of gathered weights, in the layout's dtype, split over `tensor`."""
        return gathered_weights(self.model, self.layout)

    def gathered(self, size: float, group: int) -> float:
        """Return the bytes that a device receives to gather weights of `size` bytes in a group."""
        return received_bytes("all-reduce" if self.sums_to_gather else "all-gather", size, group)

    def exchanged(self, tokens: int) -> float:
        """Return a device's received bytes to combine hidden states of an embedding's shards."""
        return received_bytes("all-to-all", self.hidden(tokens), self.width)

    def summed(self, tokens: int) -> float:
        """Return the bytes that a device receives to sum hidden states of tokens over `tensor`."""
        return received_bytes("all-reduce", self.hidden(tokens), self.layout.extent("tensor"))

    def hidden(self, tokens: int) -> int:
        """Return the bytes of the hidden states of tokens."""
        return tokens * self.model.width * self.layout.dtype.itemsize

    def summed_over_data(self) -> float:
        """Return a device's received bytes to sum gradients over `data`, the head's in float32."""
        data = self.layout.extent("data")
        if data == 1:
            return 0.0
        head = self.weights.head / self.width
        group = self.layout.row_shards if self.is_joint else data
        others = received_bytes("all-reduce", self.weights.held - head, group)
        return others + received_bytes("all-reduce", head * 4 / self.layout.dtype.itemsize, data)


@functools.cache
def gathered_weights(model: ModelConfig, layout: Layout) -> GatheredWeights:
    """Return the bytes of a model's weights that a device gathers, and of those that it holds.

    They are cached, as a search needs the same ones again and again.
    """
    made = abstract_weights(model, layout.dtype)
    embed = made.embed if model.tied else None
    head = dataclasses.replace(made, layers=(), norm=None, embed=embed)
    layers = dataclasses.replace(made, embed=None, head=None)
    whole = dataclasses.replace(layout, role="generation")
    return GatheredWeights(
        meshes.bytes_per_device(layers, model_shardings(layers, whole)),
        meshes.bytes_per_device(head, model_shardings(head, whole)),
        held=meshes.bytes_per_device(made, model_shardings(made, layout)),
    )


def forward_traffic(sharded: ShardedModel, tokens: Tokens) -> Traffic:
    """Return a device's traffic in one forward pass: weights, and sums of activations."""
    gathered = sharded.gathered(sharded.weights.layers, sharded.gatherers)
    gathered += sharded.gathered(sharded.weights.head, sharded.width)
    # the embedding's rows lie over `tensor`, too
    sums = sharded.layer_sums * sharded.model.num_layers + 1
    return Traffic(
        width=gathered + sharded.exchanged(tokens.fed), tensor=sums * sharded.summed(tokens.fed)
    )


def gradient_traffic(sharded: ShardedModel, tokens: Tokens, *, remat: bool) -> Traffic:
    """Return a device's traffic in one forward and backward pass.

    Layers are gathered again for the backward pass, which with `remat` sums the output of attention
    once more. The head is gathered once, and the gradient of either is summed over all rows.
    """
    layout = sharded.layout
    weights = sharded.weights
    forward = forward_traffic(sharded, tokens)
    again = sharded.gathered(weights.layers, sharded.gatherers)
    if sharded.compiler.scatters and not sharded.sums_to_gather:
        gradients = received_bytes("all-gather", weights.layers, sharded.width)
    else:
        gradients = received_bytes("all-reduce", weights.layers, sharded.gatherers)
    # XLA sums the head's gradient in float32 if layers are gathered among all rows
    in_float32 = layout.extent("data") > 1 and sharded.is_joint
    head = weights.head * (4 / layout.dtype.itemsize if in_float32 else 1)
    gradients += received_bytes("all-reduce", head, sharded.width)

    sums = sharded.layer_sums / 2 * (remat + sharded.compiler.input_sums)
    inputs = sharded.model.num_layers * sums * sharded.summed(tokens.fed)
    return Traffic(
        width=forward.width + again + gradients + sharded.exchanged(tokens.fed),
        tensor=forward.tensor + inputs + sharded.summed(tokens.predicted),
        data=sharded.summed_over_data(),
    )
