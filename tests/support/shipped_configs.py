"""The configs that are shipped, their models and devices, and the parts of their memory."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

from places import ROOT

from rlhf_jax.config import command_line, derived
from rlhf_jax.config import schema as configs
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.mesh import Layout
from rlhf_jax.types import ModelConfig, ModelConfigs, RopeScaling

LLAMA_8B = ModelConfig(
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
TWO_LAYERS = ModelConfig("llama", 512, 256, 1024, 2, 4, 2, 64, 8192)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B, width=2048, ffn_width=8192, num_layers=16, head_dim=64, tied=True
)
REWARD_8B = dataclasses.replace(LLAMA_8B, scalar_head=True)
QWEN_05B = ModelConfig(
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
SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49_152,
    width=576,
    ffn_width=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    tied=True,
)


class Setup(NamedTuple):
    """A config's models and devices, and the memory of one of them in 10^9 bytes."""

    models: ModelConfigs
    devices: int
    gigabytes: float


PPO_8B = ModelConfigs(LLAMA_8B, LLAMA_1B, {"critic": REWARD_8B}, (REWARD_8B,))
LARGE = {
    "grpo_llama32_1b": Setup(ModelConfigs(LLAMA_1B), 1, 80.0),
    "grpo_gsm8k": Setup(ModelConfigs(QWEN_05B), 1, 80.0),
    "grpo_llama31_8b:gpu": Setup(ModelConfigs(LLAMA_8B, LLAMA_1B), 8, 80.0),
    "grpo_llama31_8b:tpu": Setup(ModelConfigs(LLAMA_8B, LLAMA_1B), 4, 95.0),
    "ppo_llama31_8b:gpu": Setup(PPO_8B, 8, 80.0),
    "ppo_llama31_8b:tpu": Setup(PPO_8B, 4, 95.0),
}
CONFIGS = LARGE | {
    "quickstart": Setup(ModelConfigs(SMOLLM2), 1, 4.0),
    "quickstart_ppo": Setup(ModelConfigs(SMOLLM2, critics={"critic": SMOLLM2}), 1, 7.0),
}


def path_of(name: str) -> pathlib.Path:
    """The file of a config FILE[:ARGUMENT]."""
    return ROOT / "configs" / f"{name.partition(':')[0]}.py"


def load(name: str) -> configs.Config:
    """The config of that name."""
    return command_line.load(f"{path_of(name)}{name[len(path_of(name).stem) :]}")


def everywhere(
    config: configs.Config, models: ModelConfigs, layout: Layout, remat: bool | None = None
) -> list[memory_parts.Part]:
    """The parts of a run whose calls all have one layout, of all models that are given."""
    scored = [f"{role}_inference" for role in ("policy", "critic", "reward")]
    calls = (*derived.calls(config), *scored, "critic_training")
    again = config.training.remat != "off" if remat is None else remat
    return estimate.plan(config, models, dict.fromkeys(calls, layout), again)


def by_name(parts: list[memory_parts.Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}
