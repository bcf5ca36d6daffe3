"""Llama: the base of the other families."""

from rlhf_jax.models.families.family import Family

LLAMA = Family(
    name="llama",
    class_prefix="Llama",
    models="Llama 2 to 3.3, SmolLM2",
    gguf_architecture="llama",
    gguf_interleaved=True,
)
