"""Say by formula what each device receives in a pass of a model, for a sharding.

The formulas follow what XLA makes of the programs; `collectives.py` counts that in a compiled one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax

from rlhf_jax import mesh as meshes
from rlhf_jax.mesh import Layout
from rlhf_jax.model import transformer
from rlhf_jax.placement.collectives import received_bytes
from rlhf_jax.types import Model, ModelConfig

WIDTH_AXES = ("slices", "fsdp")  # that split the width of weights in training


class Compiler(NamedTuple):
    """Say how XLA lays out what a platform's devices send, as was seen in compiled programs."""

    scatters: bool  # layers' gradients are reduce-scattered; else each device gets the whole sum
    input_sums: int  # all-reduces over `tensor` of gradients by a layer's inputs
    lanes: int  # a shard of the width that is no multiple is gathered by an all-reduce


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
        """Return the traffic of so many passes."""
        return Traffic(*(count * part for part in self))


class Weights(NamedTuple):
    """Hold the bytes of a model's weights on a device that has gathered its part for a product."""

    layers: int
    head: int
    held: int  # of both, and of the embedding, before they are gathered


def forward_traffic(model: ModelConfig, layout: Layout, tokens: Tokens, platform: str) -> Traffic:
    """Return what a device receives in one forward pass: weights, and sums of activations."""
    weights = gathered_weights(model, layout)
    gathered = _gathered(weights.layers, _gatherers(layout), model, layout, platform)
    gathered += _gathered(weights.head, _width(layout), model, layout, platform)
    exchanged = received_bytes("all-to-all", _hidden(model, layout, tokens.fed), _width(layout))
    # the embedding's rows lie over `tensor`, too
    sums = _layer_sums(model, layout) * model.num_layers + 1
    return Traffic(
        width=gathered + exchanged, tensor=sums * _summed(model, layout, tokens.fed), data=0.0
    )


def gradient_traffic(
    model: ModelConfig, layout: Layout, tokens: Tokens, platform: str, *, remat: bool
) -> Traffic:
    """Return what a device receives in one forward and backward pass.

    Layers are gathered again for the backward pass, which with `remat` sums what attention returns
    once more. The head is gathered once, and the gradient of either is summed over all rows.
    """
    compiler = COMPILERS[platform]
    forward = forward_traffic(model, layout, tokens, platform)
    weights = gathered_weights(model, layout)
    again = _gathered(weights.layers, _gatherers(layout), model, layout, platform)
    if compiler.scatters and _is_aligned(model, layout, compiler):
        gradients = received_bytes("all-gather", weights.layers, _width(layout))
    else:
        gradients = received_bytes("all-reduce", weights.layers, _gatherers(layout))
    exchanged = received_bytes("all-to-all", _hidden(model, layout, tokens.fed), _width(layout))

    sums = model.num_layers * (_layer_sums(model, layout) / 2) * (remat + compiler.input_sums)
    inputs = sums * _summed(model, layout, tokens.fed) + _summed(model, layout, tokens.predicted)
    head = _head_gradient(layout, weights)
    return Traffic(
        width=forward.width + again + gradients + exchanged + head.width,
        tensor=forward.tensor + inputs,
        data=_summed_over_data(layout, weights) + head.data,
    )


def _head_gradient(layout: Layout, weights: Weights) -> Traffic:
    """Return the traffic of the head's gradient, which is summed whole.

    It is summed in float32 over `data`, and over the width where layers are gathered jointly.
    """
    data = layout.extent("data")
    wide = weights.head * 4 / layout.dtype.itemsize
    size = wide if data > 1 and _is_joint(layout) else weights.head
    return Traffic(
        width=received_bytes("all-reduce", size, _width(layout)),
        data=received_bytes("all-reduce", wide / _width(layout), data),
    )


def _summed_over_data(layout: Layout, weights: Weights) -> float:
    """Return what a device receives to sum its shards of the other gradients over `data`."""
    if layout.extent("data") == 1:
        return 0.0
    own = weights.held - weights.head / _width(layout)
    group = layout.row_shards if _is_joint(layout) else layout.extent("data")
    return received_bytes("all-reduce", own, group)


@functools.lru_cache
def gathered_weights(model: ModelConfig, layout: Layout) -> Weights:
    """Return the bytes of weights that are gathered, in the layout's dtype, split over `tensor`."""
    made: Model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model, layout.dtype))
    layers = dataclasses.replace(made, embed=None, head=None)
    head = dataclasses.replace(made, layers=(), norm=None, embed=made.embed if model.tied else None)
    whole = dataclasses.replace(layout, role="generation")

    def of(tree: Model, layout: Layout) -> int:
        return meshes.bytes_per_device(tree, meshes.model_shardings(tree, layout))

    return Weights(of(layers, whole), of(head, whole), held=of(made, layout))


def _width(layout: Layout) -> int:
    """Return the devices that the width is split over."""
    return layout.extent(WIDTH_AXES)


def _is_joint(layout: Layout) -> bool:
    """Tell whether layers are gathered among all rows, as XLA first cuts shards for `data`, too.

    It does where nothing is split over `tensor`.
    """
    return _width(layout) > 1 and layout.extent("tensor") == 1


def _gatherers(layout: Layout) -> int:
    """Return the devices that gather a layer among them."""
    return layout.row_shards if _is_joint(layout) else _width(layout)


def _gathered(size: int, group: int, model: ModelConfig, layout: Layout, platform: str) -> float:
    """Return what a device receives to gather weights of `size` bytes among a group."""
    aligned = _is_aligned(model, layout, COMPILERS[platform])
    return received_bytes("all-gather" if aligned else "all-reduce", size, group)


def _is_aligned(model: ModelConfig, layout: Layout, compiler: Compiler) -> bool:
    """Tell whether a shard of the width is whole lanes."""
    return model.width // _width(layout) % compiler.lanes == 0


def _hidden(model: ModelConfig, layout: Layout, tokens: int) -> int:
    """Return the bytes of the hidden states of tokens."""
    return tokens * model.width * layout.dtype.itemsize


def _layer_sums(model: ModelConfig, layout: Layout) -> int:
    """Return the all-reduces over `tensor` of a layer's forward pass: attention, feed-forward."""
    tensor = layout.extent("tensor")
    return (model.num_heads % tensor == 0) + (model.ffn_width % tensor == 0)


def _summed(model: ModelConfig, layout: Layout, tokens: int) -> float:
    """Return what a device receives to sum the hidden states of tokens over `tensor`."""
    return received_bytes("all-reduce", _hidden(model, layout, tokens), layout.extent("tensor"))
