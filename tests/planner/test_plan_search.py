"""`rlhf-jax plan --search`: the plan found is the best of those compared, and can be run."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree
from typing import Any

import pytest

from rlhf_jax import command
from rlhf_jax.config import command_line
from rlhf_jax.placement.plan import Placement, read_plan
from rlhf_jax.planner.describe_search import why_not
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.planned import plan_run
from rlhf_jax.planner.searched import search_plans

WHOLE_ROWS = [
    "--config.training.minibatches=1",
    "--config.training.microbatch_rows=64",
    "--config.generation.max_rows=64",
]

LONGER: dict[str, Any] = {"generation.max_new_tokens": 2048}


def config_of(name: str, **changes):
    """A config whose rows every preset can share."""
    config = command_line.load(name)
    config.mesh.fsdp = -1
    config.training.minibatches = 1
    config.training.microbatch_rows = 64
    config.generation.max_rows = 64
    config.update_from_flattened_dict(changes)
    return config


@functools.cache  # several tests ask for the same
def searched(name: str, devices: str, lag: int = 0, **changes):
    config = config_of(name, **changes)
    return search_plans(config, plan_run(config, parse_hardware(devices)), lag)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("ppo_llama31_8b:tpu", "v5p:4x4x4"),
        pytest.param("grpo_llama31_8b:gpu", "gpu:8x8:h100", marks=pytest.mark.slow),
        ("grpo_llama31_8b:tpu", "v5p:2x2x2"),
    ],
)
def test_the_plan_that_is_found_is_proved_and_better_than_what_is_known(name, devices):
    asked = searched(name, devices)
    *known, found = asked.plans
    # pipelines are for several nodes of GPUs
    assert list(asked.left_out) == ["pipelined"] * devices.startswith("v5p") and asked.gap == 0.0
    pipelined = ["pipelined"] * devices.startswith("gpu")
    names = [plan.name for plan in asked.plans]
    assert names == ["mesh", "colocated", "interleaved", "disaggregated", *pipelined, "found"]
    assert all(found.step <= plan.step for plan in known)
    assert found.step == pytest.approx(sum(found.stages))
    assert found.gigabytes <= parse_hardware(devices).gigabytes


@pytest.mark.slow
def test_samples_drawn_ahead_are_searched_beside_the_best_plan_without():
    asked = searched("ppo_llama31_8b:tpu", "v5p:4x4x4", lag=1, **LONGER)
    plans = {plan.name: plan for plan in asked.plans}
    assert list(plans)[-3:] == ["synchronous", "disaggregated, lag 1", "found"]
    assert [plan.lag for plan in asked.plans] == [0] * 5 + [1] * 2 and asked.gap == 0.0
    found = plans["found"]
    generation, *others = found.stages
    assert found.step == pytest.approx(max(generation, sum(others)))
    assert found.step <= plans["disaggregated, lag 1"].step < plans["disaggregated"].step
    own = set(found.plan.placements["generation"].devices)
    assert not any(
        own & set(placed.devices)
        for call, placed in found.plan.placements.items()
        if call != "generation"
    )
    assert why_not(plans["synchronous"], found).endswith("as all else waits for generation")


@pytest.mark.slow
def test_three_quarters_train_what_a_quarter_draws_ahead(tmp_path):
    """Where half of the devices would be too few to train on; the plan is one that a file holds."""
    asked = searched("ppo_llama31_8b:tpu", "v5p:4x4x4", lag=1, **LONGER)
    plans = {plan.name: plan for plan in asked.plans}
    found = plans["found"]
    training = found.plan.placements["policy_training"]
    assert asked.gap == 0.0 and training.count == 48 and training.data % 3 == 0
    assert found.plan.placements["generation"].count == 16
    assert found.step < 0.9 * plans["synchronous"].step

    path = tmp_path / "plan.json"
    path.write_text(found.plan.text())
    config = config_of("ppo_llama31_8b:tpu", plan=str(path), **LONGER, **{"training.lag": 1})
    again = plan_run(config, parse_hardware("v5p:4x4x4"))
    assert again.plan.placements == found.plan.placements
    path.write_text(found.plan.text().replace('"first": 16', '"first": 8'))
    with pytest.raises(ValueError, match=r"on chips 8 to 55 .* of 4x4x4, and they are no box"):
        plan_run(config, parse_hardware("v5p:4x4x4"))


@pytest.mark.slow
def test_old_log_probabilities_are_a_call_of_their_own_where_samples_are_drawn_ahead():
    one_step = {"training.epochs": 1, "training.minibatches": 1}
    asked = searched("grpo_llama31_8b:tpu", "v5p:4x4x4", lag=1, **one_step)
    plans = {plan.name: plan for plan in asked.plans}
    assert "policy_inference" not in plans["synchronous"].calls
    assert "policy_inference" in plans["found"].calls
    assert why_not(plans["mesh"], plans["found"])


@pytest.mark.slow
def test_each_plan_computes_layers_again_only_where_it_must():
    long: dict[str, Any] = {"generation.max_new_tokens": 16384, "generation.max_rows": 128}
    plans = {one.name: one for one in searched("ppo_llama31_8b:tpu", "v5p:4x4x4", **long).plans}
    assert plans["interleaved"].remat and not plans["colocated"].remat
    long["training.remat"] = "on"
    always = searched("ppo_llama31_8b:tpu", "v5p:4x4x4", **long).plans
    steps = {one.name: one.step for one in always}
    assert steps["interleaved"] == plans["interleaved"].step
    assert steps["colocated"] > plans["colocated"].step


@pytest.mark.long
def test_a_slower_network_between_nodes_makes_plans_longer():
    config = config_of("grpo_llama31_8b:gpu")
    hardware = parse_hardware("gpu:8x8:h100")
    steps = [
        {plan.name: plan.step for plan in search_plans(config, plan_run(config, one)).plans}
        for one in (hardware, hardware.with_network(400), hardware.with_network(50))
    ]
    assert steps[0] == steps[1]  # an H100's share of a DGX's network is 400 Gb/s
    assert all(steps[2][name] > steps[0][name] for name in ("mesh", "colocated", "found"))


def test_a_plan_says_in_which_call_it_is_slower():
    plans = searched("ppo_llama31_8b:tpu", "v5p:4x4x4").plans
    *_, found = plans
    apart = next(plan for plan in plans if plan.name == "disaggregated")
    generation = f"{apart.calls['generation']:.2f} s, not {found.calls['generation']:.2f} s"
    assert why_not(apart, found).endswith(f"generation takes {generation}")
    assert why_not(found, found) == "as fast"
    full = apart._replace(fits=False, gigabytes=120.0)
    largest = max(apart.parts, key=lambda part: part.bytes).name
    assert why_not(full, found) == f"does not fit, with 120.0 GB a chip, most of it {largest}"
    waiting = found._replace(stages=(*found.stages[:2], found.stages[2] + 1), step=found.step + 1)
    assert "1.00 s longer; calls of training share devices" in why_not(waiting, found)


def test_a_slice_of_v5e_is_not_divided():
    changes: dict[str, Any] = {"drafter.path": "", "generation.strategy": "plain"}
    found = searched("ppo_llama31_8b:tpu", "v5e:8x8", **changes)
    assert [plan.name for plan in found.plans] == ["mesh", "colocated", "found"]
    assert {one.count for one in found.plans[-1].plan.placements.values()} == {64}
    assert "32 chips of a slice of 64 TPU v5e" in found.left_out["disaggregated"]


def test_devices_that_are_no_power_of_two_are_searched_and_too_much_memory_is_marked(capsys):
    words = ["plan", "grpo_llama31_8b:tpu", "--devices", "v5p:2x2x3", "--search"]
    mesh = {"mesh.fsdp": -1, "mesh.tensor": 1}
    rows = {"training.minibatches": 1, "training.microbatch_rows": 48, "generation.max_rows": 48}
    samples = {"generation.prompts_per_step": 96, "generation.samples_per_prompt": 8}
    changes = [f"--config.{key}={value}" for key, value in (mesh | rows | samples).items()]
    assert command.main([*words, *changes]) == 0
    said = capsys.readouterr().out
    assert re.search(r"mesh .* 1\d\d\.\d GB!", said) and "! is more than a chip has" in said
    found = next(line for line in said.splitlines() if re.match(" +found +[0-9.]+ s", line))
    assert found.rstrip().endswith(" GB") and "data 3, fsdp 4" in said
    assert "gain        no plan of this kind is shorter" in said  # nothing else fits


@pytest.mark.long
def test_what_the_config_names_changes_no_other_plan(tmp_path):
    asked = searched("ppo_llama31_8b:tpu", "v5p:4x4x4")
    path = tmp_path / "plan.json"
    path.write_text(asked.plans[-1].plan.text())
    for name in ("disaggregated", str(path)):
        again = searched("ppo_llama31_8b:tpu", "v5p:4x4x4", plan=name)
        steps = {plan.name: plan.step for plan in again.plans}
        assert steps | {name: 0.0} == {p.name: p.step for p in asked.plans} | {name: 0.0}
    assert steps[name] == steps["found"]

    # one that keeps to no block is told of, and not compared
    document = json.loads(asked.plans[-1].plan.text())
    document["calls"]["generation"] |= {"first": 2, "count": 2, "data": 2, "tensor": 1}
    path.write_text(json.dumps(document))
    odd = searched("ppo_llama31_8b:tpu", "v5p:4x4x4", plan=str(path))
    assert "aligned parts of 4 devices" in odd.left_out[str(path)]


def test_a_preset_that_cannot_split_the_rows_is_left_out_and_why():
    found = searched("grpo_llama31_8b:tpu", "v5p:4x4x4", **{"generation.max_rows": 48})
    assert [plan.name for plan in found.plans] == ["disaggregated", "found"]
    said = {name: reason.partition(";")[0] for name, reason in found.left_out.items()}
    assert "idle in their bubbles" in said.pop("pipelined")
    split = "The 48 rows of generation.max_rows cannot be split evenly by"
    of_plan = "generation's data x fsdp of plan"
    assert said == {
        "mesh": f"{split} mesh.data x mesh.fsdp = 32",
        "colocated": f"{split} {of_plan} colocated = 32",
        "interleaved": f"{split} {of_plan} interleaved = 32",
    }


def test_the_command_prints_plans_and_writes_the_best(tmp_path, capsys):
    out = tmp_path / "plan.json"
    asked = ["plan", "ppo_llama31_8b:tpu", "--devices", "v5p:2x2x4", "--config.mesh.fsdp=-1"]
    asked += ["--config.training.minibatches=1", "--config.training.microbatch_rows=64"]
    asked.append("--config.generation.max_rows=64")
    assert command.main([*asked, "--search", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    steps = {
        name: float(seconds)
        for name, seconds in re.findall(r"(mesh|colocated|interleaved|found) +([\d.]+) s", said)
    }
    assert len(steps) == 4 and min(steps.values()) == steps["found"]
    assert re.search(r"mesh: [\d.]+ s longer; generation takes [\d.]+ s, not [\d.]+ s", said)
    assert (
        len(re.findall(r"(training|inference|decoding|links) +x (0.5|1.5): [\d.]+ ti", said)) == 8
    )
    assert "no plan of this kind is shorter" in said and "not measured" in said
    plan = read_plan(out, Placement(0, 1))
    assert plan.devices == 16 and plan.parameters["policy"] == 8_030_261_248

    picture = (tmp_path / "plan.svg").read_text()
    drawn = xml.etree.ElementTree.fromstring(picture)
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert f"Predicted, not measured: {steps['found']:.2f} s a step" in words
    assert {"policy training", "0..15"} <= set(words)

    # it is a plan of this config, and is not one of another
    assert command.main([*asked, f"--config.plan={out}"]) == 0
    said = capsys.readouterr().out
    assert all(line in said for line in plan.table())
    other = ["plan", "grpo_llama31_8b:tpu", *asked[2:], f"--config.plan={out}"]
    assert command.main(other) == 2
    assert "places policy_inference, which this run does not have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["quickstart", "--devices", "v5e:2x2", "--config.training.microbatch_tokens=9"],
            "training.microbatch_tokens is 9, and a sample may have",
        ),
        (["quickstart", "--devices", "v5e:2x2", "--out", "plan.txt"], "in a file NAME.json"),
        (["quickstart", "--devices", "cpu:8"], "The speed of 8 x cpu"),
        (["quickstart", "--devices", "v5e:2x2", "--network", "100"], "several nodes of GPUs, as"),
        (["quickstart", "--devices", "gpu:1x8:h100", "--network", "100"], "several nodes of GPUs"),
        (["quickstart", "--devices", "gpu:2x8:h100", "--network", "0"], "give gigabits a second"),
        (
            ["quickstart", "--devices", "v5e:2x2", "--lag", "1", "--config.generation.resample=1"],
            "generation.resample waits for the rewards",
        ),
        (
            ["grpo_llama31_8b:tpu", "--devices", "v5e:8x8", "--lag", "1", *WHOLE_ROWS],
            "gives generation devices of its own and fits",
        ),
        (["grpo_llama31_8b:tpu", "--devices", "v5e:2x2"], "No plan fits 4 x TPU v5e"),
        (
            ["grpo_llama31_8b:tpu", "--devices", "v5e:8x8", "--config.generation.max_rows=3"],
            "No sharding of 64 x TPU v5e, 16 GB each splits the rows of generation evenly",
        ),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_one_sentence(words, said, capsys):
    assert command.main(["plan", *words, "--config.mesh.fsdp=-1", "--search"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
