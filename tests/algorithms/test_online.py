"""Algorithms that learn from the policy's own ranked answers: online DPO, RAFT, a teacher."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import resuming
import tiny_run

from rlhf_jax import trainer
from rlhf_jax.algorithms import grpo, online_dpo, raft
from rlhf_jax.config import command_line, default, derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.earlier import settled
from rlhf_jax.report.run import read_run
from rlhf_jax.report.warnings import warnings
from rlhf_jax.runtime.checkpoint import document
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.setup.describe import learning_rows

TOKENS = 6


def config_of(name: str, samples: int, **options):
    config = default(name)
    config.generation.samples_per_prompt = samples
    config.algorithm.update(options)
    return settled(config)


def batch_of(*rewards: float) -> Sequences:
    """Different samples, of one token more each."""
    count = len(rewards)
    mask = np.arange(TOKENS) <= np.arange(count)[:, None] % TOKENS
    tokens = np.repeat(np.arange(1, count + 1, dtype=np.int32)[:, None], TOKENS, axis=1)
    batch = Sequences(tokens, mask, np.zeros(count, np.int32))
    return batch.with_columns(
        rewards=np.array(rewards, np.float32),
        ended=np.ones(count, bool),
        sample_ids=np.arange(count, dtype=np.uint32),
        sampled_logprobs=np.zeros(mask.shape, np.float32),
    )


def pairs_of(batch: Sequences) -> list[tuple[int, int]]:
    """The ids of the chosen and the rejected sample of each pair, whose group is its own."""
    ids = np.asarray(batch.columns["sample_ids"])
    preference = np.asarray(batch.columns["preference"])
    assert np.array_equal(preference != 0, np.asarray(batch.mask).any(axis=1))
    groups = [np.flatnonzero(batch.group == group) for group in np.unique(batch.group)]
    return [
        (int(ids[rows][preference[rows] > 0][0]), int(ids[rows][preference[rows] < 0][0]))
        for rows in groups
        if preference[rows].any()
    ]


@pytest.mark.parametrize(
    ("pair", "expected"),
    [("best_and_worst", [(2, 0), (9, 10)]), ("best_and_second", [(2, 1), (9, 10)])],
)
def test_pairs_are_chosen_by_rank_and_equal_ones_dropped(pair, expected):
    batch = batch_of(0, 1, 2, 1, 3, 3, 3, 3, np.nan, 1, 0, np.nan)
    found, metrics = online_dpo.ranked_pairs(batch, config_of("online_dpo", 4, pair=pair))
    assert pairs_of(found) == expected
    assert metrics["preference/pairs"] == 2


def test_equal_answers_make_no_pair_whatever_their_rewards():
    """A reward model may round those of one text differently."""
    batch = batch_of(1.0, 1.0 + 1e-6, 0.0, 2.0)
    tokens = np.ones((4, TOKENS), np.int32)
    mask = np.arange(TOKENS) < np.array([3, 3, 3, 4])[:, None]
    alike = dataclasses.replace(batch, tokens=tokens, mask=mask)
    found, metrics = online_dpo.ranked_pairs(alike, config_of("online_dpo", 2))
    assert pairs_of(found) == [(3, 2)], "one is longer"
    assert metrics["preference/pairs"] == 1


@pytest.mark.parametrize(
    ("name", "options", "groups"),
    [
        ("online_dpo", {}, (1, 2)),
        ("online_dpo", {"temperatures": (1.0, 0.7)}, (2, 2)),
        ("online_dpo", {"temperatures": (1.0, 0.7), "across_temperatures": True}, (1, 2)),
        ("raft", {}, (1, 1)),
        ("grpo", {}, (1, 8)),
    ],
)
def test_as_many_samples_are_planned_as_are_chosen(name, options, groups):
    config = config_of(name, 8, **options)
    config.generation.prompts_per_step = 5
    rewards = np.random.default_rng(0).permutation(40).astype(float)
    found, _ = algorithm_of(config).choose(batch_of(*rewards), config)
    assert derived.chosen(config) == groups
    assert derived.chosen_samples(config) == found.mask.any(axis=1).sum()
    new = config.generation.max_new_tokens
    assert derived.group_tokens(config) == config.data.max_prompt_tokens + groups[1] * new


def test_random_pairs_prefer_the_better_and_follow_the_seed():
    batch = batch_of(*np.random.default_rng(0).permutation(64).astype(float))
    config = config_of("online_dpo", 8, pair="random")
    found, metrics = online_dpo.ranked_pairs(batch, config)
    assert metrics["preference/pairs"] == 8
    rewards = np.asarray(batch.columns["rewards"]).reshape(8, 8)
    chosen, rejected = np.array(pairs_of(found)).T
    assert (rewards.flat[chosen] > rewards.flat[rejected]).all()
    assert pairs_of(online_dpo.ranked_pairs(batch, config)[0]) == pairs_of(found)
    assert not np.array_equal(chosen % 8, rewards.argmax(axis=1)), (
        "a random pair need not hold the best"
    )


def test_pairs_are_within_a_temperature_unless_asked_otherwise():
    batch = batch_of(0, 1, 2, 3)
    config = config_of("online_dpo", 4, temperatures=(1.0, 0.7))
    assert online_dpo.temperatures(config) == (1.0, 1.0, 0.7, 0.7)
    found, metrics = online_dpo.ranked_pairs(batch, config)
    assert pairs_of(found) == [(1, 0), (3, 2)]
    assert metrics["chosen/temperature"] == metrics["rejected/temperature"] == 0.85
    assert (metrics["chosen/tokens"], metrics["rejected/tokens"]) == (3.0, 2.0)
    config = config_of("online_dpo", 4, temperatures=(1.0, 0.7), across_temperatures=True)
    found, metrics = online_dpo.ranked_pairs(batch, config)
    assert pairs_of(found) == [(3, 0)]
    assert (metrics["chosen/temperature"], metrics["rejected/temperature"]) == (0.7, 1.0)


def test_gains_are_at_temperature_1_wherever_samples_were_drawn():
    batch = batch_of(0, 1, 2, 3)
    warm = np.repeat(np.array([1.5, 1.0, 1.25, 1.25], np.float32)[:, None], TOKENS, axis=1)
    batch = batch.with_columns(temperatures=warm)
    config = config_of("online_dpo", 2)
    found, metrics = online_dpo.ranked_pairs(batch, config)
    assert not {"temperatures", "sampled_logprobs"} & found.columns.keys()
    assert (metrics["chosen/temperature"], metrics["rejected/temperature"]) == (1.125, 1.375)
    scored = found.with_columns(logprobs=np.zeros(found.mask.shape, np.float32))
    assert "reference_logprobs" in online_dpo.gains_from(scored, config)[0].columns


def test_a_length_penalty_ranks_and_is_no_reward():
    batch = batch_of(1.0, 1.5)
    found, _ = online_dpo.ranked_pairs(batch, config_of("online_dpo", 2, length_penalty=1.0))
    assert pairs_of(found) == [(0, 1)]
    np.testing.assert_array_equal(found.columns["rewards"], batch.columns["rewards"])


@pytest.mark.parametrize("minibatches", [1, 3])
def test_pairs_of_earlier_steps_are_trained_on_and_saved(tmp_path, minibatches):
    config = config_of("online_dpo", 2, history="all")
    config.training.minibatches = minibatches
    memory = {}
    steps = [(1.0, 1.0), (0.0, 1.0, 3.0, 2.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0)]
    for step, rewards in enumerate(steps):
        batch = batch_of(*rewards)
        ids = batch.columns["sample_ids"] + np.uint32(10 * step)
        reference = np.where(batch.mask, -1.0 - step, 0.0).astype(np.float32)
        batch = batch.with_columns(sample_ids=ids, reference_logprobs=reference)
        paired, _ = online_dpo.gains_from(online_dpo.ranked_pairs(batch, config)[0], config)
        found, memory = online_dpo.with_earlier_pairs(paired, memory, config)
        assert len(found.group) % (2 * minibatches) == 0
        (tmp_path / "saved").write_text(json.dumps(document.make(memory=memory)))
        memory = document.read(tmp_path / "saved")["memory"]
    kept = np.asarray(found.columns["preference"]) != 0
    assert found.columns["preference"][kept].tolist() == [1.0, -1.0] * 3
    assert np.asarray(found.mask).sum(axis=1)[kept].tolist() == [2, 1, 3, 4, 2, 1]
    lowest = np.asarray(found.columns["reference_logprobs"]).min(axis=1)[kept]
    assert lowest.tolist() == [-2.0] * 4 + [-4.0] * 2, "of the steps that the pairs are from"
    current = config_of("online_dpo", 2)
    assert online_dpo.with_earlier_pairs(paired, memory, current) == (paired, {})


def test_options_of_advantages_are_named_where_there_are_none():
    policy = SimpleNamespace(config=tiny_run.CONFIG)
    named = "kl.coefficient=0.5, reward.whiten=True: RAFT"
    for name, expected in (("grpo", []), ("raft", [named])):
        spec: Any = SimpleNamespace(config=config_of(name, 4), policy=policy)
        assert not learning_rows(spec)[1:]
        spec.config.kl.coefficient = 0.5
        spec.config.reward.whiten = True
        found = [line.partition(" has no")[0] for _, line in learning_rows(spec)[1:]]
        assert found == expected


def test_raft_keeps_the_best_of_each_prompt():
    rewards = (0, 2, 1, np.nan, np.nan, np.nan, 1, 1, 1)
    found, metrics = raft.best_of_n(batch_of(*rewards), config_of("raft", 3))
    assert found.columns["sample_ids"][found.mask.any(axis=1)].tolist() == [1]
    assert len(found.mask) == 1
    assert metrics["best/reward"] == 2.0
    assert metrics["best/kl"] == pytest.approx(np.log(3) - 2 / 3)


def test_the_prompts_of_most_certainty_are_left_out():
    batch = batch_of(*range(8))
    probabilities = np.repeat([0.9, 0.2, 0.5, 0.7], 2)
    drawn = np.broadcast_to(np.log(probabilities)[:, None], batch.mask.shape).astype(np.float32)
    batch = batch.with_columns(sampled_logprobs=np.where(batch.mask, drawn, 0.0).astype(np.float32))
    config = config_of("grpo", 2, drop_ratio=0.5)
    found, metrics = grpo.without_confident(batch, config)
    assert found.mask.any(axis=1).tolist() == [False, False, True, True, True, True, False, False]
    assert metrics["confidence/mean"] == pytest.approx(0.575)
    assert metrics["confidence/kept"] == pytest.approx(0.35)
    fewer = dataclasses.replace(batch, mask=batch.mask & (np.arange(8) != 1)[:, None])
    found, metrics = grpo.without_confident(fewer, config)
    assert found.mask.any(axis=1).tolist() == [False, False, True, True, True, True, False, False]
    assert metrics["confidence/mean"] == pytest.approx(0.575), "of the samples that there are"


@pytest.mark.parametrize(
    ("name", "samples", "options", "words"),
    [
        ("raft", 1, {}, "raft chooses the best of two or more"),
        ("online_dpo", 1, {}, "a pair takes two answers: raise it"),
        ("online_dpo", 2, {"temperatures": (1.0, 0.7)}, "two answers of each temperature"),
        ("online_dpo", 3, {"temperatures": (1.0, 0.7)}, "make the first a multiple"),
        ("online_dpo", 2, {"temperatures": (0.0,)}, "numbers above 0"),
        ("online_dpo", 2, {"label_smoothing": 0.1}, "does not read"),
        ("on_policy_distill", 1, {}, "the policy would teach itself"),
    ],
)
def test_what_cannot_learn_is_one_sentence(name, samples, options, words):
    config = config_of(name, samples, **options)
    with pytest.raises(ValueError, match=words):
        algorithm_of(config).check_options(config)
        algorithm_of(config).check(config)


@pytest.fixture
def run(tmp_path, one_device):
    """Take steps of an algorithm, and return the metrics of each."""
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")

    def run(name: str, **changes) -> list[dict]:
        common = {"algorithm__name": name, "evaluation__every": 0, "workdir": tmp_path / name}
        config = command_line.read(tiny_run.arguments(tmp_path, model, **common | changes))
        trainer.do_run(config)
        return tiny_run.lines(Path(config.workdir) / "metrics.jsonl")

    return run


@pytest.mark.slow
def test_online_dpo_learns_from_what_it_writes(run, tmp_path):
    steps = run(
        "online_dpo",
        algorithm__temperatures="(1.0, 0.7)",
        generation__samples_per_prompt=8,
        training__epochs=2,
        steps=6,
        training__learning_rate=3e-3,
    )
    assert all(np.isfinite(step["loss/policy"]) for step in steps)
    assert all(step["preference/pairs"] <= 8 for step in steps)
    assert steps[-1]["preference/margin"] > 0
    assert 0 < steps[0]["kl/mean"] < steps[-1]["kl/mean"]
    previous = run(
        "online_dpo",
        algorithm__reference="previous",
        algorithm__loss="ipo",
        workdir=tmp_path / "previous",
        steps=2,
    )
    assert abs(previous[0]["preference/margin"]) < 1e-4  # policy and reference begin as one
    assert previous[0]["kl/mean"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("history", ["current", "all"])
def test_without_a_usable_pair_nothing_is_learned_and_the_report_says_why(run, tmp_path, history):
    (tmp_path / "reward.py").write_text("def vowels(prompt, response, row):\n    return 1.0\n")
    steps = run("online_dpo", algorithm__history=history, steps=2)
    assert [step["preference/pairs"] for step in steps] == [0.0, 0.0]
    assert not any("loss/policy" in step or "chosen/tokens" in step for step in steps)
    before, after = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("tiny", "online_dpo/policy")
    )
    assert before == after
    told = warnings(read_run(tmp_path / "online_dpo"))
    assert any("100% of the steps had no two answers of different reward" in one for one in told)


@pytest.mark.slow
def test_killed_while_sampling_ranking_and_training_it_is_uninterrupted(place, monkeypatch):
    changes = resuming.CHANGES | {
        "algorithm__name": "online_dpo",
        "algorithm__history": "all",
        "algorithm__temperatures": "(1.0, 0.7)",
        "generation__samples_per_prompt": 4,
        "generation__resample": 0,
        "kl__place": "loss",
        "kl__estimator": "k3",
        "kl__target": 0.0,
        "checkpoint__every": 1,
        "steps": 4,
    }
    monkeypatch.setattr(resuming, "CHANGES", changes)
    whole = resuming.run(place, "whole", "none", -1)
    assert whole.returncode == 0, whole.stderr
    for event, number in (("generation", 60), ("inference", 8), ("training", 7)):
        killed = resuming.run(place, "killed", event, number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = resuming.run(place, "killed", "none", -1)
    assert "Resuming from step" in done.stdout, done.stderr
    resuming.check_equal(place / "killed", resuming.left_by(place / "whole"))


@pytest.mark.slow
def test_a_policy_moves_towards_its_teacher(run, tmp_path):
    teacher = tiny_run.make_model(tmp_path / "teacher", seed=7, num_layers=1)
    steps = run(
        "on_policy_distill",
        kl__reference=teacher,
        reward__functions="()",
        training__learning_rate=1e-2,
        steps=24,
    )
    first, last = (np.mean([step["kl/mean"] for step in part]) for part in (steps[:4], steps[-4:]))
    assert last < 0.7 * first
    padded = tiny_run.make_model(tmp_path / "padded", vocab_size=384)
    run(
        "on_policy_distill",
        kl__reference=padded,
        reward__functions="()",
        steps=1,
        workdir=tmp_path / "p",
    )
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    document = json.loads((other / "tokenizer.json").read_text())
    ids = document["model"]["vocab"]
    document["model"]["vocab"] = dict(zip(ids, [*list(ids.values())[1:], 0], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"kl\.reference has another tokenizer than the model"):
        run("on_policy_distill", kl__reference=other, reward__functions="()", steps=1)


@pytest.mark.slow
def test_gains_are_of_the_law_that_was_sampled_from(run, tmp_path):
    """Of the likeliest tokens alone, where only these are drawn; but always at temperature 1."""
    step = run("online_dpo", algorithm__reference="previous", generation__top_k=5, steps=1)[0]
    assert abs(step["preference/margin"]) < 1e-4
    steps = run(
        "online_dpo",
        algorithm__reference="previous",
        generation__hottest=2.0,
        steps=4,
        workdir=tmp_path / "hotter",
    )
    assert steps[-1]["chosen/temperature"] > 1.0
    assert all(abs(step["preference/margin"]) < 1e-4 for step in steps)
