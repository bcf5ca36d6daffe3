"""Runs whose policy and critic are trained as pipelines: the same texts, numbers and resumes."""

from __future__ import annotations

import collections
import json

import pytest
import resuming
import tiny_run
from placed_runs import TRAINED, Runner, write_plan
from processes import PPO, check_steps, one, two

SLICES = {"mesh__slices": 2, "mesh__data": 1, "steps": 4}
CALLS = ("policy_training", "critic_training")
RESUMED = resuming.CHANGES | {
    "steps": 4,
    "training__pipelined": True,
    "mesh__slices": 2,
    "mesh__fsdp": 2,
    "generation__prompts_per_step": 4,
    "generation__max_rows": 8,
    "generation__min_rows": 4,
    "training__microbatch_rows": 2,
}


@pytest.fixture
def run(folder, tmp_path) -> Runner:
    tiny_run.make_files(tmp_path)
    return Runner(tmp_path, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    [
        {},
        pytest.param(
            {
                "generation__strategy": "model-chain-2",
                "drafter__layers": 1,
                "drafter__learning_rate": 1e-3,
                "critic__steps_alone": 1,
            },
            marks=pytest.mark.long,
            id="a student, and a critic that learns alone",
        ),
    ],
)
def test_a_run_with_pipelines_is_the_run_without(run, feature):
    metrics, samples = run("whole", **SLICES, **feature)
    own, texts = run("pipelined", training__pipelined=True, **SLICES, **feature)
    assert [row["response"] for row in texts] == [row["response"] for row in samples]
    for step, other in zip(own, metrics, strict=True):
        for key in [key for key in TRAINED if key in other]:
            assert step[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
        assert 0 < step["pipeline/bound"] <= 1.001 * step["pipeline/makespan"] < 60
    # the first step's timeline has each task of its micro-batches, in the lane of its slice; the
    # last stage's forward only receives
    trace = json.loads((run.place / "pipelined" / "timeline" / "step-000000.json").read_text())
    events = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["cat"] == "training"]
    first, last = sorted({one["tid"] for one in events})
    seen = collections.Counter((one["name"], one["tid"]) for one in events)
    batches = seen["critic_training", first]
    assert batches >= 2
    wanted = {("critic_training", last): 2 * batches, ("critic_training", first): batches}
    if "critic__steps_alone" not in feature:
        wanted |= {("policy_training", first): 2 * batches, ("policy_training", last): batches}
    assert seen == wanted


@pytest.mark.long
def test_a_run_whose_critic_has_two_copies_is_the_run_without_pipelines(run):
    """The policy has four stages of a layer, and each copy of a critic of two layers has two."""
    changes = {"mesh__slices": 4, "mesh__data": 1, "mesh__fsdp": 1, "steps": 3}
    changes |= {"critic__path": str(run.model)}
    tiny_run.make_model(run.model.parent / "deep", num_layers=4)
    run.model = run.model.parent / "deep"
    metrics, samples = run("whole", **changes)
    own, texts = run("pipelined", training__pipelined=True, **changes)
    assert [row["response"] for row in texts] == [row["response"] for row in samples]
    for step, other in zip(own, metrics, strict=True):
        for key in TRAINED:
            assert step[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    trace = json.loads((run.place / "pipelined" / "timeline" / "step-000000.json").read_text())
    events = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["cat"] == "training"]
    lanes = {name: {one["tid"] for one in events if one["name"] == name} for name in CALLS}
    assert (
        len(lanes["policy_training"]) == 4 and lanes["policy_training"] == lanes["critic_training"]
    )


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_plan_file_has_pipelines_beside_samples_drawn_ahead(run, tmp_path, algorithm):
    """With generation on four devices, and two stages of two each on the others."""
    calls = {
        "generation": {"first": 0, "count": 4, "data": 4},
        "reference_inference": {"first": 4, "count": 4, "fsdp": 4},
        "policy_inference": {"first": 4, "count": 4, "fsdp": 4},
        "policy_training": {"first": 4, "count": 4, "slices": 2, "fsdp": 2},
    }
    if algorithm == "ppo":
        calls |= {"critic_inference": calls["reference_inference"]}
        calls |= {"critic_training": calls["policy_training"]}
    changes = {"steps": 4, "training__lag": 1, "algorithm__name": algorithm}
    found = []
    for pipelined in (False, True):
        for call in calls:
            if call.endswith("_training"):
                calls[call] = calls[call] | {"pipelined": pipelined}
        path = write_plan(tmp_path / f"plan-{pipelined}.json", calls=calls)
        found.append(run(f"run-{pipelined}", plan=path, **changes))
    (metrics, samples), (own, texts) = found
    assert [row["response"] for row in texts] == [row["response"] for row in samples]
    for step, other in zip(own, metrics, strict=True):
        for key in [key for key in TRAINED if key in other]:
            assert step[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


@pytest.mark.long
@pytest.mark.parametrize("copies", [False, pytest.param(True, id="a copy of the critic each")])
def test_two_processes_with_stages_of_their_own_take_the_steps_of_one(place, copies):
    changes = PPO | {"steps": 4, "checkpoint__every": 2}
    if copies:
        deep = tiny_run.make_model(place / "deep", num_layers=4)
        changes |= {"model__path": str(deep), "critic__path": str(place / "tiny")}
        changes |= {"mesh__slices": 4, "mesh__fsdp": 2}
    one(place, "whole", **changes)
    code, _, errors = two(place, "pipelined", training__pipelined=True, **changes)
    assert code == 0, errors
    check_steps(place / "whole", place / "pipelined")


@pytest.mark.long
@pytest.mark.parametrize(("event", "number"), [("unfinished", 1), ("training", 12)])
def test_killed_with_pipelines_and_resumed_is_uninterrupted(event, number, tmp_path, monkeypatch):
    """Bit for bit, on two slices of two devices."""
    resuming.check_killed_and_resumed(tmp_path, monkeypatch, RESUMED, (event, number))


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_slices(run):
    """From four stages to two, of a model of four layers."""
    ways = {"checkpoint__every": 1, "checkpoint__allow_changes": True, "training__pipelined": True}
    four = {"mesh__slices": 4, "mesh__data": 1, "mesh__fsdp": 1}
    tiny_run.make_model(run.model.parent / "deep", num_layers=4)
    run.model = run.model.parent / "deep"
    whole, texts = run("whole", **SLICES | {"steps": 4})
    run("run", **ways, **four, steps=2)
    metrics, samples = run("run", **ways, **SLICES | {"steps": 4})
    assert [row["response"] for row in samples] == [row["response"] for row in texts]
    for own, other in zip(metrics, whole, strict=True):
        for key in TRAINED:
            assert own[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
