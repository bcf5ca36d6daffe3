"""One decoder-only transformer for policy, reference, critic, reward and draft model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from rlhf_jax.models.attention import causal
from rlhf_jax.models.block import rms_norm
from rlhf_jax.models.families import FAMILIES, weights_of
from rlhf_jax.models.families.family import END_WEIGHTS
from rlhf_jax.models.packed_attention import ATTENDED
from rlhf_jax.models.weight import OutputFirst
from rlhf_jax.types import Array, Model, ModelConfig


def init(key: Array, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """Draw a random model with stacked layers: weights N(0, 1/fan_in), norms one, biases zero."""
    table = weights_of(config)
    keys = dict(zip(table, jax.random.split(key, len(table)), strict=True))

    def drawn(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Return one weight, of all layers if they are stacked."""
        name = jax.tree_util.keystr(path[-1:], simple=True)
        weight = table[name]
        if not isinstance(weight.init, str):
            return jnp.full(shape.shape, weight.init, dtype)
        sizes = dict(zip(reversed(weight.axes), reversed(shape.shape), strict=False))
        scale = math.prod(sizes[axis] for axis in weight.init) ** -0.5
        return jax.random.normal(keys[name], shape.shape, dtype) * jnp.asarray(scale, dtype)

    return jax.tree.map_with_path(drawn, abstract_weights(config, dtype))


def abstract_weights(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """Return the shapes and dtypes of a model's weights, layers stacked; nothing is traced."""
    sizes = {
        "M": config.width,
        "F": config.ffn_width,
        "D": config.head_dim,
        "H": config.num_heads,
        "G": config.num_kv_heads,
        "V": config.vocab_size,
    }
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in weight.axes), dtype)
        for name, weight in weights_of(config).items()
    }
    ends = {name: shapes.pop(name, None) for name in END_WEIGHTS}
    if config.scalar_head:
        ends["head"] = jax.ShapeDtypeStruct((config.width, 1), dtype)
    layers = {
        name: shape.update(shape=(config.num_layers, *shape.shape))
        for name, shape in shapes.items()
    }
    return Model(layers=layers, config=config, **ends)


def stack(model: Model) -> Model:
    """Return the model with its layers as one `Layer`, each weight with a leading L."""
    if isinstance(model.layers, dict):
        return model
    return dataclasses.replace(
        model, layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    )


def unstack(model: Model) -> Model:
    """Return the model with its layers as a tuple.

    Each weight is then a separate buffer, which every decoding step reads in place.
    """
    if not isinstance(model.layers, dict):
        return model
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], model.layers)
        for i in range(model.config.num_layers)
    ]
    return dataclasses.replace(model, layers=tuple(layers))


def pad_vocab(model: Model, multiple: int) -> Model:
    """Pad a model's vocabulary with zeros to a multiple of tokens; `logits` masks them."""
    short = -model.config.vocab_size % multiple
    head = None if model.head is None else jnp.pad(model.head, ((0, 0), (0, short)))
    return dataclasses.replace(model, embed=jnp.pad(model.embed, ((0, short), (0, 0))), head=head)


def cast(model: Model, dtype: DTypeLike) -> Model:
    """Return the model with every weight in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model)


def forward(
    model: Model,
    tokens: Array,
    positions: Array,
    attend: Callable = causal,
    memory: Any = None,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """Compute the hidden states of tokens at positions, both int32 [B, Q], after the final norm.

    Returns them as [B, Q, M] in the weights' dtype, and the attention's state of each layer.
    `attend(query, key, value, memory of the layer) -> (out, kept)` is the attention: query [B, Q,
    H, D], key and value [B, Q, G, D], out [B, Q, H, D]. `memory` and `kept` run over the layers: a
    tuple if layers are unrolled, leaves with a leading L if they are stacked. The backward pass
    keeps each stacked layer's input and its products with weights, or with `remat` the input alone,
    and recomputes the rest. A token below 0 (no draft) is read as token 0.
    """
    chex.assert_equal_shape([tokens, positions])
    hidden, kept = run_layers(
        model, embed_tokens(model, tokens), positions, attend=attend, memory=memory, remat=remat
    )
    return final_norm(model, hidden), kept


def embed_tokens(model: Model, tokens: Array) -> jax.Array:
    """Return the embeddings [B, Q, M] of tokens [B, Q] int32."""
    chex.assert_rank(tokens, 2)
    return model.embed[jnp.maximum(tokens, 0)]


def final_norm(model: Model, hidden: jax.Array) -> jax.Array:
    """Normalise the last layer's output, [B, Q, M], for the head."""
    return rms_norm(hidden, model.norm, model.config.norm_eps)


def run_layers(
    model: Model,
    hidden: jax.Array,
    positions: Array,
    attend: Callable = causal,
    memory: Any = None,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """Run all layers of a model, or of a part of one, over hidden states [B, Q, M].

    Returns the last one's output, and the attention's state; the rest as in `forward`.
    """
    chex.assert_rank([hidden, positions], [3, 2])
    # The rotary embedding: cos and sin [B, Q, D/2] of each position (Su et al. 2021).
    frequencies = jnp.asarray(rope_frequencies(model.config), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    rotation = (jnp.cos(angles), jnp.sin(angles))
    block = FAMILIES[model.config.family].block
    step = functools.partial(block, config=model.config, rotation=rotation, attend=attend)
    if isinstance(model.layers, dict):
        policy = None if remat else _is_costly
        step = jax.checkpoint(step, prevent_cse=False, policy=policy)
        hidden, kept = jax.lax.scan(
            lambda x, layer: step(x, *layer), hidden, (model.layers, memory)
        )
    else:
        kept = []
        for index, layer in enumerate(model.layers):
            hidden, keep = step(hidden, layer, None if memory is None else memory[index])
            kept.append(keep)
        kept = tuple(kept)
    return hidden, kept


def _is_costly(primitive: Primitive, *operands: Any, **params: Any) -> bool:
    """Return whether the backward pass keeps the result of a primitive: products, and attention."""
    if primitive.name == "pallas_call" or primitive.name.startswith("dot_product_attention_fwd"):
        return True
    if primitive.name == "name" and params["name"] == ATTENDED:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)


def head_of(model: Model) -> Array | OutputFirst:
    """Return a model's head: its own, or its embedding if that is tied."""
    return OutputFirst(model.embed) if model.head is None else model.head


def logits(model: Model, hidden: Array) -> jax.Array:
    """Return the logits [..., V] of hidden states [..., M], in float32; [..., 1] of a scalar head.

    Padding of the vocabulary is -inf.
    """
    head = head_of(model)
    turned = isinstance(head, OutputFirst)
    dims = (((hidden.ndim - 1,), (1 if turned else 0,)), ((), ()))
    matrix = head.weight if turned else head
    scores = jax.lax.dot_general(hidden, matrix, dims, preferred_element_type=jnp.float32)
    if model.config.scalar_head or scores.shape[-1] == model.config.vocab_size:
        return scores
    return jnp.where(jnp.arange(scores.shape[-1]) < model.config.vocab_size, scores, -jnp.inf)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the rotary frequencies [D/2], in radians per position, after the family's scaling."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1 divides long wavelengths by the factor, keeps short ones and interpolates between.
    turns = scaling.original_context * frequencies / (2 * np.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)
