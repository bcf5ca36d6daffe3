"""Calls on devices of their own: the same texts and losses under every plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import resuming
import tiny_run
from placed_runs import QUARTERS, RESUMED, TRAINED, Runner, launch, write_plan

from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.weight_table import weight_keys
from rlhf_jax.placement.presets import PRESETS
from rlhf_jax.setup.models import critic_of


@pytest.fixture
def run(folder, tmp_path) -> Runner:
    tiny_run.make_files(tmp_path)
    return Runner(tmp_path, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("mesh", "disaggregated", "quarters"), 3),
        pytest.param(
            ("mesh", "colocated", "interleaved", "disaggregated", "apart", "quarters"),
            10,
            marks=pytest.mark.long,
            id="all",
        ),
    ],
)
def test_every_plan_gives_the_text_and_losses_of_one_mesh(run, tmp_path, names, steps):
    plans = {
        "mesh": "",
        "colocated": "colocated",
        "interleaved": "interleaved",
        "disaggregated": "disaggregated",
        "apart": write_plan(tmp_path / "apart.json"),
        "quarters": write_plan(tmp_path / "quarters.json", calls=QUARTERS),
    }
    found = {name: run(name, plan=plans[name], steps=steps) for name in names}
    metrics, samples = found.pop("mesh")
    worst = {}
    for name, (own, texts) in found.items():
        assert [row["response"] for row in texts] == [row["response"] for row in samples], name
        differences = [
            abs(a[key] - b[key]) / max(1.0, abs(a[key]))
            for a, b in zip(metrics, own, strict=True)
            for key in TRAINED
        ]
        worst[name] = max(differences)
        received = own[0]["weights/generation"]
        weights = 4 * sum(math.prod(shape) for _, shape in weight_keys(tiny_run.CONFIG)) / 1e6
        # generation has two copies under "disaggregated": at most twice as much is received
        if name == "disaggregated":
            assert 2 * weights <= received <= 4 * weights
    print(json.dumps(worst))
    assert max(worst.values()) <= 1e-4


@pytest.mark.slow
def test_a_plan_is_changed_only_where_that_is_asked_for(run, capsys):
    """The run then goes on with the same texts, and the metrics say at which step it changed."""
    ways = {"checkpoint__every": 1, "checkpoint__allow_changes": True}
    whole, texts = run("whole", plan="", steps=4)
    run("run", plan="interleaved", steps=2, **ways)
    refused = "was made with plan = 'interleaved', and this run has 'disaggregated'; restore it,"
    another = run.command("run", plan="disaggregated", steps=4, checkpoint__every=1)
    assert launch["main"](another) == 2
    assert f"{refused} set checkpoint.allow_changes=True" in capsys.readouterr().err
    metrics, samples = run("run", plan="disaggregated", steps=4, **ways)
    assert [row["response"] for row in samples] == [row["response"] for row in texts]
    assert [row.get("plan/changed") for row in metrics] == [None, None, 1.0, None]
    for own, other in zip(metrics, whole, strict=True):
        for key in TRAINED:
            assert own[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_a_run_that_repeats_itself_keeps_its_plan(run, capsys):
    ways = {"checkpoint__every": 1, "deterministic": True}
    run("run", plan="interleaved", steps=1, **ways)
    ways |= {"checkpoint__allow_changes": True}
    assert launch["main"](run.command("run", plan="colocated", steps=2, **ways)) == 2
    assert "restore it, or name another workdir" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(("event", "number"), [("unfinished", 1), ("training", 12)])
def test_killed_under_a_plan_and_resumed_is_uninterrupted(event, number, tmp_path, monkeypatch):
    """Bit for bit, with generation on two devices and all else on two others."""
    resuming.check_killed_and_resumed(tmp_path, monkeypatch, RESUMED, (event, number))


# What a run may have besides, each under every preset.
FEATURES = {
    "evaluation": {"evaluation__every": 2},
    "a draft model": {"generation__strategy": "model-chain-2"},
    "a student": {
        "generation__strategy": "model-chain-2",
        "drafter__path": "",
        "drafter__layers": 1,
        "drafter__learning_rate": 1e-3,
    },
    "a reward model": {"reward__models": "classifier"},
    "slices": {"mesh__slices": 2, "mesh__data": 1},
    "inference beside generation": {
        "mesh__slices": 2,
        "mesh__data": 1,
        "generation__fuse_inference": True,
        "generation__min_rows": 4,
    },
    "rejection": {"generation__acceptance": "rejection"},
}


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_its_text_under_every_plan(feature, run, folder, tmp_path):
    source = open_source(folder)
    classifier = critic_of(source.load(np.float32))
    parts = (source.tokenizer, source.stop_tokens, np.float32)
    huggingface.save(tmp_path / "classifier", classifier, *parts)
    changes = {"steps": 2, "drafter__path": folder} | FEATURES[feature]
    if "reward__models" in changes:
        changes["reward__models"] = tmp_path / "classifier"
    metrics, samples = run("mesh", plan="", **changes)
    plans: dict[str, str | Path] = {name: name for name in PRESETS}
    if feature in ("a student", "a reward model"):
        scorer = {"reward_inference": QUARTERS["policy_inference"]}
        calls = QUARTERS | (scorer if "reward__models" in changes else {})
        plans["quarters"] = write_plan(tmp_path / "quarters.json", calls=calls)
    for name, plan in plans.items():
        own, texts = run(name, plan=plan, **changes)
        assert [row["response"] for row in texts] == [row["response"] for row in samples], plan
        for key in TRAINED:
            assert own[-1][key] == pytest.approx(metrics[-1][key], rel=1e-4, abs=1e-5), (plan, key)


@pytest.mark.long
def test_models_that_wait_on_the_host_change_nothing(run):
    """Reference and reward model leave the devices between steps, and come back as they were."""
    wanted = run("there", steps=2, deterministic=True)
    found = run("aside", steps=2, deterministic=True, mesh__idle_on_host=True)
    assert [row["response"] for row in wanted[1]] == [row["response"] for row in found[1]]
    for one, other in zip(wanted[0], found[0], strict=True):
        assert {name: one[name] for name in TRAINED} == {name: other[name] for name in TRAINED}
