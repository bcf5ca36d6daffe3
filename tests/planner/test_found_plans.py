"""The plans that are recorded as found are found again, and gain what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plans import RESPONSES, case, config_of

RECORDED = json.loads(Path("benchmarks/results/plans.json").read_text())
pytestmark = pytest.mark.long


def recorded(part: str, **wanted):
    """The recorded case that has these values."""
    return next(one for one in RECORDED[part] if wanted.items() <= one.items())


@pytest.mark.parametrize("tokens", RESPONSES)
def test_four_models_of_8b_gain_over_presets_and_one_mesh_whatever_share_is_reached(tokens):
    found = case("v5p:4x4x4", config_of(**{"generation.max_new_tokens": tokens}), lag=0)
    known = recorded("four_models_of_8b", response=tokens, epochs=2, lag=0)
    assert found["steps"] == pytest.approx(known["steps"], rel=1e-3)
    every = [found["gains"], *found["varied"].values()]
    assert min(one["preset"] for one in every) >= 1.05
    assert min(one["mesh"] for one in every) >= 1.2
    assert found["gap"] == 0.0


@pytest.mark.parametrize(
    ("epochs", "tokens"), [(1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 2048), (2, 4096)]
)
def test_samples_drawn_ahead_gain_where_parts_of_the_machine_fit_both(epochs, tokens):
    changes = {"generation.max_new_tokens": tokens, "training.epochs": epochs}
    found = case("v5p:4x4x4", config_of(**changes), lag=1, varied=False)
    known = recorded("four_models_of_8b", response=tokens, epochs=epochs, lag=1)
    assert found["steps"] == pytest.approx(known["steps"], rel=1e-3)
    assert found["gains"]["synchronous"] >= 1.1


@pytest.mark.parametrize(("lag", "least"), [(0, 1.0), (1, 1.2)])
@pytest.mark.parametrize("tensor", [2, 8])
def test_a_policy_of_70b_is_no_slower_than_the_best_preset_and_faster_ahead(tensor, lag, least):
    changes = {"generation.prompts_per_step": 512, "generation.max_rows": 512}
    changes |= {"model.path": "meta-llama/Llama-3.1-70B", "mesh.tensor": tensor}
    changes["critic.path"] = "meta-llama/Llama-3.1-8B"
    found = case("v5p:8x8x8", config_of(**changes), lag=lag, varied=False)
    assert found["gains"]["preset"] >= least and found["gap"] == 0.0
    assert found["gains"].get("synchronous", least) >= least


@pytest.mark.parametrize(("devices", "chips"), [("v5p:8x8x8", 512), ("v5p:8x8x16", 1024)])
def test_many_chips_are_proved_within_a_minute(devices, chips):
    changes = {"generation.prompts_per_step": chips, "generation.max_rows": chips}
    found = case(devices, config_of(**changes), lag=1, varied=False)
    assert found["gap"] == 0.0 and found["cpu_seconds"] < 60.0
    assert found["gains"]["synchronous"] >= 1.1
