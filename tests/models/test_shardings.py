"""Shards of weights and rows have the right shapes, and a split model is the same function."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import devices, needs_libtpu
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax import mesh as meshes
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.mesh import Layout
from rlhf_jax.models import transformer
from rlhf_jax.models.families import FAMILIES, QWEN2, QWEN3, Family, weight_at
from rlhf_jax.models.shardings import model_shardings, unsplit
from rlhf_jax.types import ModelConfig

WEIGHTS = {**QWEN2.weights, **QWEN3.weights}
SHAPES = [(2, 2, 2), (1, 8, 1), (1, 4, 2), (8, 1, 1), (1, 1, 8)]


@pytest.fixture
def config(tiny, monkeypatch) -> ModelConfig:
    """Of a family with every weight that there is."""
    every = Family("every", "Every", weights=WEIGHTS)
    monkeypatch.setitem(FAMILIES, every.name, every)
    return dataclasses.replace(tiny, tied=False, family=every.name)


@pytest.fixture
def model(config):
    return transformer.init(jax.random.key(0), config)


def shard_shapes(tree, shardings):
    return jax.tree.map(lambda leaf, sharding: sharding.shard_shape(leaf.shape), tree, shardings)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        ((1, -1, 1), (1, 8, 1)),
        ((2, -1, 2), (2, 2, 2)),
        ((-1, 4, 2), (1, 4, 2)),
        ((2, 4, 1), (2, 4, 1)),
    ],
)
def test_minus_one_takes_the_rest(wanted, shape):
    made = meshes.make_mesh(*wanted)
    assert dict(made.shape) == dict(zip(meshes.AXES, (1, *shape), strict=True))


def test_a_mesh_may_use_some_of_the_devices():
    assert meshes.make_mesh(1, -1, 1, devices=jax.devices()[:2]).shape["fsdp"] == 2


@needs_libtpu
@pytest.mark.slow  # for its compiler, `.[pod]`, not for its time
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("topology", ["v5p:4x4x4", "v5p:8x8x8", "v5e:8x8"])
def test_axes_of_a_pod_may_split_those_of_its_torus(topology, tensor, slices):
    """Each chip has one place, and the two of tensor=2 are neighbours."""
    chips = devices(topology)
    made = meshes.make_mesh(1, -1, tensor, devices=chips, slices=slices).devices
    assert made.shape == (slices, 1, len(chips) // tensor // slices, tensor)
    assert len({chip.id for chip in made.flat}) == len(chips)
    if tensor == 2:
        for pair in made.reshape(-1, 2):
            apart = np.abs(np.subtract(pair[0].coords, pair[1].coords))
            assert sorted(apart.tolist()) == [0, 0, 1]


@pytest.mark.parametrize(
    "wanted", [(3, -1, 1), (2, 2, 1), (16, 1, 1), (-1, -1, 1), (0, -1, 1), (-2, 1, 1)]
)
def test_sizes_that_do_not_fit_are_refused_in_one_sentence(wanted):
    with pytest.raises(ValueError, match=r"^mesh slices=1, data=\S+, fsdp=\S+, tensor=.*\.$"):
        meshes.make_mesh(*wanted)


def test_slices_split_the_width_in_training_and_repeat_the_weights_in_generation(model):
    training = Layout(meshes.make_mesh(1, 2, 2, slices=2))
    shapes = shard_shapes(model, model_shardings(model, training))
    assert shapes.layers["down"] == (2, 32, 8)
    generation = dataclasses.replace(training, role="generation")
    repeated = jax.device_put(model, model_shardings(model, generation))
    first, second = generation.split()
    assert not set(first.devices.flat) & set(second.devices.flat)
    for part in (first, second):
        own = meshes.on_slice(repeated, part)
        assert own.layers["down"].sharding == model_shardings(own, part).layers["down"]
        held = {
            shard.data.unsafe_buffer_pointer() for shard in own.layers["down"].addressable_shards
        }
        assert held <= {
            shard.data.unsafe_buffer_pointer()
            for shard in repeated.layers["down"].addressable_shards
        }
        jax.tree.map(np.testing.assert_array_equal, own, model)


def test_slices_of_a_pipeline_have_their_own_layers_without_a_copy(model):
    layout = Layout(meshes.make_mesh(1, 2, 2, slices=2), "pipelined")
    placed = jax.device_put(model, model_shardings(model, layout))
    assert shard_shapes(model, model_shardings(model, layout)).layers["down"] == (1, 32, 16)
    buffers = {
        shard.data.unsafe_buffer_pointer() for shard in placed.layers["down"].addressable_shards
    }
    for index, part in enumerate(layout.split()):
        own = meshes.on_slice(placed, part)
        assert own.layers["down"].sharding == model_shardings(own, part).layers["down"]
        held = {
            shard.data.unsafe_buffer_pointer() for shard in own.layers["down"].addressable_shards
        }
        assert len(held) == 4 and held <= buffers
        expected = jax.tree.map(lambda leaf, at=index: leaf[at : at + 1], model.layers)
        jax.tree.map(np.testing.assert_array_equal, own.layers, expected)
    # and of the rest a part, as in training
    assert shard_shapes(model, model_shardings(model, layout)).embed == (160, 8)


def test_training_splits_width_over_fsdp_and_heads_over_tensor(model):
    shapes = shard_shapes(model, model_shardings(model, Layout(meshes.make_mesh(2, 2, 2))))
    assert shapes.embed == (160, 16)
    assert shapes.head == (16, 160)
    assert shapes.layers["query"] == (2, 16, 2, 8)
    assert shapes.layers["key"] == (2, 16, 1, 8)
    assert shapes.layers["output"] == (2, 2, 8, 16)
    assert shapes.layers["down"] == (2, 32, 16)
    assert shapes.layers["query_bias"] == (2, 2, 8)
    assert shapes.layers["query_norm"] == (2, 8)
    assert shapes.norm == (32,)


@pytest.mark.parametrize("stacked", [True, False])
def test_generation_splits_over_tensor_only(model, stacked):
    model = model if stacked else transformer.unstack(model)
    shapes = shard_shapes(
        model, model_shardings(model, Layout(meshes.make_mesh(2, 2, 2), "generation"))
    )
    layer = shapes.layers if stacked else shapes.layers[1]
    assert shapes.embed == (160, 32)
    assert layer["query"][-3:] == (32, 2, 8)
    assert layer["down"][-2:] == (32, 32)


def test_every_weight_is_in_the_table(model):
    assert {*model.layers} == {*WEIGHTS}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path({"policy": model}["policy"])]
    assert all(weight_at(path) for path in paths) and len(paths) == len(WEIGHTS) + 3


def test_optimizer_state_lies_as_its_parameters(model):
    mesh = meshes.make_mesh(1, 4, 2)
    layout = Layout(mesh)
    state = jax.eval_shape(optax.adamw(1e-3).init, model)
    split = model_shardings(state, layout)
    assert split[0].mu == model_shardings(model, layout)
    assert split[0].nu == split[0].mu
    assert split[0].count == NamedSharding(mesh, PartitionSpec())


def test_what_does_not_divide_stays_whole_and_is_listed(config):
    config = dataclasses.replace(config, num_heads=6, num_kv_heads=3, vocab_size=321)
    model = transformer.init(jax.random.key(0), config)
    layout = Layout(meshes.make_mesh(2, 2, 2))
    shapes = shard_shapes(model, model_shardings(model, layout))
    assert shapes.layers["key"] == (2, 16, 3, 8)
    assert shapes.embed == (321, 16)
    lines = unsplit(model, layout)
    assert ".layers['key']: 3 is not divisible by tensor=2" in lines
    assert sorted(line.split(":")[0] for line in lines) == sorted(
        [
            ".embed",
            ".head",
            ".layers['key']",
            ".layers['value']",
            ".layers['key_bias']",
            ".layers['value_bias']",
        ]
    )


def test_a_scalar_head_is_split_by_width_only(model):
    critic = dataclasses.replace(model, head=jnp.zeros((32, 1)))
    split = model_shardings(critic, Layout(meshes.make_mesh(1, 4, 2)))
    assert split.head.shard_shape((32, 1)) == (8, 1)


def test_rows_lie_over_data_and_fsdp_and_caches_over_tensor_too(config):
    rows = {
        "tokens": jnp.zeros((8, 16)),
        "done": jnp.zeros(8),
        "cache": ContiguousCache.empty(config, 8, 16, meshes.ONE_DEVICE),
    }
    rows |= {"scalar": jnp.zeros(()), "odd": jnp.zeros((6, 3)), "bits": jnp.zeros((8, 3, 3))}
    shapes = shard_shapes(rows, meshes.row_shardings(rows, Layout(meshes.make_mesh(2, 2, 2))))
    assert shapes["tokens"] == (2, 16)
    assert shapes["done"] == (2,)
    assert shapes["bits"] == (2, 3, 3)
    assert shapes["cache"].layers[0] == ((2, 1, 8, 16), (2, 1, 16, 8))
    assert shapes["scalar"] == ()
    assert shapes["odd"] == (6, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_per_device_are_the_bytes_on_the_device(model, shape):
    layout = Layout(meshes.make_mesh(*shape))
    shardings = model_shardings(model, layout)
    placed = jax.device_put(model, shardings)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert layout.mesh is not None
    abstract = meshes.abstract_mesh(dict(layout.mesh.shape))
    planned = model_shardings(model, Layout(abstract))
    assert meshes.bytes_per_device(model, planned) == held


@pytest.mark.parametrize("role", ["training", "generation"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_on_eight_devices_equals_one(model, role, shape):
    layout = Layout(meshes.make_mesh(*shape), role)
    tokens = jax.random.randint(jax.random.key(1), (8, 12), 0, model.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

    @jax.jit
    def run(model, tokens, positions):
        return transformer.logits(model, transformer.forward(model, tokens, positions)[0])

    alone = run(model, tokens, positions)
    placed = jax.device_put(model, model_shardings(model, layout))
    rows = jax.device_put((tokens, positions), meshes.row_shardings((tokens, positions), layout))
    np.testing.assert_allclose(run(placed, *rows), alone, atol=1e-5, rtol=0)
