"""Policy and critic as pipelines: when they are found, what they hold, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.schedule_check import check
from rlhf_jax import command
from rlhf_jax.config import command_line
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.sizes import bubble_warnings
from rlhf_jax.memory.updates import stage_times
from rlhf_jax.mesh import bytes_per_device
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.pipeline.problem import FORWARD
from rlhf_jax.pipeline.search import solve
from rlhf_jax.placement.pipelined import (
    StageTimes,
    check_layers,
    check_pipelines,
    fill_with_copies,
    fused_schedule,
    joint_problem,
    limit_inputs,
    serial_schedule,
)
from rlhf_jax.placement.plan import Placement, Plan, read_plan
from rlhf_jax.planner.describe import predict_calls
from rlhf_jax.planner.describe_search import print_search
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.pipelined_plans import best_pipelined, placements_of, policy_pipelines
from rlhf_jax.planner.planned import plan_run
from rlhf_jax.planner.priced import PlanPrices
from rlhf_jax.planner.search.costs import LATENCY
from rlhf_jax.planner.search.pipelines import quick_bound
from rlhf_jax.planner.searched import Searched, find_with_pipelines, search_plans
from rlhf_jax.training.schedules import NEAR, RUN_TRIES

COPIES = StageTimes(4, (1.0,) * 2, (3.0,) * 2, 1.0, copies=2)  # of a critic
BOTH = ("policy_training", "critic_training")
NODES = "gpu:32x8:h100"
PIPELINED: dict[str, Any] = {"mesh.slices": 8, "mesh.fsdp": 1, "training.pipelined": True}


def config_of(changes: dict[str, Any] | None = None, name: str = "ppo_llama31_8b:gpu"):
    """Micro-batches of one row, as pipelines want many."""
    config = command_line.load(name)
    config.mesh.fsdp = -1
    config.training.microbatch_rows = 1
    config.update_from_flattened_dict(changes or {})
    return config


def planned(
    changes: dict[str, Any] | None = None, devices: str = "gpu:8x8:h100", network: float = 100
):
    config = config_of(changes)
    return config, plan_run(config, parse_hardware(devices).with_network(network))


def pipelined(changes: dict[str, Any] | None = None):
    """Eight stages of one node each."""
    return planned(PIPELINED | {"mesh.tensor": 8} | (changes or {}))


@pytest.fixture(scope="module")
def found() -> Searched:
    """PPO of 8B models with 256 tokens a GPU and optimizer step, at 100 Gb/s."""
    config, run = planned(devices=NODES)
    return search_plans(config, run)


@pytest.mark.long
def test_pipelines_are_found_at_256_tokens_a_gpu_and_a_slow_network(found, tmp_path):
    compared = found.trainings
    *others, best = found.plans
    assert compared is not None and compared.tokens == 256 < compared.crossover
    sharded = next(plan for plan in others if plan.name == "FSDP and TP")
    training = best.plan.placements["policy_training"]
    assert training.pipelined and best.plan.placements["critic_training"] == training
    assert not any(one.pipelined for one in sharded.plan.placements.values())
    assert best.step < sharded.step <= min(plan.step for plan in others if plan.fits)
    # the gain over one model after the other is that of RLHFuse, 1.8 to 2.3, or more
    assert compared.in_turn_seconds > 2 * compared.pipelined.joint.fused
    assert compared.gain > 1.1 and best.fits and found.gap < 0.01 and not found.left_out
    assert best.stages[2] == pytest.approx(sum(best.calls[call] for call in BOTH))
    assert compared.pipelined.joint.fused <= best.stages[2] * (1 + 1e-9)

    path = tmp_path / "plan.json"
    path.write_text(best.plan.text())
    calls = json.loads(path.read_text())["calls"]
    assert [call for call, one in calls.items() if one["pipelined"]] == list(BOTH)
    assert read_plan(path, Placement(0, 1)) == best.plan
    config, again = planned({"plan": str(path)}, devices=NODES)
    assert again.plan == best.plan
    prices = PlanPrices.of(config, again, 0)
    assert prices.price("plan", prices.named_plan(str(path), again.plan)).step == best.step


@pytest.mark.long
def test_a_faster_network_is_for_fsdp():
    config, run = planned(devices=NODES, network=400)
    compared = search_plans(config, run)
    assert compared.trainings is not None and compared.trainings.gain < 1.0
    *_, pipelines, best = compared.plans
    assert pipelines.name == "pipelined" and pipelines.step > best.step
    assert not best.plan.placements["policy_training"].pipelined


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param("ppo_llama31_8b:tpu", "v5p:4x4x4", marks=pytest.mark.slow),
        ("ppo_llama31_8b:gpu", "gpu:8:h100"),
    ],
)
def test_pipelines_are_left_out_where_links_join_all_chips_unless_nothing_else_fits(name, devices):
    config = config_of(name=name)
    run = plan_run(config, parse_hardware(devices))
    searched = search_plans(config, run)
    assert "gather weights over links of their own in less time" in searched.left_out["pipelined"]
    assert searched.trainings is None
    assert not any(
        placed.pipelined for plan in searched.plans for placed in plan.plan.placements.values()
    )
    # where they are asked for they are priced, and slower
    prices = PlanPrices.of(config, run, 0)
    assert best_pipelined(prices).priced.step > searched.plans[-1].step


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({}, 1), ({}, 4), ({"algorithm.name": "grpo"}, 1), ({"training.remat": "on"}, 2)],
)
def test_at_once_is_never_longer_than_one_after_the_other(changes, rows):
    changes = {"critic.path": "", **changes, "training.microbatch_rows": rows}
    config, run = planned(changes)
    prices = PlanPrices.of(config, run, 0)
    space = list(prices.spaces.values())[-1]
    tried = list(policy_pipelines(prices.base, 8, run.models))
    assert {1, 2, 4, 8} == {policy.tensor for policy in tried}
    for policy in tried[:: max(1, len(tried) // 6)]:
        joint = space.joint(placements_of(policy, run.models))
        problem = joint.problem
        check(problem, fused_schedule(problem))
        assert joint.quick_least <= joint.least * (1 + 1e-9)
        assert joint.least <= joint.fused * (1 + 1e-9)
        assert joint.fused <= joint.serial * (1 + 1e-9)
        assert quick_bound(problem) <= serial_schedule(problem).makespan * (1 + 1e-9)
        assert sum(joint.shares.values()) == pytest.approx(joint.fused)


@pytest.mark.parametrize(
    ("layers", "stages", "copies"),
    [(32, 8, 1), (16, 4, 2), (12, 4, 2), (8, 2, 4), (4, 2, 4), (24, 8, 1), (7, 8, 1)],
)
def test_a_shallower_critic_has_as_many_copies_as_fit(layers, stages, copies):
    """No stage has more layers than the policy's, and 7 layers are for `check_layers` to refuse."""
    policy = Placement(0, 16, slices=8, tensor=2, pipelined=True)
    critic = fill_with_copies(policy, {"policy": 32, "critic": layers}, "critic")
    assert critic == dataclasses.replace(policy, slices=stages, data=copies)
    twice = dataclasses.replace(policy, count=32, data=2)
    other = fill_with_copies(twice, {"policy": 32, "critic": layers}, "critic")
    assert (other.slices, other.data) == (stages, 2 * copies)


def test_copies_of_a_critic_run_over_the_policys_nodes_the_other_way():
    placed = Placement(0, 8, slices=4, tensor=2, pipelined=True)
    critic = dataclasses.replace(placed, slices=2, data=2, fsdp=2, tensor=1)
    plan = Plan(8, {"generation": placed, **dict(zip(BOTH, (placed, critic), strict=True))})
    layouts = plan.layouts(jax.devices()[:8])
    nodes = layouts["policy_training"].devices.reshape(4, 2)
    found = layouts["critic_training"].devices.reshape(2, 2, 2)
    for copy in range(2):
        for stage in range(2):
            assert set(found[stage, copy]) == set(nodes[2 * copy + 1 - stage])
    pipes = joint_problem([StageTimes(4, (1.0,) * 4, (3.0,) * 4, 1.0), COPIES]).pipes
    assert pipes[1].nodes == ((1, 0), (3, 2))


def test_copies_of_a_critic_end_sooner_than_more_stages_and_sum_their_gradients():
    config, run = pipelined()
    prices = PlanPrices.of(config, run, 0)
    critic = dataclasses.replace(run.models.critics["critic"], num_layers=16)
    prices = dataclasses.replace(prices, models=run.models._replace(critics={"critic": critic}))
    space = prices.spaces[False]
    shape = {"count": 64, "slices": 8, "data": 1, "fsdp": 1, "tensor": 8}
    policy = dataclasses.replace(prices.base, **shape, pipelined=True)
    copied = placements_of(policy, prices.models)
    assert copied["critic_training"].slices == 4 and copied["critic_training"].data == 2
    joint = space.joint(copied)
    deeper = space.joint(dict.fromkeys(BOTH, copied["policy_training"]))
    check(joint.problem, fused_schedule(joint.problem))
    assert fused_schedule(joint.problem).makespan < fused_schedule(deeper.problem).makespan
    # a stage's gradient in float32, on 8 GPUs, is summed by both copies
    summed = joint.pipes[1].gathering - deeper.pipes[1].gathering
    layers = 4 * (4 * 218_112_000 + 128_256 * 4096 / 4) / 8
    assert summed == pytest.approx(layers / (0.8 * 12.5e9), rel=0.01)
    assert joint.pipes[1].flops == pytest.approx(deeper.pipes[1].flops, rel=0.2)


def test_a_stage_is_priced_by_its_layers_the_head_in_the_last_backward_and_hops_of_the_network():
    config, run = pipelined()
    prices = PlanPrices.of(config, run, 0)
    space = prices.spaces[False]
    joint = space.joint({call: run.plan.placements[call] for call in BOTH})
    policy, critic = joint.times
    assert policy.micro_batches == 32 and len(policy.forward) == 8
    # a part of a row's hidden states by each of the 8 GPUs of a node, gathered over its links
    hidden = 2048 * 4096 * 2
    assert policy.kept == hidden / 8
    network = hidden / 8 / (0.8 * 12.5e9)
    links = 7 / 8 * hidden / (0.8 * 450e9)
    hop = LATENCY + network + links
    assert policy.forward[-1] == pytest.approx(hop)
    assert policy.forward[0] < policy.forward[1] == policy.forward[2]
    products = policy.forward[1] - hop
    # the critic's head has one output, and the policy's 128,256
    assert policy.backward[-1] > policy.backward[0] > critic.backward[-1] > 2.5 * products
    assert policy.backward[0] == policy.backward[1] == pytest.approx(critic.backward[0])
    # embedding or head: brought to its stage in bfloat16, and its gradient shared out in float32
    ends = (2 + 4) * 128_256 * 4096 / 8
    of_policy = 2 * LATENCY + ends / (0.8 * 12.5e9)
    assert joint.pipes[0].gathering == pytest.approx(of_policy, rel=1e-3)

    costs = {cost.name: cost for cost in predict_calls(run.run(config), run.hardware)}
    assert sum(costs[call].seconds for call in BOTH) == pytest.approx(joint.fused)
    # forward, backward and again the forward of all but the last stage: close to four thirds
    whole = config_of({"mesh.tensor": 8})
    other = plan_run(whole, run.hardware)
    plain = {cost.name: cost for cost in predict_calls(other.run(whole), run.hardware)}
    ratio = costs["policy_training"].flops / plain["policy_training"].flops
    assert 1.2 < ratio < 4 / 3


def test_the_memory_of_stages_is_that_of_their_layers_the_ends_and_the_inputs_kept():
    config, run = pipelined()
    parts = {part.name: part.bytes for part in run.parts}
    layout = run.layouts["policy_training"]
    assert layout.role == "pipelined"
    policy = run.models.policy
    ends = 2 * 128_256 * 4096 / 8  # of a slice, and each of eight has a part
    layers = 4 * (policy.num_layers // 8) * 218_112_000 / 8
    assert parts["policy, float32"] == pytest.approx(4 * ends / 8 + layers, rel=1e-2)
    assert parts["policy's optimizer, two moments"] == 2 * parts["policy, float32"]
    gradients = parts["policy, float32"] + parts["critic, float32"]
    assert parts["gradients, float32"] == gradients

    weights = abstract_weights(policy, np.dtype(np.float32))
    assert parts["policy, float32"] == bytes_per_device(weights, model_shardings(weights, layout))

    # as many inputs of both on the fullest node as a schedule may keep: twice 8 + 1
    critic = dataclasses.replace(policy, scalar_head=True, tied=False)
    assert parts["embedding or head of a stage, and its gradients"] == (2 + 2 + 4) * ends
    hidden = 2048 * 4096 * 2 // 8  # split over tensor as it travels
    own = run.run(config).at("policy_training")
    assert own is not None and own.micro_batches == 32
    waiting = parts["hidden states that stages keep and send"]
    assert waiting == 2 * 18 * hidden
    problem = limit_inputs(joint_problem([stage_times(own, model) for model in (policy, critic)]))
    assert fused_schedule(problem).peak.max() <= waiting / 2
    # without the stages all layers' activations would be there
    assert parts["activations kept by layer"] == 4 * 2048 * own.kept_values(policy)


@pytest.mark.parametrize("head", [0.5, 2.0])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "copies"), [(2, 8, 1), (4, 32, 1), (8, 16, 1), (8, 32, 2)]
)
def test_no_more_hidden_states_wait_to_be_sent_than_may_be_kept(
    stages, micro_batches, copies, head
):
    """A stage's result waits on its node until the task begins that takes it."""

    def times(stages: int, copies: int = 1) -> StageTimes:
        forward = (*[1.0] * (stages - 1), 0.0)
        backward = (*[3.0] * (stages - 1), 3.0 + head)
        return StageTimes(micro_batches, forward, backward, kept=1.0, copies=copies)

    problem = limit_inputs(joint_problem([times(stages), times(stages // copies, copies)]))
    schedule = solve(problem, tries=RUN_TRIES, within=NEAR)
    node_of = {
        (number, copy, stage): node
        for number, own in enumerate(problem.pipes)
        for copy, nodes in enumerate(own.nodes)
        for stage, node in enumerate(nodes)
    }
    held: collections.Counter[int] = collections.Counter()
    most = 0
    for task in schedule.tasks:
        pipe, copy, stage = (int(task[name]) for name in ("pipe", "copy", "stage"))
        own = node_of[pipe, copy, stage]
        below = node_of.get((pipe, copy, stage - 1))
        above = node_of.get((pipe, copy, stage + 1))
        if task["kind"] == FORWARD:  # takes and keeps what the stage below gave, and gives
            if below is not None:
                held[below] -= 1
                held[own] += 1
            held[own] += above is not None
        elif above is not None:  # takes what the one above passed; passes on, and keeps no more
            held[above] -= 1
        most = max(most, *held.values())
    assert not any(held.values())
    assert problem.limit and problem.limit / 2 < most <= 2 * problem.limit


def test_a_student_beside_pipelines_lies_on_all_their_devices():
    changes = {"drafter.layers": 4, "drafter.learning_rate": 1e-4, "drafter.path": ""}
    changes |= {"generation.strategy": "model-chain-2"}
    held = []
    for pipelines in (True, False):
        _, run = pipelined(changes | {"training.pipelined": pipelines})
        held += [part.bytes for part in run.parts if part.name == "student and its optimizer"]
    assert len(held) == 2 and held[0] == held[1]


def test_no_memory_for_one_micro_batch_is_refused():
    _, run = pipelined({"training.microbatch_rows": 32, "generation.max_new_tokens": 65536})
    with pytest.raises(ValueError, match=r"A device needs .* in training .*microbatch_rows"):
        memory_parts.check(run.parts, 20e9)


def test_few_micro_batches_are_warned_of(capsys):
    config, run = pipelined({"training.microbatch_rows": 8})
    said = bubble_warnings(run.run(config))
    assert len(said) == 2
    assert "has 4 micro-batches in a minibatch for 8 stages, so alone it idles for 64%" in said[0]
    assert not bubble_warnings(pipelined()[1].run(config_of()))
    words = ["plan", "ppo_llama31_8b:gpu", "--devices", "gpu:8x8:h100", "--network", "100"]
    words += [f"--config.{key}={value}" for key, value in PIPELINED.items()]
    assert command.main([*words, "--config.mesh.tensor=8"]) == 0
    told = capsys.readouterr().out
    assert "bubbles" in told and "2 micro-batches in a minibatch for 8 stages" in told


@pytest.mark.long
def test_a_search_says_when_pipelines_win_and_by_how_much(found, capsys):
    print_search(found, [])
    told = " ".join(capsys.readouterr().out.split())
    assert found.trainings is not None
    joint = found.trainings.pipelined.joint
    longer = joint.serial / joint.fused
    assert f"one pipeline after the other: {longer:.2f} times as long" in told
    assert f"FSDP and TP: {found.trainings.gain:.2f} times as long" in told
    assert "256 tokens a chip and optimizer step; below 2,967, by the rule F eta / (2 D s)" in told
    proved = f"the best may be {found.gap:.1%} shorter" if found.gap else "no plan of this kind"
    assert f"times as fast as FSDP and TP; {proved}" in told and found.gap < 0.01
    assert "of pipelines: those of both models cut alike" in told and "not measured" in told


@pytest.mark.long
def test_a_mesh_of_pipelines_stands_beside_the_best_plan_without():
    changes = {"model.path": "meta-llama/Llama-3.2-1B", "drafter.path": ""}
    config, run = planned({**PIPELINED, **changes, "mesh.tensor": 8})
    searched = search_plans(config, run)
    plans = {plan.name: plan for plan in searched.plans}
    training = plans["mesh"].plan.placements["policy_training"]
    assert training.pipelined and not plans["mesh"].plan.placements["generation"].pipelined
    assert ("FSDP and TP" in plans) != ("pipelined" in plans)
    assert plans["found"].step <= min(plan.step for plan in searched.plans if plan.fits)


def test_pipelines_are_found_on_one_node_if_nothing_else_fits(monkeypatch):
    config = config_of()
    prices = PlanPrices.of(config, plan_run(config, parse_hardware("gpu:8:h100")), 0)
    monkeypatch.setattr(PlanPrices, "find", lambda *_: None)
    named = []
    best, said = find_with_pipelines(prices, named)
    assert best is not None and best.priced.plan.placements["policy_training"].pipelined
    assert "or where nothing else fits" in said and not named


@pytest.mark.slow
def test_samples_are_drawn_ahead_of_pipelines_on_devices_of_their_own():
    config, run = planned({"training.epochs": 1, "training.lag": 1})
    pipelines = best_pipelined(PlanPrices.of(config, run, 1)).priced
    own = set(pipelines.plan.placements["generation"].devices)
    training = pipelines.plan.placements["policy_training"]
    assert training.pipelined and not own & set(training.devices)
    assert pipelines.step == pytest.approx(max(pipelines.stages[0], sum(pipelines.stages[1:])))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mesh.slices": 1, "mesh.fsdp": 8},
            "pipelines policy_training over 1 slice, and each slice is a stage",
        ),
        (
            {"model.path": "Qwen/Qwen2.5-7B-Instruct", "critic.path": "Qwen/Qwen2.5-7B-Instruct"},
            "cuts the 28 layers of the policy into 8 stages, which do not divide them; give"
            " policy_training 7 or 14 slices",
        ),
        (
            {"critic.path": "Qwen/Qwen2.5-7B-Instruct"},
            "cuts the 28 layers of the critic into 8 stages",
        ),
        (
            {"model.path": "meta-llama/Llama-3.2-1B-Instruct"},
            "pipelines a critic of 32 layers beside a policy of 16",
        ),
        ({"plan": "colocated"}, "training.pipelined is for config.mesh, and plan is 'colocated'"),
        ({"algorithm.name": "distill", "drafter.layers": 2}, "'distill' trains none"),
    ],
)
def test_pipelines_that_cannot_be_are_refused_in_one_sentence(changes, said):
    changes = {"critic.path": "meta-llama/Llama-3.1-8B-Instruct", "drafter.path": "", **changes}
    with pytest.raises(ValueError) as error:
        pipelined(changes)
    assert said in str(error.value) and str(error.value).count(". ") == 0


def test_a_plan_pipelines_policy_and_critic_on_the_same_slices_or_neither():
    stages = Placement(0, 8, slices=4, tensor=2, pipelined=True)
    whole = dataclasses.replace(stages, pipelined=False)

    def plan(policy: Placement, critic: Placement) -> Plan:
        return Plan(8, dict(zip(BOTH, (policy, critic), strict=True)))

    check_pipelines(plan(stages, stages), "plan")
    check_pipelines(plan(whole, whole), "plan")
    check_pipelines(Plan(8, {"policy_training": stages}), "plan")
    with pytest.raises(ValueError, match="plan pipelines one of policy and critic, and not critic"):
        check_pipelines(plan(stages, whole), "plan")
    for other in ({"slices": 2, "tensor": 4}, {"first": 8}):
        with pytest.raises(ValueError, match="give both the same first and count"):
            check_pipelines(plan(stages, dataclasses.replace(stages, **other)), "plan")
    check_pipelines(plan(stages, dataclasses.replace(stages, slices=2, data=2)), "plan")
    check_layers(plan(stages, stages), "plan", {"policy": 8, "critic": 4})
    check_layers(plan(whole, whole), "plan", {"policy": 7, "critic": 9})
    with pytest.raises(ValueError, match="give critic_training 2 slices"):
        check_layers(plan(stages, stages), "plan", {"policy": 8, "critic": 6})
