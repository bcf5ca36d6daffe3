"""Predicted memory equals what is allocated, where that can be told, and is enough for each
config.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import call_programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shipped_configs import (
    LARGE,
    LLAMA_1B,
    LLAMA_8B,
    TWO_LAYERS,
    by_name,
    everywhere,
    load,
    path_of,
)

from rlhf_jax import mesh
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.config import default
from rlhf_jax.generation import rows, scheduler
from rlhf_jax.generation.speculative import tree
from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.memory import estimate, host
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.mesh import Layout
from rlhf_jax.models import transformer
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.planner.shapes import model_shapes
from rlhf_jax.runtime.host_memory import host_memory
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.packing import pack
from rlhf_jax.setup import sample_checks, validation
from rlhf_jax.setup.models import critic_of
from rlhf_jax.training.distill import DISTILLATION, student_config, student_of
from rlhf_jax.training.gradients import accumulate
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfigs

pytestmark = pytest.mark.usefixtures("compiled_well")


def planned(name: str) -> list[memory_parts.Part]:
    """A large config's plan in bfloat16."""
    config = load(name)
    sizes = LARGE[name]
    shape = mesh.sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, sizes.devices)
    return everywhere(config, sizes.models, planning(jnp.bfloat16, **shape))


def planning(dtype: Any = jnp.float32, **shape: int) -> Layout:
    """A layout on devices that are not there: one, but for the sizes of some axes."""
    return Layout(mesh.abstract_mesh(dict.fromkeys(mesh.AXES, 1) | shape), dtype=jnp.dtype(dtype))


def held(tree) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture
def config():
    config = default()
    config.data.max_prompt_tokens = 32
    config.generation.max_new_tokens = 32
    return config


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_weights_optimizer_and_caches_are_exact(tiny, config, shape):
    devices = mesh.make_mesh(*shape)
    layout = Layout(devices)
    model = transformer.init(jax.random.key(0), tiny)
    policy = jax.device_put(model, model_shardings(model, layout))
    critic = critic_of(model)
    critic = jax.device_put(critic, model_shardings(critic, layout))
    half = transformer.cast(model, jnp.bfloat16)
    copy = jax.device_put(half, model_shardings(half, Layout(devices, "generation")))
    config.generation.strategy = "lookup-chain-4"
    config.generation.history_tokens = 0
    config.algorithm.name = "ppo"
    half_layout = dataclasses.replace(layout, dtype=jnp.dtype(jnp.bfloat16))
    parts = everywhere(config, ModelConfigs(tiny, tiny, {"critic": tiny}), half_layout)
    cache_length = scheduler.cache_length_for(64, [tree.parse(config.generation.strategy)], layout)
    state = rows.empty(tiny, tiny, 32, cache_length, 0, 0, half_layout)
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


def test_samples_that_are_not_chosen_are_not_scored_and_pairs_are_whole():
    models = ModelConfigs(TWO_LAYERS)
    work = []
    for name in ("grpo", "online_dpo"):
        config = default(name)
        config.data.max_prompt_tokens = config.generation.max_new_tokens = 32
        config.generation.update(prompts_per_step=2, samples_per_prompt=16)
        parts = everywhere(config, models, planning())
        work.append(by_name(parts)["one layer at work, or logits"])
    assert 0.3 * work[0] < work[1] < 0.7 * work[0], "of four samples, not eight at a time"

    run = PlannedRun(config, models, planning(), remat=True)
    assert (run.line_tokens, run.micro_batches) == (8 * 64, 1)
    config.training.microbatch_rows = 1
    assert run.line_tokens == 32 + 2 * 32, "a prompt and both answers"
    tokens = np.tile(np.arange(64, dtype=np.int32), (2, 1))
    pair = Sequences(tokens, tokens > 31, np.zeros(2, np.int32))
    settings = TrainingSettings.from_config(config, Layout(), remat=True)
    (packed,) = pack(pair, settings.extent, 64, 1, whole_groups=True)
    assert packed.batch.tokens.shape == (1, run.line_tokens)


def test_parts_that_are_not_there_are_not_listed(tiny, config):
    config.kl.coefficient = 0.0
    names = by_name(everywhere(config, ModelConfigs(tiny), planning()))
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
    config.algorithm.name = "ppo"

    def gradients(policy, **critics) -> int:
        parts = everywhere(config, ModelConfigs(policy, critics=critics), planning())
        return by_name(parts)["gradients, float32"]

    assert gradients(tiny) < gradients(tiny, critic=large)
    assert gradients(large) == gradients(large, critic=tiny)


def test_reward_models_are_always_there_and_add_up(tiny, config):
    reward = dataclasses.replace(tiny, scalar_head=True, tied=False)

    def rewards(*models) -> int:
        parts = everywhere(config, ModelConfigs(tiny, rewards=models), planning())
        return next(
            part.bytes for part in parts if part.name == "reward models" and part.stage == "always"
        )

    assert rewards(reward, reward) == 2 * rewards(reward)


def test_models_that_wait_on_the_host_count_while_they_score(tiny, config):
    models = ModelConfigs(tiny, rewards=(dataclasses.replace(tiny, scalar_head=True, tied=False),))

    def stages() -> set[str]:
        parts = everywhere(config, models, planning())
        return {part.stage for part in parts if part.name in ("reference", "reward models")}

    assert stages() == {"always"}
    config.mesh.idle_on_host = True
    assert stages() == {"inference"}


def test_the_peak_is_what_is_always_there_and_the_larger_stage():
    parts = [memory_parts.Part(name, stage, size, "") for name, stage, size in [
        ("a", "always", 100), ("b", "generation", 200), ("c", "training", 400),
        ("d", "training", 100), ("e", "inference", 300), ("f", "training", 1),
    ]]  # fmt: skip
    assert memory_parts.peak(parts) == ("training", 601)
    lines = memory_parts.table(parts)
    assert lines[-1].endswith("in training")
    # f is too small to matter
    assert [line.split()[-1] for line in lines[:5]] == ["a", "b", "c", "d", "e"]


def test_what_does_not_fit_says_what_to_change(config):
    config.generation.update(max_rows=1024, max_new_tokens=4096)
    parts = everywhere(config, ModelConfigs(LLAMA_8B), planning(jnp.bfloat16, fsdp=8))
    with pytest.raises(
        ValueError,
        match=r"in generation and has 80.0 GB; .* key-value cache .* lower generation.max_rows",
    ):
        memory_parts.check(parts, 80e9)
    memory_parts.check(parts, 1e15)


def test_remat_and_more_shards_need_less(config):
    def kept(remat: str, fsdp: int) -> int:
        config.training.remat = remat
        parts = everywhere(config, ModelConfigs(LLAMA_1B), planning(jnp.bfloat16, fsdp=fsdp))
        return by_name(parts)["activations kept by layer"]

    assert kept("on", 8) < kept("on", 4) < kept("off", 4)


def test_remat_is_settled_by_the_plan(config):
    where = ModelConfigs(LLAMA_1B), planning(jnp.bfloat16, fsdp=4)
    parts = everywhere(config, *where, remat=False)
    _, without = memory_parts.peak(parts)
    assert estimate.settle_remat(config, parts, without / estimate.ROOM * 1.01)[0] is False
    remat, reason = estimate.settle_remat(config, parts, without)
    assert remat and f"{without / 1e9:.1f} of {without / 1e9:.1f} GB" in reason
    assert estimate.settle_remat(config, parts, None)[0] is True
    for asked in ("on", "off"):
        config.training.remat = asked
        again, reason = estimate.settle_remat(config, parts, 1.0)
        assert again is (asked == "on") and "training.remat is set" in reason


def test_device_memory_is_asked_of_the_config_first(config):
    assert estimate.device_memory(config, jax.devices("cpu")[0]) is None
    config.mesh.device_memory_gb = 2.5
    assert estimate.device_memory(config, jax.devices("cpu")[0]) == 2.5e9


LIMITS = {  # the lines of /proc/self/cgroup, files below /sys/fs/cgroup, and the bytes they leave
    "none": ("", {}, None),
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "5000\n"}, 5000),
    "version 2, above": ("0::/a/b\n", {"a/memory.max": "4000", "a/b/memory.max": "max\n"}, 4000),
    "version 2, in a container": ("0::/\n", {"memory.max": "3000\n"}, 3000),
    "version 1": ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2000\n"}, 2000),
    "version 1, in a container": (
        "5:cpu:/x\n4:cpu,memory:/docker/x\n0::/\n",
        {"memory/memory.limit_in_bytes": "1000\n"},
        1000,
    ),
    "version 1, without a limit": (
        "4:memory:/a\n",
        {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"},
        None,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_control_group_says_how_much_of_the_hosts_memory_is_ours(name, tmp_path):
    lines, files, known = LIMITS[name]
    whole = host_memory(tmp_path)  # where neither file is
    assert whole > 1e8
    for path, text in ({"proc/self/cgroup": lines} | files).items():
        file = tmp_path / (path if path.startswith("proc") else f"sys/fs/cgroup/{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert host_memory(tmp_path) == (whole if known is None else known)


def test_a_host_holds_all_its_devices_and_the_texts(config, monkeypatch):
    monkeypatch.setattr(host, "host_memory", lambda: 10e9)
    part = memory_parts.Part("cache", "generation", 2 * 10**9, "lower rows")
    host.check(config, [(4, [part])], held_out=0, on_cpu=True)
    with pytest.raises(
        ValueError, match=r"^The host needs 12.0 GB in generation and has 10.0 GB; .*: lower rows.$"
    ):
        host.check(config, [(6, [part])], held_out=0, on_cpu=True)
    host.check(config, [(6, [part])], held_out=0)
    reference = dataclasses.replace(part, name="reference", hint=memory_parts.SPLIT_OR_OFFLOAD)
    host.check(config, [(6, [reference])], held_out=0)
    config.mesh.idle_on_host = True
    with pytest.raises(
        ValueError, match=r"reference, waiting on the host .12.0 GB.: set mesh.idle"
    ):
        host.check(config, [(6, [reference])], held_out=0)
    host.check(config, [(4, [reference]), (8, [part])], held_out=0)
    with pytest.raises(ValueError, match=r"reference, waiting on the host .12.0 GB."):
        host.check(config, [(8, [part]), (6, [reference])], held_out=0)
    config.generation.prompts_per_step = 10**9
    with pytest.raises(ValueError, match=r"samples of a step, on the host .*prompts_per_step"):
        host.check(config, [], held_out=0)


@pytest.mark.parametrize("name", LARGE)
def test_the_large_configs_are_valid_and_fit_their_devices(name, tmp_path):
    models, devices, gigabytes = LARGE[name]
    config = load(name)
    assert config.mesh.device_memory_gb <= gigabytes
    memory_parts.check(planned(name), config.mesh.device_memory_gb * memory_parts.GIGA)
    config.data.train = config.data.eval = str(tmp_path / "prompts.jsonl")
    pathlib.Path(config.data.train).write_text('{"prompt": "a"}\n')
    config.reward.functions = ("builtins:len",)
    config.reward.models = ("REWARD_MODEL",) * len(models.rewards)
    validation.validate(config, devices)
    sample_checks.check_models(config, models)


@pytest.mark.parametrize("name", LARGE)
def test_the_figures_in_the_docstrings_are_the_predicted_ones(name):
    parts = planned(name)
    sizes = {
        stage: memory_parts.total(parts, stage) / memory_parts.GIGA
        for stage in ("generation", "training")
    }
    figures = (
        f"{sizes['generation']:.1f} GB in generation and {sizes['training']:.1f} GB in training"
    )
    label = name.partition(":")[2]
    assert re.search(rf"^{label}.*\b{figures}\b", path_of(name).read_text(), re.MULTILINE)


class Formula(NamedTuple):
    """An estimated part, a run of two layers in float32 whose program needs it, and that program.

    `exact` are the parts that this program holds besides. `most` is how far above the compiler's
    figure the estimate may be; below it at most 15 %.
    """

    part: str
    exact: tuple[str, ...]
    program: Callable
    shape: tuple[int, int, int]  # tokens of prompt and response, and the vocabulary
    most: float


def update_program(at, pod):
    policy = model_shapes(at.models.policy, at.layout)
    return pod.gradient_program(at, policy, POLICY_LOSS)


def critic_program(at, pod):
    critic = pod.critic_weights(at.models.critics["critic"], at.layout)
    return pod.gradient_program(at, critic, CRITIC_LOSS)


def round_program(at, pod):
    return pod.round_program(at)


def prefill_program(at, pod):
    policy = model_shapes(at.models.policy, at.generation)
    width = at.config.data.max_prompt_tokens
    prompts = jnp.zeros((8, width), jnp.int32), jnp.zeros(8, jnp.int32)
    return rows.prefill.lower(policy, None, *prompts, layout=at.generation).compile()


def score_program(at, pod):
    policy = model_shapes(at.models.policy, at.layout)
    return score_packed.lower(policy, pod.packed_of(at), temperature=1.0).compile()


def student_program(at, pod):
    policy = model_shapes(at.models.policy, at.layout)
    student = jax.eval_shape(lambda: student_of(transformer.init(jax.random.key(0), TWO_LAYERS), 1))
    packed = pod.packed_of(at)
    hidden = jnp.zeros((*packed.mask.shape, TWO_LAYERS.width))
    key = jnp.zeros((*packed.mask.shape, 2), jnp.uint32)
    known = {"noise_keys": key, "positions": packed.targets, "total_tokens": jnp.ones(())}
    batch = packed.with_columns(hidden=hidden, **known)
    ends = dataclasses.replace(policy, layers=())
    settings = TrainingSettings(microbatch_rows=at.config.training.microbatch_rows)
    return accumulate.lower(
        None, student, batch, ends, loss=DISTILLATION, settings=settings
    ).compile()


LAYER = "one layer at work"
KEPT = "activations kept by layer"
GRADIENTS = ("gradients, float32", "weights and gradients of a micro-batch")
TRAINED = (*GRADIENTS, KEPT)
STATE = ("key-value cache of the policy",)
PROMPTS = ("prefilled prompts",)
BOTH = "a layer at work, or logits of both"
OWN = ("student's gradients",)
LONG = (256, 256, 512)
PROMPT = (512, 16, 512)
RESPONSE = (32, 512, 512)
WIDE = (32, 32, 32_768)
BLOCKS = (32, 256, 32_768)  # of logits, one after the other
HEAD = (32, 256, 131_072)  # the head counts more than a layer
# A CPU holds the logits of a round once, a TPU twice.
FORMULAS = {
    "update, layer": Formula(LAYER, TRAINED, update_program, LONG, 0.15),
    "update, no remat": Formula(KEPT, (*GRADIENTS, LAYER), update_program, LONG, 0.15),
    "update, head": Formula("head and a chunk of logits", TRAINED, update_program, HEAD, 0.2),
    "critic": Formula(LAYER, TRAINED, critic_program, LONG, 0.15),
    "round, scores": Formula("a round at work", STATE, round_program, RESPONSE, 0.15),
    "round, logits": Formula("a round at work", STATE, round_program, WIDE, 1.0),
    "prefill": Formula("a prefill at work", PROMPTS, prefill_program, PROMPT, 0.15),
    "score, layer": Formula("one layer at work, or logits", (), score_program, LONG, 0.15),
    "score, logits": Formula("one layer at work, or logits", (), score_program, BLOCKS, 0.15),
    "student, layer": Formula(BOTH, OWN, student_program, LONG, 0.25),
    "student, logits": Formula(BOTH, OWN, student_program, BLOCKS, 0.15),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_each_formula_is_near_what_the_compiler_says(name, config):
    formula = FORMULAS[name]
    prompt, response, vocab_size = formula.shape
    config.data.max_prompt_tokens = prompt
    config.generation.update(max_new_tokens=response, history_tokens=0, strategy="lookup-chain-16")
    config.training.remat = "off" if name == "update, no remat" else "on"
    models = ModelConfigs(dataclasses.replace(TWO_LAYERS, vocab_size=vocab_size))
    if formula.program is critic_program:
        models = models._replace(
            critics={"critic": dataclasses.replace(TWO_LAYERS, scalar_head=True)}
        )
    if formula.program is student_program:
        config.generation.strategy = "model-chain-4"
        config.drafter.update(layers=1, learning_rate=1e-3)
        config.algorithm.name = "distill"
        models = models._replace(drafter=student_config(models.policy, 1))
    at = call_programs.Target(config, models, Layout(mesh.make_mesh(devices=jax.devices()[:1])))
    parts = by_name(everywhere(*at))
    sizes = formula.program(at, call_programs).memory_analysis()
    needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    error = parts[formula.part] / (needed - sum(parts[exact] for exact in formula.exact)) - 1
    print(f"{name}: {error:+.1%}")
    assert -0.15 <= error <= formula.most
