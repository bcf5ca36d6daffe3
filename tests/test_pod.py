"""Predicted memory against the compiler's: the large configs for a TPU slice that is not there, the
small for a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from compilers import CHIPS, EIGHT, devices, needs_libtpu
from jax.sharding import NamedSharding, PartitionSpec
from test_memory import CONFIGS, by_name, everywhere, load

from benchmarks.compiled import KERNELS, LLAMA_8B, lower_round, placed, row_shapes, weights
from benchmarks.shapes import SLOTS
from pallas_kernels.dispatch import Kernels
from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting, rows, scheduler
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED
from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.inference.values import critic_of
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.mesh import Layout
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.planner.shapes import packed_zeros
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.gradients import Gradient, accumulate
from rlhf_jax.training.kinds import Loss
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, ModelConfig, ModelConfigs

TOLERANCE = 0.15

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached", "compiled_well")]
ON_CPU = ("quickstart", "quickstart_ppo")
ON_TPU = ("grpo_llama32_1b", "grpo_gsm8k", "grpo_llama31_8b:tpu", "ppo_llama31_8b:tpu")


class Target(NamedTuple):
    """A config, and what it is compiled for."""

    config: Config
    models: ModelConfigs
    layout: Layout

    @property
    def generation(self) -> Layout:
        """The same devices in the other role."""
        return dataclasses.replace(self.layout, role="generation")


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


def master(layout: Layout) -> Layout:
    """The layout of the weights that are trained."""
    return dataclasses.replace(layout, dtype=jnp.dtype(jnp.float32))


def replicated(layout: Layout) -> NamedSharding:
    """Whole on every device."""
    assert layout.mesh is not None
    return NamedSharding(layout.mesh, PartitionSpec())


def critic_weights(model: ModelConfig, layout: Layout) -> Model:
    """Shapes of the critic, which is a reward model or has a policy's trunk."""
    made = weights(model, master(layout))
    shapes = made if model.scalar_head else jax.eval_shape(critic_of, made)
    return placed(shapes, model_shardings(shapes, layout))


def packed_of(at: Target) -> PackedSequences:
    """A packed batch of as many tokens as a micro-batch may have."""
    return packed_zeros(at.config, at.layout, at.config.training.microbatch_rows, ())


def micro_batch(at: Target) -> PackedSequences:
    """One micro-batch of zeros."""
    packed = packed_of(at)
    of_token = ["weights", "advantages", "sampled_logprobs", "logprobs", "reference_logprobs"]
    of_token += ["values", "returns"] if at.models.critics else []
    of_batch = ("total_tokens", "total_sequences", "total_groups", "kl_weight")
    columns = dict.fromkeys(of_token, jnp.zeros(packed.mask.shape))
    return packed.with_columns(**columns, **dict.fromkeys(of_batch, jnp.zeros(())))


def gradient_program(at: Target, model: Model, loss: Loss):
    """A later micro-batch of a minibatch: the sum so far is there."""
    training = at.config.training
    batch = row_shapes(lambda: micro_batch(at), at.layout)
    settings = TrainingSettings(
        microbatch_rows=training.microbatch_rows, layout=at.layout, remat=training.remat != "off"
    )
    options = dict(loss=loss, settings=settings)
    metrics = jax.eval_shape(functools.partial(accumulate, None, **options), model, batch).metrics
    metrics = placed(metrics, jax.tree.map(lambda _: replicated(at.layout), metrics))
    return accumulate.lower(Gradient(model, metrics), model, batch, **options).compile()


def round_program(at: Target):
    """A round of generation with all rows and caches."""
    config = at.config
    generation = at.config.generation
    longest = config.data.max_prompt_tokens + generation.max_new_tokens
    choices = drafting.strategies(config)
    strategy = choices.strategies[
        choices.nodes.tolist().index(estimate.most_nodes(config, at.layout))
    ]
    slots = scheduler.cache_slots(longest, choices.strategies, at.generation)
    earlier = longest if "replay" in choices.drafters else 0
    empty = functools.partial(
        rows.empty, at.models.policy, at.models.drafter, generation.max_rows, slots
    )
    state = row_shapes(
        lambda: empty(generation.history_tokens, earlier, at.generation), at.generation
    )
    nodes = tree.as_data(strategy, generation.max_rows)
    nodes = placed(nodes, jax.tree.map(lambda _: replicated(at.layout), nodes))
    drafts = row_shapes(
        lambda: jnp.zeros((generation.max_rows, tree.bucket(strategy) - 1), jnp.int32),
        at.generation,
    )
    policy = weights(at.models.policy, at.generation)
    options = dict(truncation=UNTRUNCATED, stop_tokens=(0,), layout=at.generation)
    return run_round.lower(policy, state, drafts, None, nodes, **options).compile()


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

    policy = weights(at.models.policy, master(at.layout))
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
    policy = weights(short, master(at.layout))
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
    policy = weights(at.models.policy, master(layout))
    compiled = needed(gradient_program(at, policy, POLICY_LOSS))
    what = f"8B over {fsdp} with remat {remat} in training"
    assert_near(by_name(parts)["policy, float32"] + foreseen, compiled, what)


def score_program(at: Target, model: Model):
    """Log-probs of a packed batch under the policy."""
    half = placed(weights(at.models.policy, at.layout), model_shardings(model, at.layout))
    batch = row_shapes(lambda: packed_of(at), at.layout)
    return score_packed.lower(half, batch, temperature=1.0, layout=at.layout).compile()


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
