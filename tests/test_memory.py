"""Predicted memory equals what is allocated, where that can be told, and is enough for each
config.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from rlhf_jax import mesh
from rlhf_jax.config import command_line, memory, validation
from rlhf_jax.config import schema as configs
from rlhf_jax.generation import rows, scheduler
from rlhf_jax.generation.speculative import tree
from rlhf_jax.inference.values import critic_of
from rlhf_jax.mesh import Layout
from rlhf_jax.model import transformer
from rlhf_jax.types import ModelConfig, ModelConfigs, RopeScaling

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
    qkv_bias=True,
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


PPO_8B = ModelConfigs(LLAMA_8B, LLAMA_1B, REWARD_8B, (REWARD_8B,))
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
    "quickstart_ppo": Setup(ModelConfigs(SMOLLM2, critic=SMOLLM2), 1, 7.0),
}


def path_of(name: str) -> pathlib.Path:
    """The file of a config FILE[:ARGUMENT]."""
    return ROOT / "configs" / f"{name.partition(':')[0]}.py"


def load(name: str) -> configs.Config:
    """The config of that name."""
    return command_line.load(f"{path_of(name)}{name[len(path_of(name).stem) :]}")


def planned(name: str) -> list[memory.Part]:
    """A large config's plan in bfloat16."""
    config = load(name)
    sizes = LARGE[name]
    shape = mesh.sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, sizes.devices)
    return memory.plan(config, sizes.models, shape, jnp.bfloat16)


def by_name(parts: list[memory.Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def held(tree) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture
def config():
    config = configs.default()
    config.data.max_prompt_tokens = 32
    config.generation.max_new_tokens = 32
    return config


ONE = dict(slices=1, data=1, fsdp=1, tensor=1)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_weights_optimizer_and_caches_are_exact(tiny, config, shape):
    devices = mesh.make_mesh(*shape)
    layout = Layout(devices)
    model = transformer.init(jax.random.key(0), tiny)
    policy = jax.device_put(model, mesh.model_shardings(model, layout))
    critic = critic_of(model)
    critic = jax.device_put(critic, mesh.model_shardings(critic, layout))
    half = transformer.cast(model, jnp.bfloat16)
    copy = jax.device_put(half, mesh.model_shardings(half, Layout(devices, "generation")))
    config.generation.strategy = "lookup-chain-4"
    config.generation.history_tokens = 0
    parts = memory.plan(config, ModelConfigs(tiny, tiny, tiny), dict(devices.shape), jnp.bfloat16)
    slots = scheduler.cache_slots(64, [tree.parse(config.generation.strategy)], layout)
    state = rows.empty(
        tiny, tiny, 32, slots, 0, 0, dataclasses.replace(layout, dtype=jnp.dtype(jnp.bfloat16))
    )
    found = by_name(parts)
    assert found["policy, float32"] == held(policy)
    assert found["critic, float32"] == held(critic)
    optimizer = optax.adamw(1e-3)
    # without the count
    moments = [held(optimizer.init(trained)) - 4 for trained in (policy, critic)]
    assert [
        found["policy's optimizer, two moments"],
        found["critic's optimizer, two moments"],
    ] == moments
    assert found["policy, for generation"] == found["drafter"] == held(copy)
    assert found["key-value cache of the policy"] == held(dataclasses.replace(state, draft=None))
    assert found["key-value cache of the drafter"] == held(state.draft)


def test_parts_that_are_not_there_are_not_listed(tiny, config):
    config.kl.coefficient = 0.0
    names = by_name(memory.plan(config, ModelConfigs(tiny), ONE, jnp.float32))
    others = {
        "reference",
        "reward models",
        "critic, float32",
        "drafter",
        "key-value cache of the drafter",
    }
    assert not others & names.keys()


def test_the_larger_of_the_policys_and_the_critics_gradient_counts(tiny, config):
    large = dataclasses.replace(tiny, ffn_width=1024)

    def gradients(*models) -> int:
        parts = memory.plan(config, ModelConfigs(*models), ONE, jnp.float32)
        return by_name(parts)["gradients, float32"]

    assert gradients(tiny) < gradients(tiny, None, large)
    assert gradients(large) == gradients(large, None, tiny)


def test_reward_models_are_always_there_and_add_up(tiny, config):
    reward = dataclasses.replace(tiny, scalar_head=True, tied=False)

    def rewards(*models) -> int:
        parts = memory.plan(config, ModelConfigs(tiny, rewards=models), ONE, jnp.float32)
        return next(
            part.bytes for part in parts if part.name == "reward models" and part.stage == "always"
        )

    assert rewards(reward, reward) == 2 * rewards(reward)


def test_the_peak_is_what_is_always_there_and_the_larger_stage():
    parts = [memory.Part(name, stage, size, "") for name, stage, size in [
        ("a", "always", 100), ("b", "generation", 200), ("c", "training", 400),
        ("d", "training", 100), ("e", "inference", 300), ("f", "training", 1),
    ]]  # fmt: skip
    assert memory.peak(parts) == ("training", 601)
    lines = memory.table(parts)
    assert lines[-1].endswith("in training")
    # f is too small to matter
    assert [line.split()[-1] for line in lines[:5]] == ["a", "b", "c", "d", "e"]


def test_what_does_not_fit_says_what_to_change(config):
    config.generation.update(max_rows=1024, max_new_tokens=4096)
    parts = memory.plan(config, ModelConfigs(LLAMA_8B), ONE | dict(fsdp=8), jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"in generation and has 80.0 GB; .* key-value cache .* lower generation.max_rows",
    ):
        memory.check(parts, 80e9)
    memory.check(parts, 1e15)


def test_remat_and_more_shards_need_less(config):
    def kept(remat: bool, fsdp: int) -> int:
        config.training.remat = remat
        parts = memory.plan(config, ModelConfigs(LLAMA_1B), ONE | dict(fsdp=fsdp), jnp.bfloat16)
        return by_name(parts)["activations kept by layer"]

    assert kept(True, 8) < kept(True, 4) < kept(False, 4)


def test_device_memory_is_asked_of_the_config_first(config):
    assert memory.device_memory(config, jax.devices("cpu")[0]) is None
    config.mesh.device_memory_gb = 2.5
    assert memory.device_memory(config, jax.devices("cpu")[0]) == 2.5e9


@pytest.mark.parametrize("name", LARGE)
def test_the_large_configs_are_valid_and_fit_their_devices(name, tmp_path):
    models, devices, gigabytes = LARGE[name]
    config = load(name)
    assert config.mesh.device_memory_gb <= gigabytes
    memory.check(planned(name), config.mesh.device_memory_gb * memory.GIGA)
    config.data.train = config.data.eval = str(tmp_path / "prompts.jsonl")
    pathlib.Path(config.data.train).write_text('{"prompt": "a"}\n')
    config.reward.functions = ("builtins:len",)
    config.reward.models = ("REWARD_MODEL",) * len(models.rewards)
    validation.validate(config, devices)
    validation.validate_models(config, models)


@pytest.mark.parametrize("name", LARGE)
def test_the_figures_in_the_docstrings_are_the_predicted_ones(name):
    parts = planned(name)
    sizes = {
        stage: memory.total(parts, stage) / memory.GIGA for stage in ("generation", "training")
    }
    figures = (
        f"{sizes['generation']:.1f} GB in generation and {sizes['training']:.1f} GB in training"
    )
    label = name.partition(":")[2]
    assert re.search(rf"^{label}.*\b{figures}\b", path_of(name).read_text(), re.MULTILINE)
