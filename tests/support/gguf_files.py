"""GGUF files of small models, as llama.cpp's converter writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf as gguf_package
import numpy as np

from rlhf_jax.models import transformer, weight_table
from rlhf_jax.models.files import gguf
from rlhf_jax.types import Model, ModelConfig

Kind = gguf_package.GGMLQuantizationType


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key weights of Llama models."""
    rows = array.shape[0]
    return array.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def write_metadata(writer: gguf_package.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    letters = [chr(256 + index) for index in range(config.vocab_size)]
    letters[20] = letters[10] + letters[11]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(letters)
    writer.add_token_types([3, *[1] * (config.vocab_size - 1)])
    writer.add_token_merges([f"{letters[10]} {letters[11]}"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)


def write_weights(writer: gguf_package.GGUFWriter, model: Model, kind: Kind) -> None:
    config = model.config
    names = weight_table.stored_names(config, "gguf")
    for key, name in names.items():
        array = np.array(weight_table.stored_weight(model, key), np.float32)
        if key.name in ("query", "key") and config.family == "llama":
            array = interleave(
                array, config.num_heads if key.name == "query" else config.num_kv_heads
            )
        if array.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(name, gguf_package.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    if config.rope_scaling and config.rope_scaling.kind == "llama3":
        plain = transformer.rope_frequencies(dataclasses.replace(config, rope_scaling=None))
        divisors = (plain / transformer.rope_frequencies(config)).astype(np.float32)
        writer.add_tensor(gguf.ROPE_DIVISORS, divisors)
    elif config.rope_scaling:
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def write_gguf(
    file: Path, model: Model, kind: Kind = Kind.F32, family: str | None = None, **extra: str
) -> Path:
    writer = gguf_package.GGUFWriter(file, family or model.config.family)
    write_metadata(writer, model.config)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    write_weights(writer, model, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
