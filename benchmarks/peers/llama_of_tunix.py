"""Read a Llama folder's configuration for both workers of tunix, which does not do so itself."""

import json
from pathlib import Path

from tunix.models.llama3.model import ModelConfig


def read_config(folder: Path) -> ModelConfig:
    """tunix's configuration of a Llama folder."""
    raw = json.loads((folder / "config.json").read_text())
    return ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )
