"""The block of a transformer: attention and a gated feed-forward, each with a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.weight import product
from rlhf_jax.types import Array, Layer, ModelConfig

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, float32 [B, Q, D/2]


def gated_block(
    hidden: jax.Array,
    layer: Layer,
    memory: Any,
    *,
    config: ModelConfig,
    rotation: Rotation,
    attend: Callable,
) -> tuple[jax.Array, Any]:
    """Run one layer over hidden states [B, Q, M]; return them, and the attention's state."""
    hidden, kept = attention(hidden, layer, memory, config, rotation=rotation, attend=attend)
    normed = rms_norm(hidden, layer["mlp_norm"], config.norm_eps)
    gated = jax.nn.silu(product(normed, layer["gate"])) * product(normed, layer["up"])
    return hidden + product(gated, layer["down"]), kept


def attention(
    hidden: jax.Array,
    layer: Layer,
    memory: Any,
    config: ModelConfig,
    rotation: Rotation,
    attend: Callable,
) -> tuple[jax.Array, Any]:
    """Add attention to hidden states [B, Q, M], with biases and norms if the layer has them.

    Returns them, and the state that `attend` kept.
    """
    normed = rms_norm(hidden, layer["attention_norm"], config.norm_eps)
    projected = []
    for name in ("query", "key", "value"):
        out = product(normed, layer[name])
        bias = layer.get(f"{name}_bias")
        projected.append(out if bias is None else out + bias)
    query, key, value = projected
    if "query_norm" in layer:
        query = rms_norm(query, layer["query_norm"], config.norm_eps)
        key = rms_norm(key, layer["key_norm"], config.norm_eps)
    out, kept = attend(rotate(query, rotation), rotate(key, rotation), value, memory)

    # Heads are merged by hand: an einsum over two axes makes XLA transpose the weight at every step
    # on a CPU.
    out = product(out.reshape(*out.shape[:2], -1), layer["output"], inputs=2)
    return hidden + out, kept


def rms_norm(x: jax.Array, scale: Array, eps: float) -> jax.Array:
    """Compute x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019).

    The norm is taken in float32; the result has the dtype of x.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [B, Q, heads, D] by position, halves paired (the Hugging Face convention).

    `rotation` holds cos and sin, float32 [B, Q, D/2], of `rope_frequencies` times the positions.
    """
    cos, sin = (part[:, :, None, :] for part in rotation)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return out.astype(x.dtype)
