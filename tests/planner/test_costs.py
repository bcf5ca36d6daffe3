"""Costs by formula: FLOPs against the jaxpr's, bytes against compiled programs', and seconds."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from call_programs import Target, gradient_program, master, micro_batch, packed_of, score_program
from compilers import devices, needs_libtpu
from shipped_configs import LLAMA_8B, load

from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.config import default
from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.mesh import AXES, ONE_DEVICE, Layout, abstract_mesh, make_mesh
from rlhf_jax.models import transformer
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.flops import count_flops
from rlhf_jax.planner.chips import ASSUMED, TPUS
from rlhf_jax.planner.describe import predict_calls
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.search.collectives import find_collectives
from rlhf_jax.planner.search.costs import forward_flops, gradient_flops
from rlhf_jax.planner.search.traffic import ShardedModel, Tokens, forward_traffic, gradient_traffic
from rlhf_jax.planner.shapes import model_shapes, pairs_of_texts
from rlhf_jax.training.gradients import accumulate
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfig, ModelConfigs

pytestmark = pytest.mark.usefixtures("compiled_well")

TOLERANCE = 0.15
SMALL = ModelConfig("llama", 1024, 512, 2048, 4, 8, 8, 64, 8192)
TWO_OF_8B = dataclasses.replace(LLAMA_8B, num_layers=2)


def target(model: ModelConfig, layout: Layout, rows: int, tokens: int, remat: str) -> Target:
    """A run whose prompts and responses have half of the tokens each."""
    config = default()
    config.data.max_prompt_tokens = tokens // 2
    config.generation.max_new_tokens = tokens // 2
    config.training.update(microbatch_rows=rows, remat=remat)
    return Target(config, ModelConfigs(model), layout)


@pytest.mark.parametrize("tokens", [128, 1536])
def test_flops_of_a_forward_pass_are_the_jaxprs(tokens):
    at = target(SMALL, ONE_DEVICE, 2, tokens, "on")
    model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), SMALL))
    score = functools.partial(score_packed, temperature=1.0)
    turns = pairs_of_texts(at.config, ONE_DEVICE, 2)
    found = count_flops(score, model, jax.eval_shape(lambda: packed_of(at)), turns=turns)
    formula = forward_flops(SMALL, 2, tokens, tokens, block=packed_block(ONE_DEVICE))
    assert abs(formula / found - 1) < 0.02


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("tokens", [128, 1536])
def test_flops_of_a_gradient_are_the_jaxprs(tokens, remat):
    at = target(SMALL, ONE_DEVICE, 2, tokens, "on")
    model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), SMALL))
    settings = TrainingSettings(microbatch_rows=2, remat=remat)
    gradient = functools.partial(accumulate, None, loss=POLICY_LOSS, settings=settings)
    turns = pairs_of_texts(at.config, ONE_DEVICE, 2)
    found = count_flops(gradient, model, jax.eval_shape(lambda: micro_batch(at)), turns=turns)
    block = packed_block(ONE_DEVICE)
    formula = gradient_flops(SMALL, 2, tokens, tokens, remat=remat, block=block)
    assert abs(formula / found - 1) < 0.03


# slices, data, fsdp, tensor
SHARDINGS = [
    (1, 1, 8, 1), (1, 1, 1, 8), (1, 1, 4, 2), (1, 1, 2, 4), (1, 2, 4, 1), (1, 2, 2, 2),
    (1, 4, 2, 1), (1, 8, 1, 1), (1, 2, 1, 4), (1, 4, 1, 2), (2, 1, 4, 1), (2, 2, 2, 1),
    (2, 1, 2, 2), (4, 1, 2, 1),
]  # fmt: skip


def assert_near(at: Target, platform: str, shape: tuple[int, ...]) -> None:
    """Bytes that a device receives in inference and in a gradient, within the tolerance."""
    rows = at.config.training.microbatch_rows // at.layout.row_shards
    response = at.config.generation.max_new_tokens
    line = rows * (at.config.data.max_prompt_tokens + response)
    tokens = Tokens(line, line)
    model = model_shapes(at.models.policy, master(at.layout))
    remat = at.config.training.remat == "on"
    sharded = ShardedModel(at.models.policy, at.layout, platform)
    for what, program, formula in [
        ("forward", score_program(at, model), forward_traffic(sharded, tokens)),
        (
            "gradient",
            gradient_program(at, model, POLICY_LOSS),
            gradient_traffic(sharded, tokens, remat=remat),
        ),
    ]:
        text = program.as_text()
        assert text is not None
        counted = sum(one.received for one in find_collectives(text))
        print(f"{shape} {what}: {formula.total / 1e6:.1f} MB, {counted / 1e6:.1f} MB compiled")
        assert abs(formula.total - counted) <= TOLERANCE * counted + 1e4


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("shape", "remat"),
    [
        (SHARDINGS[0], "on"),
        *(
            pytest.param(one, "on", marks=[pytest.mark.slow] + [pytest.mark.long] * (place % 3 > 0))
            for place, one in enumerate(SHARDINGS[1:])
        ),
        pytest.param(SHARDINGS[1], "off", marks=pytest.mark.slow),
        *(pytest.param(one, "off", marks=pytest.mark.long) for one in SHARDINGS[2:6]),
    ],
)
def test_a_sharding_sends_what_the_formula_says(shape, remat):
    slices, data, fsdp, tensor = shape
    layout = Layout(make_mesh(data, fsdp, tensor, slices=slices))
    assert_near(target(SMALL, layout, 16, 128, remat), "cpu", shape)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("topology", "shape", "width"),
    [
        pytest.param("v5p:2x2x2", (1, 4, 2), 4096, marks=pytest.mark.long),
        pytest.param("v5p:2x2x2", (1, 8, 1), 4096, marks=pytest.mark.long),
        pytest.param("v5p:2x2x2", (2, 4, 1), 4096, marks=pytest.mark.long),
        pytest.param("v5p:2x2x2", (2, 2, 2), 4096, marks=pytest.mark.long),
        pytest.param("v5p:4x4x4", (1, 16, 4), 4096, marks=pytest.mark.long),
        # a shard of the width is half of a register's lanes: gathered, and of many shards summed
        pytest.param("v5p:2x2x2", (1, 4, 2), 256, marks=pytest.mark.long),
        pytest.param("v5p:2x2x2", (1, 8, 1), 512, marks=pytest.mark.long),
        pytest.param("v5p:4x4x4", (1, 32, 2), 2048, marks=pytest.mark.long),
        pytest.param("v5p:4x4x4", (1, 64, 1), 4096, marks=pytest.mark.long),
    ],
)
def test_a_tpu_sends_what_the_formula_says(topology, shape, width):
    mesh = make_mesh(*shape, devices=devices(topology))
    layout = Layout(mesh, dtype=jnp.dtype(jnp.bfloat16))
    rows = max(8, layout.row_shards)
    model = dataclasses.replace(TWO_OF_8B, width=width)
    assert_near(target(model, layout, rows, 3072, "on"), "tpu", shape)


def planned(name: str, chips: int, models: ModelConfigs, **shape: int) -> PlannedRun:
    """A config's run on chips that are not here."""
    sizes = dict.fromkeys(AXES, 1) | shape
    assert sizes["data"] * sizes["fsdp"] * sizes["tensor"] * sizes["slices"] == chips
    layout = Layout(abstract_mesh(sizes), dtype=jnp.dtype(jnp.bfloat16))
    return PlannedRun(load(name), models, layout, remat=True)


def seconds(run: PlannedRun, text: str) -> dict[str, float]:
    """Predicted seconds by call."""
    return {call.name: call.seconds for call in predict_calls(run, parse_hardware(text))}


def test_each_call_of_an_iteration_is_predicted():
    reward = dataclasses.replace(LLAMA_8B, scalar_head=True)
    models = ModelConfigs(LLAMA_8B, critics={"critic": LLAMA_8B}, rewards=(reward,))
    run = planned("ppo_llama31_8b:tpu", 4, models, fsdp=4)
    run.config.reward.models = ("a classifier",)
    ppo = seconds(run, "v5p:2x2x1")
    assert set(ppo) == {
        "generation",
        "reward_inference",
        "policy_inference",
        "reference_inference",
        "critic_inference",
        "policy_training",
        "critic_training",
    }
    assert ppo["critic_inference"] < ppo["reference_inference"] < ppo["policy_training"]
    run = planned("grpo_llama31_8b:tpu", 4, ModelConfigs(LLAMA_8B), fsdp=4)
    run.config.training.minibatches = 1
    run.config.kl.coefficient = 0.0
    assert set(seconds(run, "v5p:2x2x1")) == {"generation", "policy_training"}


def test_one_chip_takes_what_its_figures_say():
    """A chip alone sends nothing, so it multiplies, or reads weights and caches."""
    run = planned("grpo_llama31_8b:tpu", 1, ModelConfigs(LLAMA_8B))
    chip = TPUS["v5p"]
    calls = {call.name: call for call in predict_calls(run, parse_hardware("v5p:1"))}
    assert all(call.received == 0 for call in calls.values())
    update = calls["policy_training"]
    assert update.seconds == pytest.approx(update.flops / (chip.flops * ASSUMED.training))
    scored = calls["reference_inference"]
    assert scored.seconds == pytest.approx(scored.flops / (chip.flops * ASSUMED.inference))
    # 512 samples in turns of 128 rows; 8 B weights but the embedding, 128 kB a token of context
    rounds = 4 * 2048
    reads = 2 * 7.5e9 + 128 * 2048 * 131_072
    least = rounds * reads / (chip.memory_bandwidth * ASSUMED.decoding)
    assert least < calls["generation"].seconds < 1.4 * least


def test_more_chips_take_less_time():
    models = ModelConfigs(LLAMA_8B)
    few = seconds(planned("grpo_llama31_8b:tpu", 4, models, fsdp=4), "v5p:2x2x1")
    many = seconds(planned("grpo_llama31_8b:tpu", 8, models, fsdp=8), "v5p:2x2x2")
    assert all(many[name] < few[name] for name in few)


def test_rows_that_are_left_over_come_in_a_later_micro_batch():
    """Of 64 rows 48 devices have one each, so that 512 samples take 11 micro-batches of 48."""

    def flops(count: int, **mesh: int) -> float:
        run = planned("grpo_llama31_8b:tpu", count, ModelConfigs(LLAMA_8B), **mesh)
        run.config.training.microbatch_rows = 64
        calls = predict_calls(run, parse_hardware("v5p:4x4x4").part(count))
        return next(call.flops for call in calls if call.name == "reference_inference")

    assert flops(48, data=3, fsdp=16) == pytest.approx(flops(64, fsdp=64) * 11 * 48 / 512)


def test_what_is_sent_over_a_slow_network_is_waited_for():
    run = planned("grpo_llama31_8b:gpu", 64, ModelConfigs(LLAMA_8B), fsdp=8, tensor=8)
    near = seconds(run, "gpu:64:h100")
    far = seconds(run, "gpu:8x8:h100")
    assert near["generation"] == far["generation"]
    assert far["policy_training"] > near["policy_training"]
