"""Qwen3: Llama with normalised queries and keys, and heads of a width of their own."""

from rlhf_jax.model.families.family import Family

QWEN3 = Family(
    name="qwen3",
    class_prefix="Qwen3",
    required_keys=("num_key_value_heads", "head_dim"),
    qk_norm=True,
    gguf_architecture="qwen3",
)
