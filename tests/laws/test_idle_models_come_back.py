"""Models wait in their hosts' memory, and come to their devices as they were."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from students import responses_of

from rlhf_jax.inference.scoring import ScoringSettings, score
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.placement.transfer import fetched, offload
from rlhf_jax.runtime.compilation import compile_only, shapes
from rlhf_jax.sequences.packing import Extent
from rlhf_jax.types import Model, ModelConfig


@pytest.fixture
def layout() -> Layout:
    return Layout(make_mesh(fsdp=4, devices=jax.devices()[:4]))


@pytest.fixture
def model(layout) -> Model:
    model = init(jax.random.key(0), ModelConfig("llama", 64, 16, 32, 2, 2, 2, 8, 64))
    return jax.device_put(model, model_shardings(model, layout))


def kinds(model: Model) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(model)}


def test_a_model_comes_back_as_it_was(model):
    aside = offload(model)
    assert kinds(aside) == {"pinned_host"} and kinds(model) == {"device"}
    back = fetched(aside)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(back), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    stays = fetched(model)
    assert jax.tree.leaves(stays)[0] is jax.tree.leaves(model)[0]


def test_a_reference_scores_from_where_it_waits(model, layout):
    texts = responses_of(rows=4, slots=16, vocabulary=64)
    settings = ScoringSettings({"reference": layout}, temperature=1.0, extent=Extent(4))
    wanted, _ = score(texts, {"reference": model}, settings)
    aside = {"reference": offload(model)}
    score(texts, shapes(aside), settings, execute=compile_only)
    found, _ = score(texts, aside, settings)
    name = "reference_logprobs"
    np.testing.assert_array_equal(wanted.columns[name], found.columns[name])
    assert kinds(aside["reference"]) == {"pinned_host"}
