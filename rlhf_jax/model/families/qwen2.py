"""Qwen2: Llama with biases on query, key and value."""

from rlhf_jax.model.families.family import Family

QWEN2 = Family(
    name="qwen2",
    class_prefix="Qwen2",
    models="Qwen2, Qwen2.5",
    required_keys=("num_key_value_heads",),
    qkv_bias=True,
    gguf_architecture="qwen2",
)
