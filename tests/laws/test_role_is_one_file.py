"""A role of an algorithm's own: its calls are planned, priced and described as a critic's are, and
its model is made, trained, kept and exported.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import toys

from benchmarks.chip import placed_calls
from benchmarks.placement_costs import SHAPES
from rlhf_jax import trainer
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.ppo import CRITIC_LOSS, PPO
from rlhf_jax.config import algorithms, command_line, derived
from rlhf_jax.memory import estimate
from rlhf_jax.models.files.source import open_source
from rlhf_jax.planner.describe import predict_calls
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.placed_calls import PlacedCalls
from rlhf_jax.planner.planned import hardware_of, plan_run
from rlhf_jax.planner.programs import programs
from rlhf_jax.planner.search.options import SearchSpace
from rlhf_jax.setup import validation

SMALL = SHAPES[0]._replace(layers=2)
OWN = ("judge_inference", "judge_training")


@pytest.fixture
def calls(monkeypatch) -> PlacedCalls:
    """PPO's calls beside those of a second critic, as large as the first."""
    own = dataclasses.replace(
        PPO,
        losses={**PPO.losses, "judge": CRITIC_LOSS},
        scores=lambda config: (*PPO.scorers(config), "judge"),
    )
    whole = placed_calls(SMALL.model, jax.devices(), SMALL.rows, SMALL.tokens)
    monkeypatch.setitem(algorithms.ALGORITHMS, "two critics", own)
    whole.config.algorithm.name = "two critics"
    found = derived.calls(whole.config)
    assert set(OWN) < set(found)
    judge = dataclasses.replace(SMALL.model, scalar_head=True, tied=False)
    placed = {call: whole.plan.placements["critic_training"] for call in found}
    placed["generation"] = whole.plan.placements["generation"]
    return dataclasses.replace(
        whole,
        models=whole.models._replace(critics={**whole.models.critics, "judge": judge}),
        plan=dataclasses.replace(whole.plan, placements=placed),
    )


def test_its_programs_are_those_of_a_critic(calls):
    found = {(one.call, one.name): one for one in programs(calls)}
    names = {"inference": ("scores",), "training": ("gradient", "optimizer's step")}
    for own in OWN:
        critic = own.replace("judge", "critic")
        for name in names[own.rpartition("_")[2]]:
            program, other = found[own, name], found[critic, name]
            assert program.predicted == other.predicted
            assert str(program.trace(program.depth).jaxpr) == str(other.trace(other.depth).jaxpr)


def test_it_is_held_moved_and_priced_as_a_critic(calls):
    parts = {one.name: one.bytes for one in calls.parts("judge_training")}
    for name in ("{}, float32", "{}'s optimizer, two moments"):
        assert parts[name.format("judge")] == parts[name.format("critic")] > 0
    # both gradients before it wait
    assert {"the policy's gradients, waiting", "the critic's gradients, waiting"} <= parts.keys()

    hardware = parse_hardware("v5p:2x2x2")
    run = dataclasses.replace(calls.run("policy_training"), layouts=calls.layouts)
    costs = {one.name: one.seconds for one in predict_calls(run, hardware)}
    base = calls.plan.placements["generation"]
    space = SearchSpace(calls.config, calls.models, hardware, base, remat=True)
    for own in OWN:
        critic = own.replace("judge", "critic")
        assert costs[own] == costs[critic] > 0
    assert space.sources["judge_inference"] == "judge_training"
    stages = [set(stage) for stage in space.problem().stages]
    assert {own for own in OWN if own.endswith("training")} < stages[-1]
    groups = estimate.by_group(calls.config, calls.models, calls.plan, calls.layouts, True)
    assert set(OWN) < set(groups[0][0])


# Runs


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Of an algorithm and changes: the config of a run on one device."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    folder = tiny_run.make_model(tmp_path / "tiny")

    def read(algorithm: str, **changes):
        common = {"steps": 2, "evaluation__every": 0, "critic__learning_rate": 1e-3}
        named = common | {"algorithm__name": algorithm, "deterministic": True} | changes
        return command_line.read(tiny_run.arguments(tmp_path, folder, **named))

    return read


def own(name: str) -> str:
    return f"{toys.__file__}:{name}"


def planned(config) -> dict[str, int]:
    """Bytes by part of memory."""
    return {part.name: part.bytes for part in plan_run(config, hardware_of(config)).parts}


def test_a_second_critic_is_planned_once_more(read):
    ppo, both = planned(read("ppo")), planned(read(own("TWO_CRITICS")))
    for name in ("{}, float32", "{}'s optimizer, two moments"):
        assert both[name.format("judge")] == both[name.format("critic")] > 0
        assert ppo[name.format("critic")] == both[name.format("critic")]
    held = {"judge, float32", "judge's optimizer, two moments"}
    assert both.keys() - ppo.keys() == {*held, "the critic's gradients, waiting"}


def test_only_what_learns_has_gradients_and_moments_whether_there_are_rewards_or_not(
    read, monkeypatch
):
    unrewarded = dataclasses.replace(GRPO, rewarded=False)
    monkeypatch.setitem(algorithms.ALGORITHMS, "unrewarded", unrewarded)
    parts = planned(read("unrewarded", reward__functions="()"))
    assert parts == planned(read("grpo"))
    learning = ("policy's optimizer, two moments", "gradients, float32")
    assert all(parts[name] > 0 for name in learning)

    judge = planned(read(own("JUDGE_ALONE")))
    assert judge["policy, float32"] == parts["policy, float32"]
    assert judge["judge's optimizer, two moments"] == 2 * judge["gradients, float32"] > 0
    assert judge["rater"] == judge["judge, float32"]
    assert not {"policy's optimizer, two moments", "the policy's gradients, waiting"} & set(judge)


def test_a_critic_needs_a_name_of_its_own(read, monkeypatch):
    cases = ((), {"reward": CRITIC_LOSS}), (("student",), PPO.losses), (("sinks",), PPO.losses)
    for scores, losses in cases:
        named = dataclasses.replace(PPO, scores=scores, losses=losses)
        monkeypatch.setitem(algorithms.ALGORITHMS, "named", named)
        with pytest.raises(ValueError, match="as something else of a run is; give it another"):
            validation.validate(read("named"), 1)


def test_a_critic_that_is_not_trained_has_values_already(read, tmp_path):
    with pytest.raises(ValueError, match=r"The rater of .* give a critic\.path that is a reward"):
        trainer.plan(read(own("JUDGE_ALONE"), critic__path=tmp_path / "tiny"))


@pytest.mark.slow
def test_a_second_critic_learns_as_the_first(read):
    _, opened = trainer.do_run(read(own("TWO_CRITICS")))
    for line in tiny_run.lines(opened.workdir / "metrics.jsonl"):
        assert line["judge/gradient_norm"] > 0 and line["critic/gradient_norm"] > 0
        # of the same returns, from the same weights, at the same rate
        assert line["judge/loss"] == pytest.approx(line["loss/value"], rel=1e-5)
    assert not {"critic", "judge"} & {path.name for path in opened.workdir.iterdir()}


@pytest.mark.slow
def test_a_judge_that_is_all_that_learns_is_what_the_run_leaves(read, tmp_path, capsys):
    rater = tiny_run.make_model(tmp_path / "rater", seed=3, tied=False, scalar_head=True)
    state, opened = trainer.do_run(read(own("JUDGE_ALONE"), critic__path=rater))
    first, second = tiny_run.lines(opened.workdir / "metrics.jsonl")
    assert first["judge/moved"] == 0 < second["judge/moved"]
    assert f"he trained judge is in {opened.workdir}/judge, and" in capsys.readouterr().out
    assert not (opened.workdir / "policy").exists()

    source = open_source(opened.workdir / "judge")
    jax.tree.map(
        np.testing.assert_array_equal, source.load(jnp.float32), state.models["judge"].weights
    )
    assert source.config.scalar_head
    described = json.loads((opened.workdir / "judge" / "config.json").read_text())
    assert described["architectures"] == ["LlamaForSequenceClassification"]
    assert described["id2label"] == {"0": "LABEL_0"}  # one label, as transformers counts them
    policy = open_source(opened.config.model.path).load(jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, policy, state.models["policy"].weights)
