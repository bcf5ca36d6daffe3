"""A run that a program calls: with a function as its reward, a list of prompts, and callbacks."""

from __future__ import annotations

import jax
import pytest
import tiny_run

import rlhf_jax
from rlhf_jax.config import command_line
from rlhf_jax.monitoring import console
from rlhf_jax.report.run import read_run
from rlhf_jax.report.warnings import warnings

PROMPTS = [f"Say {word}" for word in "abcdefgh"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = {"steps": 3, "evaluation__every": 0, "reward__functions": "", "data__train": ""}
    return command_line.read(tiny_run.arguments(tmp_path, model, **changes))


def vowels(prompt, response, row):
    return float(sum(c in "aeiou" for c in response))


class Until(rlhf_jax.Callback):
    """Notes each step, and ends the run after one of them."""

    def __init__(self, last):
        self.last = last
        self.seen = []

    def after_step(self, step, metrics):
        self.seen.append((step, metrics["reward/mean"]))
        return step == self.last


def test_a_program_trains_with_a_function_and_a_list(config):
    seen = Until(last=10)
    result = rlhf_jax.train(config, reward=vowels, prompts=PROMPTS, callbacks=(seen,))
    assert result.state.step == 3
    assert [(row["step"], row["reward/mean"]) for row in result.metrics] == seen.seen
    assert "reward/vowels/mean" in result.metrics[0]
    assert (result.workdir / "policy" / "model.safetensors").is_file()
    assert config.reward.functions == ("",) or not config.reward.functions[0], "it stays as it was"


def test_a_callback_ends_a_run_that_goes_on_later_with_the_same_function_alone(config):
    config.checkpoint.every = 1
    seen = Until(last=1)
    result = rlhf_jax.train(config, reward=vowels, prompts=PROMPTS, callbacks=(seen,))
    assert result.state.step == 2 and len(seen.seen) == 2
    with pytest.raises(ValueError, match=r"reward\.functions"):
        rlhf_jax.train(
            config, reward=lambda prompt, response: float(len(response)), prompts=PROMPTS
        )
    with pytest.raises(ValueError, match=r"prompts of data\.train"):
        rlhf_jax.train(config, reward=vowels, prompts=PROMPTS[:4])
    assert rlhf_jax.train(config, reward=vowels, prompts=PROMPTS).state.step == 3


MEASURE = """
import time

def later(prompt, response, row):
    return time.time() % 1e4, {"half": 0.5}
"""


def test_a_run_ends_at_what_it_measures_and_keeps_its_best_policy(config, tmp_path):
    (tmp_path / "measure.py").write_text(MEASURE)
    config.evaluation.every = 1
    config.reward.metrics = {"later": f"{tmp_path / 'measure.py'}:later"}
    config.checkpoint.update(every=1, best="eval/later")
    config.stop_at = "training/minibatches_done >= 1"
    config.training.update(learning_rate=0.0, schedule="linear")
    result = rlhf_jax.train(config, reward=vowels, prompts=PROMPTS)
    assert result.state.step == 1
    assert result.warnings == warnings(read_run(result.workdir))
    (row,) = result.metrics
    # of a model so small the rate is the highest, and linear falls from there
    assert row["training/learning_rate"] == pytest.approx(1e-4) and row["memory/host"] > 0.1
    assert (result.workdir / "best" / "model.safetensors").is_file()
    evaluations = tiny_run.lines(result.workdir / "evaluations.jsonl")
    assert [one["eval/later/half"] for one in evaluations] == [0.5, 0.5]
    assert rlhf_jax.train(config, reward=vowels, prompts=PROMPTS).state.step == 1, "it has ended"


def test_a_function_without_a_source_needs_a_name(config):
    made = eval("lambda prompt, response, row: 1.0")
    with pytest.raises(ValueError, match="give reward_id="):
        rlhf_jax.train(config, reward=made, prompts=PROMPTS)


def test_a_function_that_always_fails_ends_the_run_in_its_words(config):
    def broken(prompt, response, row):
        raise KeyError("answer")

    with pytest.raises(ValueError, match=r"Reward broken failed on all 16 answers.*KeyError"):
        rlhf_jax.train(config, reward=broken, prompts=PROMPTS)


@pytest.mark.slow
def test_inference_and_training_are_compiled_before_they_are_needed(config, monkeypatch):
    """Of micro-batches of the size that the longest responses have."""
    phases = {}

    def hear(seconds):
        phases.update({one.phase: one for one in seconds})

    monkeypatch.setattr(console, "where_time_went", hear)
    jax.clear_caches()
    rlhf_jax.train(config, reward=vowels, prompts=PROMPTS)
    compiling = {name: phase.compiling for name, phase in phases.items()}
    # The update's programs alone take a third of a second; what is left adds a step's number.
    assert max(compiling["inference"], compiling["training"]) < 0.1 < compiling["compiling"]


def test_a_profile_of_some_steps_is_written(config):
    config.profile = "1:1"
    result = rlhf_jax.train(config, reward=vowels, prompts=PROMPTS)
    assert len(list((result.workdir / "profile").rglob("*.xplane.pb"))) == 1
    config.profile = "1-2"
    with pytest.raises(ValueError, match="profile is '1-2'; it must be '' or steps such as '5:7'"):
        rlhf_jax.train(config, reward=vowels, prompts=PROMPTS)
