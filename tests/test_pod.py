"""A TPU slice without one: training of the large config compiles for it and needs the memory predicted."""

from __future__ import annotations

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest
from test_memory import LLAMA_1B, LLAMA_8B, by_name

from rlhf_jax import command_line, memory, mesh
from rlhf_jax.model import transformer
from rlhf_jax.model.attention import causal, partitioned
from rlhf_jax.training.update import UpdateConfig, accumulate, apply, init_train_state, make_optimizer
from rlhf_jax.types import Experience, Rollout

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "grpo_llama31_8b_tpu.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="compiling for a TPU needs its compiler: pip install -e '.[pod]'",
    ),
]


@pytest.fixture(autouse=True)
def uncached():
    """Programs of another machine can be stored but not read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    yield
    jax.config.update(name, before)


def placed(shapes, shardings):
    """Shapes that know where they lie."""

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)


def micro_batch(rows: int, slots: int) -> Experience:
    """One micro-batch of zeros."""
    per_token = jnp.zeros((rows, slots))
    rollout = Rollout(
        tokens=jnp.zeros((rows, slots), jnp.int32),
        mask=jnp.zeros((rows, slots), bool),
        logprobs=per_token,
        length=jnp.zeros(rows, jnp.int32),
        sample_id=jnp.zeros(rows, jnp.uint32),
    )
    return Experience(rollout, per_token, per_token, jnp.zeros(rows), per_token)


def needed(compiled) -> int:
    """Bytes a device holds while the program runs."""
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def test_training_of_the_8b_config_compiles_for_its_slice_and_fits():
    from jax.experimental import topologies

    config = command_line.load(str(CONFIG))
    devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    slice_mesh = mesh.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    slots = config.data.max_prompt_tokens + config.generation.max_new_tokens
    optimizer = make_optimizer(config.training.learning_rate)
    state = jax.eval_shape(lambda: init_train_state(transformer.init(jax.random.key(0), LLAMA_8B), optimizer))
    state = placed(state, mesh.model_shardings(state, slice_mesh, "training"))
    batch = jax.eval_shape(lambda: micro_batch(config.training.microbatch_rows, slots))
    batch = placed(batch, mesh.row_shardings(batch, slice_mesh))
    total = jax.ShapeDtypeStruct((), jnp.float32, sharding=mesh.replicated(slice_mesh))
    attend = partitioned(causal, slice_mesh, mesh.ROW_AXES, "tensor")
    settings = UpdateConfig(micro_rows=config.training.microbatch_rows, dtype=jnp.bfloat16, attend=attend)

    step = accumulate.lower(state.policy, state.policy, batch, total, config=settings).compile()
    parts = memory.plan(config, LLAMA_8B, LLAMA_1B, dict(slice_mesh.shape), jnp.bfloat16)
    predicted = sum(part.bytes for part in parts if part.name == "policy, float32" or part.stage == "training")
    assert 0.75 * predicted < needed(step) <= predicted

    step = apply.lower(state, state.policy, optimizer=optimizer).compile()
    state_and_gradients = 4 * by_name(parts)["policy, float32"]
    assert abs(needed(step) - state_and_gradients) < 0.01 * state_and_gradients
    assert memory.peak(parts)[1] < config.mesh.device_memory_gb * memory.GIGA
