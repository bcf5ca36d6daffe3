"""What a run counts, and what it leaves out: failed rewards, skipped minibatches, used noise."""

from __future__ import annotations

import collections
import functools
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_state
import tiny_run
from tiny_run import ROOT, lines

from rlhf_jax import evaluation, rollout
from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.rewards.combination import Response, Term, as_scores, weighted
from rlhf_jax.state import UNUSED_ID
from rlhf_jax.training.advantages import EstimatorConfig
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
from rlhf_jax.training.kl import KL
from rlhf_jax.training.policy_losses import LOSSES, LossTerms

pytestmark = pytest.mark.usefixtures("compiled_soon")

CODE = """
import jax.numpy as jnp

def vowels(prompt, response, row):
    if sum(map(ord, response)) % 4 == 0:
        raise KeyError("no answer")
    return sum(c in "aeiou" for c in response)

def broken(terms):
    return jnp.nan * terms.logprobs
"""
ONE_STEP = {"steps": 1, "evaluation__every": 0, "checkpoint__every": 1, "checkpoint__keep": 9}
launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of bytes, with its tokenizer."""
    return tiny_run.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """The training command on one device; it returns the exit code."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    arguments = functools.partial(tiny_run.arguments, tmp_path, folder)
    return lambda **changes: launch["main"](arguments(**{**ONE_STEP, **changes}))


def test_samples_without_a_reward_are_left_out_and_counted(run, tmp_path, capsys):
    changes = {"reward__functions": f"{tmp_path}/code.py:vowels", "steps": 2}
    assert run(**changes) == 0, capsys.readouterr().err
    rewards = collections.defaultdict(list)
    for row in lines(tmp_path / "run" / "samples.jsonl"):
        rewards[row["step"]].append(row["reward"])
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        own = rewards[line["step"]]
        known = [reward for reward in own if reward is not None]
        assert 0 < line["reward/failed"] == line["reward/vowels/failed"] == len(own) - len(known)
        assert line["reward/mean"] == pytest.approx(np.mean(known))
        assert line["reward/std"] == pytest.approx(np.std(known))
        assert line["training/minibatches_done"] == 1 and line["training/skipped"] == 0


def test_more_failures_than_allowed_end_the_run_before_it_learns(run, tmp_path, capsys):
    reward = f"{tmp_path}/code.py:vowels"
    assert run(reward__functions=reward, reward__max_failed=0.1) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "more than reward.max_failed = 0.1" in said
    assert "(the first: vowels raised KeyError: 'no answer')" in said
    assert run(reward__functions=reward, checkpoint__allow_changes=True) == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0]


def test_minibatches_that_are_skipped_in_a_row_end_a_run_and_are_remembered(run, tmp_path, capsys):
    """Two of them, over a resume; the weights stay as they were."""
    changes = {"training__loss": f"{tmp_path}/code.py:broken", "training__max_skipped": 2}
    assert run(**changes, steps=2) == 0, capsys.readouterr().err
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["training/skipped_in_row"] for line in steps] == [1, 2]
    assert [line["training/minibatches_done"] for line in steps] == [0, 0]
    assert steps[1]["kl/mean"] == 0 and np.isfinite(steps[1]["reward/mean"])
    (document,) = (tmp_path / "run" / "checkpoints" / "2" / "host").glob("*.json")
    assert json.loads(document.read_text())["host"]["skipped"] == 2
    changes |= {"steps": 3, "checkpoint__allow_changes": True}
    assert run(**changes) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "loss/policy is nan in minibatch 1 of update 2" in said
    assert "training.max_skipped is 2" in said


def test_no_noise_is_used_twice(run, tmp_path, monkeypatch):
    """Nor where the number of samples changes between, or prompts are drawn again; but what is
    asked to repeat does so, once in a step.
    """
    asked = []

    def noting(*given, **named):
        made = requests(*given, **named)
        asked.append([sample_id for request in made for sample_id in request.sample_ids])
        return made

    monkeypatch.setattr(rollout, "requests", noting)
    changes = {"generation__strategy": "replay-chain-4", "checkpoint__allow_changes": True}
    for steps, prompts, samples, resample, repeated in (
        (1, 4, 4, 0, 0),
        (2, 2, 4, 0, 0),
        (3, 8, 2, 1, 0),
        (4, 8, 4, 0, 2),
        (5, 4, 2, 0, 0),
    ):
        changes |= {
            "steps": steps,
            "generation__prompts_per_step": prompts,
            "generation__samples_per_prompt": samples,
            "generation__resample": resample,
            "generation__repeated_noise": repeated,
        }
        assert run(**changes) == 0
    used: set[int] = set()
    repeated = []
    for ids in asked:
        assert len(set(ids)) == len(ids), "two samples of a step share their noise"
        repeated.append(len(used & set(ids)))
        used |= set(ids)
    *others, of_fourth, of_fifth = repeated
    assert not any(others) and not of_fifth and 8 <= of_fourth <= 16


@pytest.mark.parametrize("rule", ["replayable", "rejection"])
def test_evaluations_use_noise_again_only_where_texts_are_the_noise_s(
    rule, run, tmp_path, monkeypatch
):
    """Steps 0 to 3; the run that is resumed at step 2 evaluates there once more, from the same
    state.
    """
    asked = []

    def noting(*given, **named):
        made = requests(*given, **named)
        asked.append(frozenset(i for request in made for i in request.sample_ids))
        return made

    monkeypatch.setattr(evaluation, "requests", noting)
    changes = {
        "generation__acceptance": rule,
        "generation__strategy": "lookup-chain-2",
        "evaluation__every": 1,
        "checkpoint__allow_changes": True,
    }
    for steps in (2, 3):
        assert run(**changes, steps=steps) == 0
    different = set(asked)
    assert len(different) == (1 if rule == "replayable" else 4)
    assert len(frozenset().union(*different)) == sum(map(len, different))


def test_where_nothing_is_trained_on_no_kl_is_measured():
    """Else an adaptive coefficient would fall."""
    mask = np.ones((4, 3), bool)
    near = np.zeros((4, 3), np.float32)
    config = AdvantageConfig("grpo", EstimatorConfig(2), kl_in_reward=True)
    for rewards, known in (([1, 2, 3, np.nan], True), ([1, np.nan, np.nan, 2], False)):
        given = np.array(rewards, np.float32), np.ones(4, bool), mask, near, near - 0.5, None
        trained, _, _, kl = compute_advantages(*given, np.float32(0.1), config)
        assert np.asarray(trained).any() == known == np.isfinite(kl).item()
        assert kl is not None and (not known or kl == pytest.approx(1.5))


def test_a_sum_that_is_not_finite_is_a_failure():
    scorers = [lambda given: as_scores([1e10] * len(given)), lambda given: as_scores([1.0, 1e10])]
    terms = [Term("one", 1e30, scorers[0]), Term("other", -1e30, scorers[1])]
    scores, _ = weighted(terms, [Response("", [], {}, "")] * 2)
    assert scores.failures == {0: "gave a weighted sum of inf", 1: "gave a weighted sum of nan"}


def test_what_was_counted_goes_through_a_checkpoint():
    state = test_state.host_state(next_id=77, skipped=3)
    document = state.document()
    restored = test_state.host_state().restored(document)
    assert (restored.next_id, restored.skipped) == (77, 3)
    del document["next_id"], document["skipped"]  # as a checkpoint of before has neither
    restored = test_state.host_state().restored(document)
    assert (restored.next_id, restored.skipped) == (UNUSED_ID, 0)


def finished(prompt: list[int], sample_id: int, tokens: list[int]) -> Sample:
    request = Request(np.array(prompt, np.int32), (sample_id,), 8)
    return Sample(sample_id, request, [], tokens=tokens, logprobs=[0.0] * len(tokens))


def test_the_history_has_a_bound_and_forgets_what_is_oldest():
    history = History(size=8, most=12)
    for sample_id, prompt in enumerate([[1], [2], [1], [3]]):
        history.add([finished(prompt, sample_id, [sample_id] * 3)])
    found = [list(history.of(np.array([prompt], np.int32))) for prompt in (1, 2, 3)]
    assert found == [[0, 2], [], [3]], "4 tokens a text: three fit, and prompt 2 is the oldest"
    again = History(size=8, most=12)
    again.restore(history.state())
    history, again = (one.with_samples([finished([4], 9, [9] * 3)]) for one in (history, again))
    for one in (history, again):
        assert [list(one.of(np.array([prompt], np.int32))) for prompt in (1, 3, 4)] == [
            [],
            [3],
            [9],
        ]
        np.testing.assert_array_equal(one.of(np.array([3], np.int32))[3], [3, 3, 3])


def test_the_history_of_many_long_prompts_stays_small():
    """Of 17,000 prompts of 2,048 tokens, each with 256 tokens of answers."""
    history = History(size=256)
    history.add(finished([number] * 2048, number, [number] * 255) for number in range(17_000))
    kept = history.state()
    assert sum(array.nbytes for array in kept.values()) < 20e6
    assert len(kept["prompts"]) == 17_000
    large = History(size=1 << 16)
    large.add(finished([number], number, [0] * 65_535) for number in range(200))
    kept = large.state()
    assert kept["tokens"].nbytes < 34e6 and len(kept["prompts"]) == 128


def terms(apart: float) -> LossTerms:
    """Of one token whose log-ratio is `apart`."""
    one = jnp.ones((1, 1), jnp.float32)
    number = jnp.zeros((1, 1), jnp.int32)
    return LossTerms(apart * one, 0 * one, one, one > 0, number, 1, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_out_of_all_bounds_is_a_finite_loss(name, advantage):
    def loss(apart):
        given = terms(1.0)
        given = given._replace(logprobs=apart, advantages=advantage * given.advantages)
        return LOSSES[name](given).sum()

    for apart in (-1e4, -100.0, 100.0, 1e4):
        value, slope = jax.value_and_grad(loss)(jnp.full((1, 1), apart))
        assert jnp.isfinite(value) and jnp.isfinite(slope).all(), apart


def test_only_what_exp_is_given_is_bounded():
    """Ratios within are what they were, bit for bit; a ratio of 1 is 1, and has its gradient."""
    for apart in (-19.0, -0.1, 0.0, 1e-7, 3.0):
        np.testing.assert_array_equal(terms(apart).ratios, jnp.exp(jnp.full((1, 1), apart)))
    assert terms(0.0).ratios.item() == 1.0
    assert jax.grad(lambda x: terms(x).ratios.sum())(0.0) == 1.0
    assert terms(50.0).ratios.item() == pytest.approx(np.exp(20.0), rel=1e-6)
    far = jnp.full((1, 1), -100.0)
    assert KL["k3"](far, 0 * far).item() == pytest.approx(np.expm1(20.0) - 100.0, rel=1e-6)
    assert KL["k1"](far, 0 * far).item() == -100.0 and KL["k2"](far, 0 * far).item() == 5000.0
