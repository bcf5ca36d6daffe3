"""What a run counts, and what it leaves out: failed rewards, skipped minibatches, used noise."""

from __future__ import annotations

import collections
import functools
import json
import runpy
from pathlib import Path

import host_states
import jax
import numpy as np
import pytest
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax import evaluation
from rlhf_jax.generation.history import requests
from rlhf_jax.rewards.combination import Response, Term, as_scores, weighted
from rlhf_jax.sources import roll_out
from rlhf_jax.state import UNUSED_ID, remembered

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
    assert "(the first: vowels raised KeyError: 'no answer' (the row has 'prompt'))" in said
    assert run(reward__functions=reward, checkpoint__allow_changes=True) == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0]


@pytest.mark.slow
def test_minibatches_that_are_skipped_in_a_row_end_a_run_and_are_remembered(run, tmp_path, capsys):
    """Two of them, over a resume; the weights stay as they were."""
    changes = {"algorithm__loss": f"{tmp_path}/code.py:broken", "training__max_skipped": 2}
    assert run(**changes, steps=2) == 0, capsys.readouterr().err
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["training/skipped_in_row"] for line in steps] == [1, 2]
    assert [line["training/minibatches_done"] for line in steps] == [0, 0]
    assert "kl/mean" not in steps[1] and np.isfinite(steps[1]["reward/mean"])
    (document,) = (tmp_path / "run" / "checkpoints" / "2" / "host").glob("*.json")
    assert json.loads(document.read_text())["host"]["skipped"] == 2
    changes |= {"steps": 3, "checkpoint__allow_changes": True}
    assert run(**changes) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "loss/policy is nan in minibatch 1 of update 2" in said
    assert "training.max_skipped is 2" in said


@pytest.mark.slow
def test_no_noise_is_used_twice(run, tmp_path, monkeypatch):
    """Nor where the number of samples changes between, or prompts are drawn again; but what is
    asked to repeat does so, once in a step.
    """
    asked = []

    def noting(*given, **named):
        made = requests(*given, **named)
        asked.append([sample_id for request in made for sample_id in request.sample_ids])
        return made

    monkeypatch.setattr(roll_out, "requests", noting)
    changes = {"generation__strategy": "replay-chain-4", "checkpoint__allow_changes": True}
    for steps, prompts, samples, resample, repeated in (
        (1, 4, 4, 0, 0),
        (2, 8, 2, 1, 0),
        (3, 8, 4, 0, 2),
        (4, 4, 2, 0, 0),
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
    *others, of_third, of_fourth = repeated
    assert not any(others) and not of_fourth and 8 <= of_third <= 16


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


def test_a_sum_that_is_not_finite_is_a_failure():
    scorers = [lambda given: as_scores([1e10] * len(given)), lambda given: as_scores([1.0, 1e10])]
    terms = [Term("one", 1e30, scorers[0]), Term("other", -1e30, scorers[1])]
    scores, _ = weighted(terms, [Response("", [], {}, "")] * 2)
    assert scores.failures == {0: "gave a weighted sum of inf", 1: "gave a weighted sum of nan"}


def test_what_was_counted_goes_through_a_checkpoint():
    state = host_states.host_state(77, skipped=3)
    document = state.document()
    restored = host_states.host_state().restored(1, document)
    assert (remembered(restored).next_id, restored.skipped) == (77, 3)
    del document["next_id"], document["skipped"]  # as a checkpoint of before has neither
    restored = host_states.host_state().restored(1, document)
    assert (remembered(restored).next_id, restored.skipped) == (UNUSED_ID, 0)
