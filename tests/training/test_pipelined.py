"""Pipelines give the gradients of the update without them, bit by bit the same in any schedule, and
keep no more inputs than planned.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import EIGHT, devices, needs_libtpu
from experiences import KL_WEIGHT, MANY, random_critic
from jax.sharding import NamedSharding, PartitionSpec
from learning import update
from pipelines import ROWS, SMALL_STEPS, Case, case_of, gpipe, layouts_of, models_of, new_state
from samples import in_groups, spread
from shipped_configs import load

from benchmarks.compiled import LLAMA_8B
from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.mesh import bytes_per_device, place_rows
from rlhf_jax.models.flops import count_flops
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.pipeline.problem import Pipe, PipelineProblem, lay_copies
from rlhf_jax.pipeline.queues import queues_of
from rlhf_jax.pipeline.schedule import Schedule, earliest_starts, make_schedule, one_f_one_b
from rlhf_jax.placement.plan import Placement, Plan
from rlhf_jax.planner.shapes import micro_batch_shapes, model_shapes, repeated
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training import pipelined
from rlhf_jax.training.gradients import Gradient, Learner, accumulate, sum_gradients
from rlhf_jax.training.kinds import GroupLoss
from rlhf_jax.training.pipelined import measure_stages, sum_pipelined
from rlhf_jax.training.schedules import schedule_of
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.training.stages import backward, forward, split_model, stages_of, sum_copies
from rlhf_jax.types import Model, Models

# Stages, fsdp, tensor; the first one is fast, and those after the third are long.
SIZES = [(2, 1, 1), (4, 1, 1), (2, 1, 2), (8, 1, 1), (2, 2, 2)]


@pytest.fixture
def deep(tiny):
    """Eight layers, and few tokens."""
    return dataclasses.replace(tiny, num_layers=8, vocab_size=64)


def unpipelined(case: Case, *models: Model) -> list[Gradient]:
    """The same gradients on one device."""
    found = []
    for learner, model, parts in zip(case.learners, models, case.batches, strict=True):
        total = None
        for part in parts:
            total = accumulate(
                total, model, place_rows(part, ROWS.layout), loss=learner.loss, settings=ROWS
            )
        found.append(total)
    return found


def problem_of(case: Case) -> PipelineProblem:
    """Pipes in which a backward takes as long as three forwards."""
    pipes = []
    for index, (learner, parts) in enumerate(zip(case.learners, case.batches, strict=True)):
        layout = learner.settings.layout
        stages = layout.slices
        nodes = lay_copies(layout.extent("data") * stages, stages, opposed=index > 0)
        units = (1.0,) * stages
        pipes.append(Pipe(nodes, len(parts), units, (3.0,) * stages, units))
    return PipelineProblem(tuple(pipes))


def any_order(problem: PipelineProblem, seed: int) -> Schedule:
    """A schedule of tasks that were drawn one by one from those that may come next."""
    queues = queues_of(problem)
    order: list[list[float]] = [[] for _ in queues]
    draws = random.Random(seed)
    for now in range(sum(queue.tasks for queue in queues)):
        ready = [
            place
            for place, queue in enumerate(queues)
            if len(order[place]) < queue.tasks
            and (queue.before is None or len(order[queue.before]) > len(order[place]))
        ]
        order[draws.choice(ready)].append(float(now))
    return make_schedule(problem, earliest_starts(queues, order))


def weights_of(models: Models) -> list[Model]:
    return [one.weights for one in models.values()]


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_near(found: list[Gradient], wanted: list[Gradient], share: float):
    """Every weight's gradient within a share of its largest entry."""
    for got, want in zip(found, wanted, strict=True):
        for a, b in zip(jax.tree.leaves(got.weights), jax.tree.leaves(want.weights), strict=True):
            assert np.abs(np.asarray(a) - b).max() <= share * np.abs(b).max()
        for name, value in want.metrics.items():
            assert float(got.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [SIZES[0], *(pytest.param(sizes, marks=pytest.mark.long) for sizes in SIZES[1:])]
)
def test_gradients_are_those_without_pipelines_in_every_schedule(deep, sizes):
    if sizes == SIZES[1]:
        deep = dataclasses.replace(deep, tied=False)
    policy, critic, experience = models_of(deep)
    case = case_of(policy, critic, experience, layouts_of(*sizes))
    check_gradients(policy, critic, case)


def check_gradients(policy: Model, critic: Model, case: Case):
    """They are near those of one device, and the same in every schedule, where models lie."""
    fused = schedule_of(*case, times={})
    found = sum_pipelined(*case, fused.schedule)
    assert_near(found, unpipelined(case, policy, critic), share=1e-5)
    problem = problem_of(case)
    for other in (
        gpipe(problem),
        one_f_one_b(problem),
        any_order(problem, 0),
        any_order(problem, 1),
    ):
        assert_same_bits(sum_pipelined(*case, other), found)
    for learner, model, gradient in zip(case.learners, case.models, found, strict=True):
        places = jax.tree.map(lambda leaf: leaf.sharding, gradient.weights)
        assert places == model_shardings(model, learner.settings.layout)
    assert fused.schedule.bound <= fused.schedule.makespan * (1 + 1e-9) < fused.serial


@pytest.mark.slow
def test_a_pipeline_computes_what_the_update_without_computes(deep):
    """FLOPs of every program that either runs, with layers computed again in both. A stage's
    backward is traced with its last layers' last product, which nothing reads: 2.8 % of these.
    """
    policy, critic, experience = models_of(deep)
    case = case_of(policy, critic, experience, layouts_of(4))
    flops = {"pipelined": 0, "whole": 0}

    @functools.cache
    def flops_of(function, shapes, structure, options) -> int:
        arguments = jax.tree.unflatten(structure, shapes)
        return count_flops(functools.partial(function, **dict(options)), *arguments)

    def counted(name: str):
        def execute(function, *arguments, **options):
            shapes, structure = jax.tree.flatten(jax.eval_shape(lambda *given: given, *arguments))
            flops[name] += flops_of(function, tuple(shapes), structure, tuple(options.items()))
            return function(*arguments, **options)

        return execute

    schedule = schedule_of(*case, times={}).schedule
    sum_pipelined(*case, schedule, execute=counted("pipelined"))
    for learner, model, parts in zip(case.learners, (policy, critic), case.batches, strict=True):
        alone = dataclasses.replace(learner, settings=ROWS)
        sum_gradients(alone, model, parts, execute=counted("whole"))
    assert flops["whole"] > 0
    assert flops["pipelined"] == pytest.approx(flops["whole"], rel=0.03)


def test_a_loss_of_groups_is_the_same_in_a_pipeline(deep):
    """Of samples in groups of four, each of which one line holds."""
    policy = init(jax.random.key(0), deep)
    layout = layouts_of(2)["policy_training"]
    given = in_groups(deep.vocab_size)
    known = with_shares(given, np.zeros(given.mask.shape, np.float32))
    settings = dataclasses.replace(ROWS, layout=layout)
    loss = GroupLoss(spread, reads=("rewards",))
    learner = Learner("policy", loss, SMALL_STEPS.policy, settings)
    parts = pack(known, Extent(1, group_tokens=64), 16, layout.row_shards, whole_groups=True)
    batches = [part.batch for part in parts]
    assert len(batches) > 1
    placed = jax.device_put(policy, model_shardings(policy, layout))
    case = Case([learner], [placed], [batches])
    found = sum_pipelined(*case, schedule_of(*case, times={}).schedule)
    assert_near(found, unpipelined(case, policy), share=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copies", "critic_copies"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_copies_of_a_shallower_critic_share_the_rows(deep, copies, critic_copies):
    """The policy has four stages of two layers, and each copy of the critic two of two."""
    policy, _, experience = models_of(deep)
    critic = random_critic(dataclasses.replace(deep, num_layers=deep.num_layers // critic_copies))
    layouts = layouts_of(4, copies=copies, critic_copies=critic_copies)
    case = case_of(policy, critic, experience, layouts)
    check_gradients(policy, critic, case)


def test_copies_sum_their_gradients_in_place_and_gather_nothing(deep):
    """One of twice the weights, and one of the weights themselves."""
    layout = layouts_of(4, critic_copies=2)["critic_training"]
    model = init(jax.random.key(0), deep)
    programs = []

    def noting(function, *given, **options):
        compiled = function.lower(*given, **options).compile()
        programs.append((compiled.as_text(), compiled.memory_analysis()))
        return function(*given, **options)

    found = []
    for times, own in enumerate(layout.split("data"), 1):
        weights = jax.tree.map(functools.partial(jnp.multiply, times), model)
        metrics = {"loss": jnp.float32(times), "ratio/max": jnp.float32(times)}
        gradient = Gradient(weights, metrics)
        found.append(jax.device_put(gradient, model_shardings(gradient, own)))
    total = sum_copies(found, layout, noting)
    text, memory = programs[-1]
    assert "all-reduce" in text and not re.search("all-gather|all-to-all|collective-permute", text)
    assert memory.alias_size_in_bytes >= bytes_per_device(model, model_shardings(model, layout))
    assert_same_bits(total.weights, jax.tree.map(lambda leaf: 3 * leaf, model))
    assert {name: float(value) for name, value in total.metrics.items()} == {
        "loss": 3.0,
        "ratio/max": 2.0,
    }


@pytest.mark.slow
def test_an_update_with_pipelines_is_the_update_without(deep):
    """Two epochs of two minibatches, twice; the policy's step waits for the critic's gradient."""
    policy, critic, experience = models_of(deep)
    layouts = layouts_of(4)
    stages = dataclasses.replace(MANY, layout=layouts["policy_training"])
    found = []
    for own, settings in ((None, MANY), (layouts, stages)):
        state = new_state(policy, critic, own)
        other = own["critic_training"] if own else None
        for _ in range(2):
            state, metrics = update(state, experience, SMALL_STEPS, settings, KL_WEIGHT, other)
        found.append((state, metrics))
    (state, metrics), (own, told) = found
    moved = jax.tree.map(np.subtract, weights_of(state), [policy, critic])
    differ = jax.tree.map(np.subtract, weights_of(own), weights_of(state))
    norms = [float(optax.global_norm(tree)) for tree in (differ, moved)]
    assert norms[0] <= 1e-4 * norms[1]
    for name, value in metrics.items():
        assert told[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert told["pipeline/bound"] <= told["pipeline/makespan"] * (1 + 1e-9)
    assert told["pipeline/makespan"] < told["pipeline/serial"]
    assert told["pipeline/peak"] > 0


@pytest.mark.slow
def test_a_policy_that_has_moved_too_far_stops_both(deep):
    policy, critic, experience = models_of(deep)
    moved = np.asarray(experience.columns["logprobs"]) - np.asarray(experience.mask, np.float32)
    experience = experience.with_columns(logprobs=moved)
    layouts = layouts_of(2)
    settings = dataclasses.replace(ROWS, target_kl=0.1, layout=layouts["policy_training"])
    state = new_state(policy, critic, layouts)
    other = layouts["critic_training"]
    state, metrics = update(state, experience, SMALL_STEPS, settings, KL_WEIGHT, other)
    assert metrics["training/minibatches_done"] == 0 and metrics["kl/old"] > 0.1
    assert_same_bits(weights_of(state), [policy, critic])


def test_inputs_that_are_kept_follow_the_schedule(deep, monkeypatch):
    """At no task does a stage hold more of them than planned, nor a device more hidden states than
    are kept and on their way.
    """
    policy, critic, experience = models_of(deep)
    case = case_of(policy, critic, experience, layouts_of(2))
    running: list[pipelined.RunningStage] = []
    most: dict[int, int] = {}

    class Watched(pipelined.RunningStage):
        def __init__(self, *given):
            super().__init__(*given)
            running.append(self)

    def watching(step: Callable) -> Callable:
        def watched(*given):
            step(*given)
            shape = (*case.batches[0][0].tokens.shape, deep.width)
            kept: dict[int, int] = {}
            waiting: dict[int, int] = {}
            for own in running:
                device = own.stage.settings.layout.devices.flat[0].id
                inputs = sum(given is not None for given, _ in own.kept.values())
                kept[device] = kept.get(device, 0) + inputs
                there = waiting.get(device, 0) + len(own.gave) + len(own.cotangents)
                waiting[device] = there
            for device, count in kept.items():
                most[device] = max(most.get(device, 0), count)
                alive = [
                    one
                    for one in jax.live_arrays()
                    if one.shape == shape and device in {own.id for own in one.devices()}
                ]
                assert len(alive) <= count + waiting[device]

        return watched

    monkeypatch.setattr(pipelined, "RunningStage", Watched)
    monkeypatch.setattr(pipelined, "_go_forward", watching(pipelined._go_forward))
    monkeypatch.setattr(pipelined, "_go_backward", watching(pipelined._go_backward))
    for schedule in (schedule_of(*case, times={}).schedule, any_order(problem_of(case), 3)):
        running.clear()
        most.clear()
        sum_pipelined(*case, schedule)
        given = np.prod((*case.batches[0][0].tokens.shape, deep.width)) * 4
        unit = given if schedule.peak.max() > 100 else 1
        assert all(most[node] <= schedule.peak[node] / unit for node in most), (most, schedule.peak)
        assert max(most.values()) > 0


def test_nothing_is_traced_again_in_a_minibatch(deep, compilations):
    policy, critic, experience = models_of(deep)
    case = case_of(policy, critic, experience, layouts_of(2))
    schedule = schedule_of(*case, times={}).schedule
    sum_pipelined(*case, schedule)
    with compilations() as counted:
        sum_pipelined(*case, any_order(problem_of(case), 0))
    assert not counted


def test_stages_are_measured_where_runs_need_not_repeat_themselves(deep):
    policy, critic, experience = models_of(deep)
    case = case_of(policy, critic, experience, layouts_of(2))
    learner = case.learners[0]
    times = measure_stages(learner, case.models[0], case.batches[0][0])
    assert 0 < times.forward[0] < times.backward[0] < 10 and times.forward[1] == 0
    fused = schedule_of(*case, times={learner.call: times, "critic_training": times})
    assert fused.schedule.makespan < 20


@needs_libtpu
@pytest.mark.long
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("call", ["policy_training", "critic_training"])
@pytest.mark.parametrize("index", [0, 1, 3])
def test_stages_of_8b_models_compile_for_a_tpu_and_add_to_their_sums_in_place(call, index):
    """The first stage, one in the middle and the last of four, on two chips each."""
    config = load("ppo_llama31_8b:tpu")
    chips = list(devices(EIGHT["v5p"]))
    placed = Placement(0, 8, slices=4, tensor=2, dtype="bfloat16", pipelined=True)
    layouts = Plan(8, {"generation": placed, call: placed}).layouts(chips)
    shape = LLAMA_8B
    if call.startswith("critic"):
        shape = dataclasses.replace(LLAMA_8B, scalar_head=True, tied=False)
    model = model_shapes(shape, layouts[call], jnp.dtype(jnp.float32))
    settings = TrainingSettings(layout=layouts[call], microbatch_rows=2)
    loss = POLICY_LOSS if call.startswith("policy") else CRITIC_LOSS
    stages = stages_of(Learner(call, loss, optax.identity(), settings))
    parts = split_model(model, stages)
    stage = stages[index]
    layout = stage.settings.layout
    batch = micro_batch_shapes(config, layout, rows=2, reads=loss.reads)
    hidden = jax.ShapeDtypeStruct((*batch.tokens.shape, shape.width), jnp.bfloat16)
    between = NamedSharding(layout.mesh, PartitionSpec(None, None, "tensor"))
    hidden = hidden.update(sharding=between)
    given = hidden if index else None
    pulled = hidden if index < 3 else None
    needed = stage.needed(batch)
    if pulled is not None:
        forward.lower(parts[index], given, needed, stage=stage).compile()
    sums = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), parts[index])
    told = functools.partial(backward, stage=stage)
    first = jax.eval_shape(told, None, parts[index], given, needed, pulled)[0]
    total = Gradient(sums, repeated(first.metrics, layout))
    found = backward.lower(total, parts[index], given, needed, pulled, stage=stage).compile()
    held = bytes_per_device(sums, jax.tree.map(lambda leaf: leaf.sharding, sums))
    kept = np.prod(hidden.shape) * 2 // 2 if index else 0
    sizes = found.memory_analysis()
    assert sizes is not None
    aliased = sizes.alias_size_in_bytes
    print(f"{call}, stage {index}: {aliased / 1e9:.3f} GB in place, sums {held / 1e9:.3f}")
    assert held <= aliased <= held + kept + 4096
