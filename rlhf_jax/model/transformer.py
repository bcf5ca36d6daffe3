"""One decoder-only transformer for policy, reference, critic, reward and draft model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from rlhf_jax.model.attention import causal
from rlhf_jax.model.packed_attention import ATTENDED
from rlhf_jax.types import Array, Layer, Model, ModelConfig, OutputFirst


def init(key: Array, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """Draw a random model with stacked layers: weights N(0, 1/fan_in), norms one, biases zero."""
    shapes = weight_shapes(config)
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    weights = []
    for leaf_key, (path, shape) in zip(jax.random.split(key, len(leaves)), leaves, strict=True):
        name = path[-1].name
        if name.endswith("norm"):
            weights.append(jnp.ones(shape, dtype))
        elif name.endswith("bias"):
            weights.append(jnp.zeros(shape, dtype))
        else:
            inputs = {"output": shape[-3:-1], "embed": shape[-1:], "head": shape[:1]}
            fan_in = inputs.get(name, shape[1:2])
            scale = jnp.asarray(np.prod(fan_in) ** -0.5, dtype)
            weights.append(jax.random.normal(leaf_key, shape, dtype) * scale)
    return jax.tree.unflatten(treedef, weights)


def weight_shapes(config: ModelConfig) -> Model:
    """Return a `Model` whose leaves are the shapes of the weights, layers stacked.

    It is the one table of which weights a configuration has.
    """
    depth = config.num_layers
    width = config.width
    ffn = config.ffn_width
    dim = config.head_dim
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    layers: dict[str, Any] = {
        "attention_norm": (depth, width),
        "query": (depth, width, heads, dim),
        "key": (depth, width, kv_heads, dim),
        "value": (depth, width, kv_heads, dim),
        "output": (depth, heads, dim, width),
        "mlp_norm": (depth, width),
        "gate": (depth, width, ffn),
        "up": (depth, width, ffn),
        "down": (depth, ffn, width),
    }
    if config.qkv_bias:
        layers["query_bias"] = (depth, heads, dim)
        layers["key_bias"] = (depth, kv_heads, dim)
        layers["value_bias"] = (depth, kv_heads, dim)
    if config.qk_norm:
        layers["query_norm"] = (depth, dim)
        layers["key_norm"] = (depth, dim)

    ends: dict[str, Any] = {"embed": (config.vocab_size, width), "norm": (width,), "head": None}
    if not config.tied:
        ends["head"] = (width, 1 if config.scalar_head else config.vocab_size)
    return Model(layers=Layer(**layers), config=config, **ends)


def stack(model: Model) -> Model:
    """Return the model with its layers as one `Layer`, each weight with a leading L."""
    if isinstance(model.layers, Layer):
        return model
    return dataclasses.replace(
        model, layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    )


def unstack(model: Model) -> Model:
    """Return the model with its layers as a tuple.

    Each weight is then a buffer of its own, which every decoding step reads in place.
    """
    if not isinstance(model.layers, Layer):
        return model
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], model.layers)
        for i in range(model.config.num_layers)
    ]
    return dataclasses.replace(model, layers=tuple(layers))


def pad_vocab(model: Model, multiple: int) -> Model:
    """Put zeros behind a model's vocabulary, up to a multiple of tokens; `logits` masks them."""
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

    Returns them as [B, Q, M] in the weights' dtype, and what the attention kept of each layer.
    `attend(query, key, value, memory of the layer) -> (out, kept)` is the attention: query
    [B, Q, H, D], key and value [B, Q, G, D], out [B, Q, H, D]. `memory` and `kept` run over the
    layers: a tuple where layers are unrolled, leaves with a leading L where they are stacked.
    The backward pass keeps each stacked layer's input and its products with weights, or with
    `remat` the input alone, and computes the rest again. A token below 0 (no draft) is read as
    token 0.
    """
    chex.assert_equal_shape([tokens, positions])
    hidden, kept = run_layers(
        model, embed_tokens(model, tokens), positions, attend=attend, memory=memory, remat=remat
    )
    return final_norm(model, hidden), kept


def embed_tokens(model: Model, tokens: Array) -> jax.Array:
    """Return what the first layer reads, [B, Q, M], of tokens [B, Q] int32."""
    chex.assert_rank(tokens, 2)
    return model.embed[jnp.maximum(tokens, 0)]


def final_norm(model: Model, hidden: jax.Array) -> jax.Array:
    """Normalise what the last layer gave, [B, Q, M], for the head."""
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

    Returns what the last one gives, and what the attention kept; the rest as in `forward`.
    """
    chex.assert_rank([hidden, positions], [3, 2])
    # The rotary embedding: cos and sin [B, Q, D/2] of each position (Su et al. 2021).
    frequencies = jnp.asarray(rope_frequencies(model.config), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    rotation = (jnp.cos(angles), jnp.sin(angles))
    step = functools.partial(_block, config=model.config, rotation=rotation, attend=attend)
    if isinstance(model.layers, Layer):
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
    """Tell whether the backward pass keeps what a primitive computes: products, and attention."""
    if primitive.name == "pallas_call" or primitive.name.startswith("dot_product_attention_fwd"):
        return True
    if primitive.name == "name" and params["name"] == ATTENDED:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)


def _block(
    hidden: jax.Array,
    layer: Layer,
    memory: Any,
    *,
    config: ModelConfig,
    rotation: tuple[jax.Array, jax.Array],
    attend: Callable,
) -> tuple[jax.Array, Any]:
    """Run one layer: attention and gated feed-forward, each added to hidden [B, Q, M]."""
    normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
    query = _project(normed, layer.query, layer.query_bias)
    key = _project(normed, layer.key, layer.key_bias)
    value = _project(normed, layer.value, layer.value_bias)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = rms_norm(query, layer.query_norm, config.norm_eps)
        key = rms_norm(key, layer.key_norm, config.norm_eps)
    out, kept = attend(rotate(query, rotation), rotate(key, rotation), value, memory)

    # Heads are merged by hand: an einsum over two axes makes XLA transpose the weight at every step
    # on a CPU.
    hidden = hidden + product(out.reshape(*out.shape[:2], -1), layer.output, inputs=2)
    normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
    gated = jax.nn.silu(product(normed, layer.gate)) * product(normed, layer.up)
    return hidden + product(gated, layer.down), kept


def _project(x: jax.Array, weight: Array | OutputFirst, bias: Array | None) -> jax.Array:
    out = product(x, weight)
    return out if bias is None else out + bias


def product(x: jax.Array, weight: Array | OutputFirst, inputs: int = 1) -> jax.Array:
    """Multiply x [..., K] with a weight whose first `inputs` dimensions are K, the last if turned.

    Both are taken as matrices: XLA on a CPU would transpose anything else at every step.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if isinstance(weight, OutputFirst):
        outputs = weight.weight.shape[:-inputs]
        turned = weight.weight.reshape(-1, width) @ rows.T
        # Without the barrier XLA turns the product round: up to twice as slow on a CPU.
        out = jax.lax.optimization_barrier(turned).T
    else:
        outputs = weight.shape[inputs:]
        out = rows @ weight.reshape(width, -1)
    return out.reshape(*x.shape[:-1], *outputs)


def head_of(model: Model) -> Array | OutputFirst:
    """Return a model's head: its own, or its embedding where that is tied."""
    return OutputFirst(model.embed) if model.head is None else model.head


def logits(model: Model, hidden: Array) -> jax.Array:
    """Return the logits [..., V] of hidden states [..., M], in float32; [..., 1] of a scalar head.

    Padding behind the vocabulary is -inf.
    """
    head = head_of(model)
    turned = isinstance(head, OutputFirst)
    dims = (((hidden.ndim - 1,), (1 if turned else 0,)), ((), ()))
    matrix = head.weight if turned else head
    scores = jax.lax.dot_general(hidden, matrix, dims, preferred_element_type=jnp.float32)
    if model.config.scalar_head or scores.shape[-1] == model.config.vocab_size:
        return scores
    return jnp.where(jnp.arange(scores.shape[-1]) < model.config.vocab_size, scores, -jnp.inf)


def rms_norm(x: jax.Array, scale: Array, eps: float) -> jax.Array:
    """Compute x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019).

    The norm is taken in float32; the result has the dtype of x.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


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


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [B, Q, heads, D] by position, halves paired (the Hugging Face convention).

    `rotation` holds cos and sin, float32 [B, Q, D/2], of `rope_frequencies` times the positions.
    """
    cos, sin = (part[:, :, None, :] for part in rotation)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return out.astype(x.dtype)
