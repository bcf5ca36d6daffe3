"""Prepare the weights for decoding: the policy's, and those of the drafter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax

from pallas_kernels.shapes import BLOCK
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.models.shardings import pin_weights
from rlhf_jax.models.transformer import pad_vocab
from rlhf_jax.models.weight import OutputFirst, WeightKind, plain
from rlhf_jax.placement.transfer import transfer_ends, transfer_layers
from rlhf_jax.types import Layer, Model, Models

# Platforms on which products of few rows are faster this way: for all row counts from 1 to 128, by
# benchmarks/products.py (benchmarks/results/products.jsonl).
INPUTS_LAST = ("cpu",)


def decoding_weights(policy: Model, layout: Layout = ONE_DEVICE) -> Model:
    """Return the policy for generation: layers unrolled, in the layout's dtype and sharding.

    On `INPUTS_LAST` platforms each matrix has its inputs last; elsewhere any kind becomes plain. A
    split vocabulary is padded, so that each device has whole blocks of the two-level draw.
    """
    turns = layout.platform in INPUTS_LAST
    ends = _ends(transfer_ends(policy, layout, layout.dtype), layout=layout, turns=turns)
    layers = transfer_layers(policy, layout, layout.dtype)
    kinds = jax.tree.leaves(policy.layers, is_leaf=lambda leaf: isinstance(leaf, WeightKind))
    if turns or any(isinstance(leaf, WeightKind) for leaf in kinds):
        layers = (_decoded(layer, layout, policy.config.family, turns=turns) for layer in layers)
    return dataclasses.replace(ends, layers=tuple(layers))


@functools.partial(jax.jit, static_argnames=("layout", "turns"))
def _ends(model: Model, layout: Layout, *, turns: bool) -> Model:
    """Pad a split vocabulary of a model without layers, and transpose its head."""
    has_words = model.embed is not None and not model.config.scalar_head
    if layout.extent("tensor") > 1 and has_words:
        model = pad_vocab(model, BLOCK * layout.extent("tensor"))
    if turns and model.head is not None:
        model = dataclasses.replace(model, head=OutputFirst.of(model.head, 1))
    return pin_weights(model, layout)


@functools.partial(jax.jit, static_argnames=("layout", "family", "turns"))
def _decoded(layer: Layer, layout: Layout, family: str, *, turns: bool) -> Layer:
    """Return an unrolled layer whose matrices are plain, or have their inputs last."""
    counts = {name: len(weight.inputs) for name, weight in FAMILIES[family].weights.items()}
    layer = {name: plain(leaf, counts[name]) for name, leaf in layer.items()}
    if turns:
        layer = {
            name: OutputFirst.of(leaf, counts[name]) if counts[name] else leaf
            for name, leaf in layer.items()
        }
    return pin_weights(layer, layout)


def decoding_models(
    models: Models, frozen: Mapping[str, Model], layout: Layout
) -> tuple[Model, Model | None]:
    """Return policy and drafter for generation: unrolled, cast, sharded.

    The drafter is the student in training, with the policy's embedding and head, else the frozen
    one, if any.
    """
    target = decoding_weights(models["policy"].weights, layout)
    drafter = models["drafter"].weights if "drafter" in models else frozen.get("drafter")
    return target, student_for(target, drafter, layout)


def student_for(target: Model, drafter: Model | None, layout: Layout = ONE_DEVICE) -> Model | None:
    """Return the drafter to run with the decoding weights `target`.

    A student (layers and a norm only) is unrolled like `target` and shares its embedding and head.
    A complete drafter, or None, is returned unchanged.
    """
    if drafter is None or drafter.embed is not None:
        return drafter
    return completed(decoding_weights(drafter, layout), target)


def completed(student: Model, policy: Model) -> Model:
    """Return a student completed with the policy's embedding and head.

    Nothing is copied.
    """
    return dataclasses.replace(student, embed=policy.embed, head=policy.head)
