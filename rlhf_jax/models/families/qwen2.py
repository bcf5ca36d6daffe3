"""Qwen2: Llama with biases on query, key and value."""

from rlhf_jax.models.families.family import LAYER_WEIGHTS, Family, layer_weight

_BIASES = {
    "query_bias": layer_weight("HD", ("HD",), 0.0, "self_attn.q_proj.bias", "attn_q.bias"),
    "key_bias": layer_weight("GD", ("GD",), 0.0, "self_attn.k_proj.bias", "attn_k.bias"),
    "value_bias": layer_weight("GD", ("GD",), 0.0, "self_attn.v_proj.bias", "attn_v.bias"),
}

QWEN2 = Family(
    name="qwen2",
    class_prefix="Qwen2",
    models="Qwen2, Qwen2.5",
    required_keys=("num_key_value_heads",),
    weights={**LAYER_WEIGHTS, **_BIASES},
    gguf_architecture="qwen2",
)
