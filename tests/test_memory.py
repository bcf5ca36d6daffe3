"""Predicted memory equals what is allocated, where that can be told, and is enough for each config."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from rlhf_jax import command_line, memory, mesh
from rlhf_jax import config as configs
from rlhf_jax.generation import engine, rows, tree
from rlhf_jax.model import transformer
from rlhf_jax.types import ModelConfig, RopeScaling

ROOT = pathlib.Path(__file__).parents[1]

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
LLAMA_1B = dataclasses.replace(LLAMA_8B, width=2048, ffn_width=8192, num_layers=16, head_dim=64, tied=True)

# Each config's models, devices and the memory of one of them, 10^9 bytes.
CONFIGS = {
    "grpo_llama32_1b": (LLAMA_1B, None, 1, 80.0),
    "grpo_llama31_8b_gpu": (LLAMA_8B, LLAMA_1B, 8, 80.0),
    "grpo_llama31_8b_tpu": (LLAMA_8B, LLAMA_1B, 4, 95.0),
}


def by_name(parts: list[memory.Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def held(tree) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture
def config():
    config = configs.default()
    config.data.max_prompt_tokens, config.generation.max_new_tokens = 32, 32
    return config


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_weights_optimizer_and_caches_are_exact(tiny, config, shape):
    devices = mesh.make_mesh(*shape)
    parts = by_name(memory.plan(config, tiny, tiny, dict(devices.shape), jnp.bfloat16))
    model = transformer.init(jax.random.key(0), tiny)
    policy = mesh.reshard(model, mesh.model_shardings(model, devices, "training"))
    half = transformer.cast(model, jnp.bfloat16)
    copy = mesh.reshard(half, mesh.model_shardings(half, devices, "generation"))
    optimizer = optax.adamw(1e-3).init(policy)
    slots = 64 + engine.slack(tree.parse(config.generation.strategy))
    state = rows.empty(tiny, tiny, 32, slots, 0, jnp.bfloat16, devices)
    assert parts["policy, float32"] == held(policy)
    assert parts["optimizer, two moments"] == held(optimizer) - 4  # the count
    assert parts["policy, for generation"] == parts["drafter"] == held(copy)
    assert parts["key-value cache of the policy"] == held(dataclasses.replace(state, draft=None))
    assert parts["key-value cache of the drafter"] == held(state.draft)


def test_parts_that_are_not_there_are_not_listed(tiny, config):
    config.training.kl_coefficient = 0.0
    names = by_name(memory.plan(config, tiny, None, dict(data=1, fsdp=1, tensor=1), jnp.float32))
    assert not {"reference", "drafter", "key-value cache of the drafter"} & names.keys()


def test_the_peak_is_what_is_always_there_and_the_larger_stage():
    parts = [memory.Part(name, stage, size, "") for name, stage, size in [
        ("a", "always", 1), ("b", "generation", 2), ("c", "training", 4), ("d", "training", 1)
    ]]  # fmt: skip
    assert memory.peak(parts) == ("training", 6)
    assert memory.table(parts)[-1].endswith("in training")


def test_what_does_not_fit_says_what_to_change(config):
    config.generation.update(rows=1024, max_new_tokens=4096)
    parts = memory.plan(config, LLAMA_8B, None, dict(data=1, fsdp=8, tensor=1), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"in generation and has 80.0 GB; .* key-value cache .* lower generation.rows"):
        memory.check(parts, 80e9)
    memory.check(parts, 1e15)


def test_remat_and_more_shards_need_less(config):
    def kept(remat: bool, fsdp: int) -> int:
        config.training.remat = remat
        parts = memory.plan(config, LLAMA_1B, None, dict(data=1, fsdp=fsdp, tensor=1), jnp.bfloat16)
        return by_name(parts)["activations kept by layer"]

    assert kept(True, 8) < kept(True, 4) < kept(False, 4)


def test_device_memory_is_asked_of_the_config_first(config):
    assert memory.device_memory(config, jax.devices("cpu")[0]) is None
    config.mesh.device_memory_gb = 2.5
    assert memory.device_memory(config, jax.devices("cpu")[0]) == 2.5e9


@pytest.mark.parametrize("name", CONFIGS)
def test_the_large_configs_are_valid_and_fit_their_devices(name, tmp_path):
    policy, drafter, num_devices, device_gb = CONFIGS[name]
    config = command_line.load(str(ROOT / "configs" / f"{name}.py"))
    assert config.mesh.device_memory_gb <= device_gb
    shape = mesh.sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, num_devices)
    parts = memory.plan(config, policy, drafter, shape, jnp.bfloat16)
    memory.check(parts, config.mesh.device_memory_gb * memory.GIGA)
    config.data.train = str(tmp_path / "prompts.jsonl")
    pathlib.Path(config.data.train).write_text('{"prompt": "a"}\n')
    config.reward.function = "builtins:len"
    configs.validate(config, num_devices)
    configs.validate_models(config, policy, drafter)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_figures_in_the_docstrings_are_the_predicted_ones(name):
    policy, drafter, num_devices, _ = CONFIGS[name]
    path = ROOT / "configs" / f"{name}.py"
    config = command_line.load(str(path))
    shape = mesh.sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, num_devices)
    parts = memory.plan(config, policy, drafter, shape, jnp.bfloat16)
    for stage in ("generation", "training"):
        size = sum(part.bytes for part in parts if part.stage in ("always", stage)) / memory.GIGA
        assert re.search(rf"\b{size:.1f} GB in {stage}\b", path.read_text())
