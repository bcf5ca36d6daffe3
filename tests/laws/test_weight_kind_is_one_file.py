"""What another idea costs: a kind of weight, and a family with a block of its own, from this file.

Both are trained, saved, loaded and decoded with drafts, by the code that knows neither.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experiences import CONFIG, random_experience
from flax import struct
from generated import assert_equal
from jax.sharding import PartitionSpec
from learning import Optimizers, new_models, update

from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models import block
from rlhf_jax.models.families import FAMILIES, Family
from rlhf_jax.models.families.family import LAYER_WEIGHTS
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import forward, init
from rlhf_jax.models.weight import Weight, WeightKind, plain, product
from rlhf_jax.types import Array, Model, ModelConfig

RANK = 2


@struct.dataclass
class LowRank(WeightKind):
    """A frozen matrix, and the product of two narrow ones that is learned (Hu et al. 2021)."""

    frozen: Array
    down: Array  # [inputs, RANK]
    up: Array  # [RANK, outputs]

    def product(self, rows: jax.Array, inputs: int) -> jax.Array:
        """Both products, without the sum of the matrices."""
        shape = (rows.shape[-1], -1)
        frozen = jax.lax.stop_gradient(self.frozen).reshape(shape)
        out = rows @ frozen + (rows @ self.down) @ self.up
        return out.reshape(len(rows), *self.frozen.shape[inputs:])

    def plain(self, inputs: int) -> Array:
        """The sum of both."""
        return self.frozen + (self.down @ self.up).reshape(self.frozen.shape)

    def axes(self, weight: Weight) -> Self:
        """The narrow ones are never split."""
        return dataclasses.replace(self, frozen=weight.axes, down="", up="")


def with_low_rank(model: Model, name: str) -> Model:
    """The model with one matrix of each of its stacked layers as a `LowRank`."""
    layers: Any = model.layers
    frozen = layers[name]
    inputs = frozen.shape[1]
    down = jax.random.normal(jax.random.key(7), (len(frozen), inputs, RANK)) / inputs**0.5
    up = jnp.zeros((len(frozen), RANK, frozen[0].size // inputs))
    return dataclasses.replace(model, layers={**layers, name: LowRank(frozen, down, up)})


def two_experts(hidden, layer, memory, *, config, rotation, attend):
    """A block of two feed-forwards, of which each token has a share of its own."""
    hidden, kept = block.attention(hidden, layer, memory, config, rotation=rotation, attend=attend)
    normed = block.rms_norm(hidden, layer["mlp_norm"], config.norm_eps)
    first = jax.nn.sigmoid(product(normed, layer["router"]))[..., None]
    own, other = (
        product(
            jax.nn.silu(product(normed, layer["gate" + more]))
            * product(normed, layer["up" + more]),
            layer["down" + more],
        )
        for more in ("", "_other")
    )
    return hidden + first * own + (1 - first) * other, kept


def renamed(name: str) -> Weight:
    """A weight of the second expert, like that of the first."""
    weight = LAYER_WEIGHTS[name]
    other = weight.huggingface.replace(".mlp.", ".other_mlp.")
    return weight._replace(huggingface=other, gguf=weight.gguf + ".other")


EXPERTS = Family(
    "experts",
    "Experts",
    weights={
        **LAYER_WEIGHTS,
        "router": Weight("M", ("M",), "M", "model.layers.{layer}.router", "blk.{layer}.router"),
        **{f"{name}_other": renamed(name) for name in ("gate", "up", "down")},
    },
    block=two_experts,
)


@pytest.fixture(params=["low rank", "experts"])
def model(request, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model so sure of itself that drafts are accepted, of one kind or the other."""
    config = dataclasses.replace(tiny, vocab_size=64)
    if request.param == "experts":
        monkeypatch.setitem(FAMILIES, EXPERTS.name, EXPERTS)
        made = init(jax.random.key(0), dataclasses.replace(config, family=EXPERTS.name))
    else:
        made = with_low_rank(init(jax.random.key(0), config), "query")
    return dataclasses.replace(made, norm=8 * made.norm)


def trained(model: Model) -> Model:
    """The model after one step of SGD on random samples."""
    models = new_models(model, Optimizers(optax.sgd(1.0)))
    experience = random_experience(model)
    models, _ = update(models, experience, Optimizers(optax.sgd(1.0)), CONFIG, 0.1)
    return models["policy"].weights


def test_it_is_trained_saved_and_loaded(model, tmp_path):
    before = jax.tree.map(np.asarray, model)
    after: Any = trained(model)
    moved: Any = jax.tree.map(lambda one, other: bool((one != other).any()), before, after)
    if isinstance(after.layers["query"], LowRank):
        assert not moved.layers["query"].frozen and moved.layers["query"].up
    assert moved.layers["down"] and moved.embed

    huggingface.save(tmp_path / "saved", after, None, (2,), jnp.float32)
    loaded: Any = huggingface.load(tmp_path / "saved", jnp.float32)
    assert not any(isinstance(one, WeightKind) for one in loaded.layers.values())
    merged = jax.vmap(lambda one: plain(one, 1))(after.layers["query"])
    np.testing.assert_array_equal(loaded.layers["query"], merged)
    tokens = jnp.arange(12).reshape(2, 6)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    for one, other in ((after, loaded), (loaded, decoding_weights(after))):
        np.testing.assert_allclose(
            forward(one, tokens, positions)[0], forward(other, tokens, positions)[0], atol=1e-4
        )


def test_drafted_text_is_plain_text(model):
    prompts = np.random.default_rng(0).integers(0, 64, (4, 5)).astype(np.int32)
    wanted = [Request(one, tuple(range(4 * i, 4 * i + 4)), 40) for i, one in enumerate(prompts)]
    how = GenerationConfig(
        Sampling(1.0), (tree.PLAIN,), (), max_rows=8, max_length=64, seed=0, min_rows=8
    )
    drafts = dataclasses.replace(how, strategies=(tree.parse("lookup-chain-3"),))
    target = decoding_weights(model)
    expected = {one.sample_id: one for one in generate(target, None, wanted, how)}
    found = {one.sample_id: one for one in generate(target, None, wanted, drafts)}
    assert_equal(target, found, expected, drafts)
    assert sum(one.accepted for one in found.values()) > 0


def test_its_parts_lie_where_their_axes_say(model: Any):
    layout = Layout(make_mesh(1, 2, 2, devices=jax.devices()[:4]))
    places = model_shardings(model, layout)
    if isinstance(model.layers["query"], LowRank):
        split = PartitionSpec(None, ("slices", "fsdp"), "tensor", None)
        assert places.layers["query"].frozen.spec == split
        assert places.layers["query"].up.is_fully_replicated
    else:
        assert places.layers["gate_other"].spec == places.layers["gate"].spec
    jax.device_put(model, places)
