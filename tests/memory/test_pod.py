"""Predicted memory against the compiler's: the large configs for a TPU slice that is not there, the
small for a CPU.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from call_programs import Target, critic_weights, gradient_program, master, round_program
from compilers import CHIPS, EIGHT, devices, needs_libtpu
from shipped_configs import CONFIGS, by_name, everywhere, load

from benchmarks.compiled import KERNELS, LLAMA_8B, lower_round
from benchmarks.shapes import SLOTS
from pallas_kernels.dispatch import Kernels
from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.mesh import Layout
from rlhf_jax.planner.shapes import model_shapes
from rlhf_jax.types import ModelConfigs

TOLERANCE = 0.15

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached", "compiled_well")]
ON_CPU = ("quickstart", "quickstart_ppo")
ON_TPU = ("grpo_llama32_1b", "grpo_gsm8k", "grpo_llama31_8b:tpu", "ppo_llama31_8b:tpu")


def target(name: str) -> Target:
    """The quickstarts run on a CPU; of a TPU slice one chip stands for one GPU."""
    config = load(name)
    models = CONFIGS[name].models
    count = CONFIGS[name].devices
    if name in ON_CPU:
        return Target(config, models, Layout(meshes.make_mesh(devices=jax.devices()[:count])))
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    mesh = meshes.make_mesh(*shape, devices(CHIPS["v5p"])[:count])
    return Target(config, models, Layout(mesh, dtype=jnp.dtype(jnp.bfloat16)))


def needed(compiled) -> int:
    """Bytes a device holds while the program runs."""
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def assert_near(predicted: int, compiled: int, what: str) -> None:
    error = predicted / compiled - 1
    print(
        f"{what}: {predicted / 1e9:.3f} GB predicted, {compiled / 1e9:.3f} GB compiled,"
        f" {error:+.1%}"
    )
    assert abs(error) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [*ON_CPU, *(pytest.param(name, marks=[needs_libtpu, pytest.mark.long]) for name in ON_TPU)],
)
def test_predicted_memory_is_the_compilers(name):
    """Of each stage's largest program, alone: what else is there is exact, and would only make the
    error smaller.
    """
    at = target(name)
    parts = everywhere(*at)
    sizes = by_name(parts)
    own = {
        stage: sum(part.bytes for part in parts if part.stage == stage)
        for stage in memory_parts.STAGE_NAMES
    }
    own["training"] -= sizes.get("the policy's gradients, waiting", 0)

    policy = model_shapes(at.models.policy, master(at.layout))
    training = needed(gradient_program(at, policy, POLICY_LOSS))
    if name in ON_CPU and at.models.critics:  # the large one is as its policy, without the head
        critic = critic_weights(at.models.critics["critic"], at.layout)
        if "the policy's gradients, waiting" in sizes:  # while the critic's are computed
            training = needed(gradient_program(at, critic, CRITIC_LOSS))
    assert_near(sizes["policy, float32"] + own["training"], training, f"{name} in training")

    generation = needed(round_program(at))
    assert_near(own["generation"] - sizes["prefilled prompts"], generation, f"{name} in generation")


@needs_libtpu
@pytest.mark.long
def test_without_remat_a_tpu_keeps_the_activations_that_are_foreseen():
    """Of two layers, whose activations are then the most of what a gradient needs."""
    at = target("grpo_llama31_8b:tpu")
    short = dataclasses.replace(at.models.policy, num_layers=2)
    at = at._replace(models=at.models._replace(policy=short))
    foreseen = {}
    for at.config.training.remat in ("on", "off"):
        parts = everywhere(*at)
        training = sum(part.bytes for part in parts if part.stage == "training")
        foreseen[at.config.training.remat] = by_name(parts)["policy, float32"] + training
    assert foreseen["off"] > foreseen["on"] + 1e9
    policy = model_shapes(short, master(at.layout))
    compiled = needed(gradient_program(at, policy, POLICY_LOSS))
    assert_near(foreseen["off"], compiled, "two layers of the 8B without remat in training")


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "fsdp", "remat"),
    [("v5p:4x4x4", 64, "on"), ("v5p:4x4x4", 64, "off"), ("v5p:2x2x2", 8, "on")],
)
def test_memory_is_foreseen_however_far_an_8b_model_is_split(topology, fsdp, remat):
    """With one row on each device."""
    config = load("grpo_llama31_8b:tpu")
    config.drafter.path = ""
    config.generation.strategy = "plain"
    config.training.update(microbatch_rows=fsdp, remat=remat)
    mesh = meshes.make_mesh(fsdp=fsdp, devices=devices(topology))
    layout = Layout(mesh, dtype=jnp.dtype(jnp.bfloat16))
    at = Target(config, ModelConfigs(CONFIGS["grpo_llama31_8b:tpu"].models.policy), layout)
    parts = everywhere(*at)
    foreseen = sum(part.bytes for part in parts if part.stage == "training")
    policy = model_shapes(at.models.policy, master(layout))
    compiled = needed(gradient_program(at, policy, POLICY_LOSS))
    what = f"8B over {fsdp} with remat {remat} in training"
    assert_near(by_name(parts)["policy, float32"] + foreseen, compiled, what)


# eight drafts a row
BATCH = 64
NODES = 9


def round_of_8b(chip: str, layers: int, kernels: Kernels):
    """Memory of a round of the first layers of an 8B model, with heads and vocabulary split over
    eight chips.
    """
    sizes = lower_round(EIGHT[chip], layers, kernels, BATCH, NODES).compile().memory_analysis()
    print(f"{chip}, {layers} layers, {kernels}: {sizes}")
    assert sizes is not None
    return sizes


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "layers"),
    [
        ("v5e", 4),
        pytest.param("v6e", 4, marks=pytest.mark.long),
        pytest.param("v5p", LLAMA_8B.num_layers, marks=pytest.mark.long),
    ],
)
def test_a_round_of_an_8b_model_over_eight_chips_compiles_with_the_kernels(chip, layers):
    """And writes its caches in place."""
    cache = 2 * 2 * layers * BATCH * SLOTS * LLAMA_8B.head_dim  # one of eight groups, in bfloat16
    assert round_of_8b(chip, layers, KERNELS).alias_size_in_bytes >= cache


@needs_libtpu
@pytest.mark.long
def test_without_logits_a_round_needs_their_share_less():
    before, after = (
        round_of_8b("v5p", 4, kernels) for kernels in (Kernels(), Kernels(verify_head="tpu"))
    )
    share = 4 * BATCH * NODES * -(-LLAMA_8B.vocab_size // (8 * BLOCK)) * BLOCK
    print(
        f"temporary {before.temp_size_in_bytes / 1e6:.1f} MB,"
        f" {after.temp_size_in_bytes / 1e6:.1f} MB without logits"
    )
    assert before.temp_size_in_bytes - after.temp_size_in_bytes >= share - 4e6


@needs_libtpu
@pytest.mark.long
def test_a_round_with_all_kernels_needs_no_more_memory():
    """Windows are read as they lie, and caches where they lie: XLA had moved leaves into vector
    memory for a call.
    """
    before, after = (round_of_8b("v5e", 4, kernels) for kernels in (Kernels(), KERNELS))
    assert after.temp_size_in_bytes < before.temp_size_in_bytes
    assert after.peak_memory_in_bytes < before.peak_memory_in_bytes
