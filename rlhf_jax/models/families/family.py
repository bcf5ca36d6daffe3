"""A family of language models: its table of weights, its block, and the names in its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rlhf_jax.models.block import gated_block
from rlhf_jax.models.weight import Weight, WeightTable

# The weights outside the layers, by their field of `Model`.
END_WEIGHTS: WeightTable = {
    "embed": Weight("VM", ("V", "M"), "M", "model.embed_tokens.weight", "token_embd.weight"),
    "norm": Weight("M", ("M",), 1.0, "model.norm.weight", "output_norm.weight"),
    "head": Weight("MV", ("V", "M"), "M", "lm_head.weight", "output.weight"),
}


def layer_weight(
    axes: str, stored: tuple[str, ...], init: str | float, huggingface: str, gguf: str
) -> Weight:
    """Return a weight of each layer; its names omit the prefix of the layer's."""
    return Weight(axes, stored, init, "model.layers.{layer}." + huggingface, "blk.{layer}." + gguf)


# The weights of a layer of Llama, which related families extend.
LAYER_WEIGHTS: WeightTable = {
    "attention_norm": layer_weight("M", ("M",), 1.0, "input_layernorm.weight", "attn_norm.weight"),
    "query": layer_weight("MHD", ("HD", "M"), "M", "self_attn.q_proj.weight", "attn_q.weight"),
    "key": layer_weight("MGD", ("GD", "M"), "M", "self_attn.k_proj.weight", "attn_k.weight"),
    "value": layer_weight("MGD", ("GD", "M"), "M", "self_attn.v_proj.weight", "attn_v.weight"),
    "output": layer_weight(
        "HDM", ("M", "HD"), "HD", "self_attn.o_proj.weight", "attn_output.weight"
    ),
    "mlp_norm": layer_weight(
        "M", ("M",), 1.0, "post_attention_layernorm.weight", "ffn_norm.weight"
    ),
    "gate": layer_weight("MF", ("F", "M"), "M", "mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": layer_weight("MF", ("F", "M"), "M", "mlp.up_proj.weight", "ffn_up.weight"),
    "down": layer_weight("FM", ("M", "F"), "F", "mlp.down_proj.weight", "ffn_down.weight"),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Describe the specifics of a family of models; all else is as in Llama.

    The transformer runs `block` on layers of `weights`. The two readers of model files,
    `huggingface` and `gguf`, take the rest from here.
    """

    name: str  # The `model_type` of config.json, and `ModelConfig.family`.
    class_prefix: str  # The prefix of its classes in transformers: "Llama" of LlamaForCausalLM.
    # Published models of the family, for the message that lists the supported ones.
    models: str = ""
    # The weights of a layer, in the order of random initialisation.
    weights: WeightTable = dataclasses.field(default_factory=LAYER_WEIGHTS.copy, repr=False)
    # The function of a layer, with the arguments and results of `gated_block`.
    block: Callable = gated_block
    # Keys of config.json that transformers gives no default in this family.
    required_keys: tuple[str, ...] = ()
    # Whether `sliding_window` of config.json counts without `use_sliding_window`.
    always_windowed: bool = False
    # The `general.architecture` of its GGUF files; None if they use another family's.
    gguf_architecture: str | None = None
    # Whether llama.cpp interleaves the two halves of each head of query and key.
    gguf_interleaved: bool = False
