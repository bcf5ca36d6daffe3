"""What one family of language models has of its own, in itself and in its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# The name of each weight in a Hugging Face folder, by its field of `Model` or `Layer`.
HUGGINGFACE_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "query": "model.layers.{layer}.self_attn.q_proj.weight",
    "key": "model.layers.{layer}.self_attn.k_proj.weight",
    "value": "model.layers.{layer}.self_attn.v_proj.weight",
    "output": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "query_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "key_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}
# The name of each weight in a GGUF file, by its field of `Model` or `Layer`.
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "query": "blk.{layer}.attn_q.weight",
    "key": "blk.{layer}.attn_k.weight",
    "value": "blk.{layer}.attn_v.weight",
    "output": "blk.{layer}.attn_output.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "query_bias": "blk.{layer}.attn_q.bias",
    "key_bias": "blk.{layer}.attn_k.bias",
    "value_bias": "blk.{layer}.attn_v.bias",
    "query_norm": "blk.{layer}.attn_q_norm.weight",
    "key_norm": "blk.{layer}.attn_k_norm.weight",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Describe what a family of models has of its own; all else is as in Llama.

    The transformer itself knows no family: it reads `qkv_bias` and `qk_norm` from a `ModelConfig`.
    The two readers of model files, `huggingface` and `gguf`, take the rest from here.
    """

    name: str  # The `model_type` of config.json, and `ModelConfig.family`.
    class_prefix: str  # How its classes in transformers begin: "Llama" of LlamaForCausalLM.
    # Published models of the family, for the sentence that lists what is supported.
    models: str = ""
    # Keys of config.json that transformers gives no default in this family.
    required_keys: tuple[str, ...] = ()
    # Whether `sliding_window` of config.json counts without `use_sliding_window`.
    always_windowed: bool = False
    qkv_bias: bool = False  # Whether query, key and value have biases.
    qk_norm: bool = False  # Whether query and key are normalised, head by head.
    huggingface_names: Mapping[str, str] = dataclasses.field(
        default_factory=HUGGINGFACE_NAMES.copy, repr=False
    )
    # The `general.architecture` of its GGUF files; None where they say another family's.
    gguf_architecture: str | None = None
    # Whether llama.cpp interleaves the two halves of each head of query and key.
    gguf_interleaved: bool = False
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=GGUF_NAMES.copy, repr=False)
