"""Mistral: Llama with a sliding window; its GGUF files are marked as Llama's."""

from rlhf_jax.models.families.family import Family

MISTRAL = Family(
    name="mistral",
    class_prefix="Mistral",
    required_keys=("num_key_value_heads",),
    always_windowed=True,
)
