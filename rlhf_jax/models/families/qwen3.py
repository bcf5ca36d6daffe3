"""Qwen3: Llama with normalised queries and keys, and heads of a width of their own."""

from rlhf_jax.models.families.family import LAYER_WEIGHTS, Family, layer_weight

_NORMS = {
    "query_norm": layer_weight("D", ("D",), 1.0, "self_attn.q_norm.weight", "attn_q_norm.weight"),
    "key_norm": layer_weight("D", ("D",), 1.0, "self_attn.k_norm.weight", "attn_k_norm.weight"),
}

QWEN3 = Family(
    name="qwen3",
    class_prefix="Qwen3",
    required_keys=("num_key_value_heads", "head_dim"),
    weights={**LAYER_WEIGHTS, **_NORMS},
    gguf_architecture="qwen3",
)
