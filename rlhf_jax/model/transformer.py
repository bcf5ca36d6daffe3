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

from rlhf_jax.model.attention import causal
from rlhf_jax.types import Array, Layer, Model, ModelConfig, RopeScaling


def init(key: Array, config: ModelConfig, dtype=jnp.float32) -> Model:
    """A random model with stacked layers; weights N(0, 1/fan_in), norms one, biases zero."""
    shapes = weight_shapes(config)
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    weights = [
        _init_leaf(k, path[-1].name, shape, dtype)
        for k, (path, shape) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, weights)


def _init_leaf(key: Array, name: str, shape: tuple[int, ...], dtype) -> Array:
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    fan_in = {"output": shape[-3:-1], "embed": shape[-1:], "head": shape[:1]}.get(name, shape[1:2])
    return jax.random.normal(key, shape, dtype) * jnp.asarray(np.prod(fan_in) ** -0.5, dtype)


def weight_shapes(config: ModelConfig) -> Model:
    """A `Model` whose leaves are the shapes of the weights, layers stacked: the one table of
    weights.
    """
    c = config
    depth = c.num_layers
    width = c.width
    ffn = c.ffn_width
    dim = c.head_dim
    layers = Layer(
        attention_norm=(depth, width),
        query=(depth, width, c.num_heads, dim),
        key=(depth, width, c.num_kv_heads, dim),
        value=(depth, width, c.num_kv_heads, dim),
        output=(depth, c.num_heads, dim, width),
        mlp_norm=(depth, width),
        gate=(depth, width, ffn),
        up=(depth, width, ffn),
        down=(depth, ffn, width),
        query_bias=(depth, c.num_heads, dim) if c.qkv_bias else None,
        key_bias=(depth, c.num_kv_heads, dim) if c.qkv_bias else None,
        value_bias=(depth, c.num_kv_heads, dim) if c.qkv_bias else None,
        query_norm=(depth, dim) if c.qk_norm else None,
        key_norm=(depth, dim) if c.qk_norm else None,
    )
    head = None if c.tied else (width, 1 if c.scalar_head else c.vocab_size)
    return Model(embed=(c.vocab_size, width), layers=layers, norm=(width,), head=head, config=c)


def stack(model: Model) -> Model:
    """Layers as one `Layer` with a leading L."""
    if isinstance(model.layers, Layer):
        return model
    return dataclasses.replace(
        model, layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    )


def unstack(model: Model) -> Model:
    """Layers as a tuple: each weight is then a buffer of its own, read in place by every decoding
    step.
    """
    if not isinstance(model.layers, Layer):
        return model
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], model.layers)
        for i in range(model.config.num_layers)
    ]
    return dataclasses.replace(model, layers=tuple(layers))


def pad_vocab(model: Model, multiple: int) -> Model:
    """The model with zeros behind its vocabulary, up to a multiple of tokens: `logits` masks
    them.
    """
    short = -model.config.vocab_size % multiple
    head = None if model.head is None else jnp.pad(model.head, ((0, 0), (0, short)))
    return dataclasses.replace(model, embed=jnp.pad(model.embed, ((0, short), (0, 0))), head=head)


def cast(model: Model, dtype) -> Model:
    """Every weight in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model)


def forward(
    model: Model,
    tokens: Array,
    positions: Array,
    attend: Callable = causal,
    memory: Any = None,
    remat: bool = False,
) -> tuple[Array, Any]:
    """Hidden states [B, Q, M] after the final norm, in the weights' dtype, for tokens and positions
    [B, Q].

    `attend(query, key, value, memory of the layer) -> (out, kept)` is the attention; `memory` and
    `kept` run over the layers (a tuple where layers are unrolled, leaves with a leading L where
    they are stacked). `remat` keeps only each layer's input for the backward pass. A token below 0
    (no draft) is read as token 0.
    """
    chex.assert_rank([tokens, positions], [2, 2])
    chex.assert_equal_shape([tokens, positions])
    rotation = rope(positions, model.config)
    step = functools.partial(_block, config=model.config, rotation=rotation, attend=attend)
    step = jax.checkpoint(step) if remat else step
    hidden = model.embed[jnp.maximum(tokens, 0)]
    if isinstance(model.layers, Layer):
        hidden, kept = jax.lax.scan(
            lambda x, layer: step(x, *layer), hidden, (model.layers, memory)
        )
    else:
        kept = []
        for index, layer in enumerate(model.layers):
            hidden, keep = step(hidden, layer, None if memory is None else memory[index])
            kept.append(keep)
        kept = tuple(kept)
    return rms_norm(hidden, model.norm, model.config.norm_eps), kept


def _block(hidden, layer: Layer, memory, *, config: ModelConfig, rotation, attend):
    normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
    out, kept = attend(*_project(normed, layer, config, rotation), memory)
    # Heads are merged by hand: an einsum over two axes makes XLA transpose the weight at every step
    # on a CPU.
    hidden = hidden + out.reshape(*out.shape[:2], -1) @ layer.output.reshape(-1, config.width)
    normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
    gated = jax.nn.silu(normed @ layer.gate) * (normed @ layer.up)
    return hidden + gated @ layer.down, kept


def _project(x: Array, layer: Layer, config: ModelConfig, rotation) -> tuple[Array, Array, Array]:
    query = _linear(x, layer.query, layer.query_bias)
    key = _linear(x, layer.key, layer.key_bias)
    value = _linear(x, layer.value, layer.value_bias)
    if config.qk_norm:
        query = rms_norm(query, layer.query_norm, config.norm_eps)
        key = rms_norm(key, layer.key_norm, config.norm_eps)
    return rotate(query, rotation), rotate(key, rotation), value


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    out = jnp.einsum("bqm,mhd->bqhd", x, weight)
    return out if bias is None else out + bias


def logits(model: Model, hidden: Array) -> Array:
    """hidden [..., M] -> [..., V] float32 (or [..., 1] with a scalar head)."""
    head = model.embed if model.head is None else model.head
    axis = 1 if model.head is None else 0
    dims = (((hidden.ndim - 1,), (axis,)), ((), ()))
    scores = jax.lax.dot_general(hidden, head, dims, preferred_element_type=jnp.float32)
    if model.config.scalar_head or scores.shape[-1] == model.config.vocab_size:
        return scores
    return jnp.where(jnp.arange(scores.shape[-1]) < model.config.vocab_size, scores, -jnp.inf)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (Zhang and Sennrich
    2019).
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def rope(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """cos and sin, float32 [B, Q, D/2], of positions [B, Q] (Su et al. 2021)."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """[D/2] radians per position, after the family's scaling."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated
    (Llama 3.1).
    """
    turns = scaling.original_context * frequencies / (2 * np.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate x [B, Q, heads, D] by position, halves paired (the Hugging Face convention)."""
    cos, sin = (part[:, :, None, :] for part in rotation)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return out.astype(x.dtype)
