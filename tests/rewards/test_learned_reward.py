"""A reward that learns during a run: what it needs, that nothing of it is lost, what it leaves."""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import placed_runs
import processes
import pytest
import resuming
import tiny_run
from places import GOLDEN

from rlhf_jax import trainer
from rlhf_jax.config import command_line, default
from rlhf_jax.config.earlier import settled
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import init
from rlhf_jax.rewards.combination import Response, as_scores
from rlhf_jax.rewards.learned import LearnedReward
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.rewards.one_pass import CG_ABOVE
from rlhf_jax.runtime.checkpoint.folder import latest_document
from rlhf_jax.setup.validation import check_values

LABELS = "def longer(prompt, response, row):\n    return float(len(response))\n"


def responses_to(texts: list[str]) -> list[Response]:
    messages = [{"role": "user", "content": "Hi"}]
    return [Response("Hi", messages, {}, text, [], place // 2) for place, text in enumerate(texts)]


def by_length(responses):
    return as_scores([float(len(one.response)) for one in responses])


def values_of(results) -> np.ndarray:
    return np.array([results[index].value for index in range(len(results))])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"reward.models": (), "reward.functions": ("labels.py:longer",)},
            "reward.models has 0 models; labels teach exactly one",
        ),
        ({"reward.models": ("a", "b")}, "reward.models has 2 models; labels teach exactly one"),
        ({"generation.fuse_inference": True}, "reward.labels changes the reward model, of which"),
        (
            {"generation.samples_per_prompt": 1, "algorithm.estimator": "reinforce++"},
            "reward.labels compares two responses to a prompt",
        ),
        ({"reward.label_choice": "passive"}, "reward.label_choice is 'passive'"),
        (
            {"algorithm.name": "on_policy_distill", "reward.models": (), "kl.reference": "t"},
            "'on_policy_distill' has no use for reward.labels: clear",
        ),
        (
            {
                "algorithm.name": "on_policy_distill",
                "reward.models": (),
                "reward.labels": "",
                "kl.reference": "t",
                "generation.hottest": 1.5,
            },
            "'on_policy_distill' has no use for generation.hottest: clear",
        ),
        ({"generation.fewest_samples": 5}, "more than samples_per_prompt = 4; lower it"),
        ({"generation.fewest_samples": 1}, "a prompt's samples are compared; give 2 or more"),
        ({"generation.hottest": 2.0, "training.lag": 1}, "need training.lag = 0"),
    ],
)
def test_labels_and_capability_that_cannot_be_used_are_one_sentence(tmp_path, changes, words):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    config = default()
    own = {"model.path": "m", "data.train": str(tmp_path / "prompts.jsonl")}
    own |= {"reward.models": ("rm",), "reward.labels": "labels.py:longer"}
    config.update_from_flattened_dict(own | changes)
    with pytest.raises(ValueError, match=words) as raised:
        check_values(settled(config))
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def wide() -> RewardModel:
    """A reward model of more features than a matrix of them is kept for."""
    source = open_source(GOLDEN / "qwen2_reward")
    config = dataclasses.replace(
        source.config, width=CG_ABOVE + 8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_width=8
    )
    model = init(jax.random.key(0), dataclasses.replace(config, num_layers=1), jnp.float32)
    return RewardModel(dataclasses.replace(source, config=model.config), model, rows=8)


def test_of_many_features_the_head_learns_by_conjugate_gradients(wide):
    with pytest.raises(ValueError, match="above 4096 no certainty is kept: set 'random'"):
        LearnedReward("judge", wide, by_length, "active", seed=0)
    learned = LearnedReward("judge", wide, by_length, "random", seed=0)
    responses = responses_to(["a", "a long one", "b b", "b"])
    _, memory, metrics = learned.learn(responses, {})
    assert metrics["labels/learned"] == 2 and memory["inverse"].size == 0
    before, after = (
        values_of(learned.results(responses, known)).reshape(2, 2) for known in ({}, memory)
    )
    gained = (after - before) @ np.array([-1.0, 1.0]) * np.array([1.0, -1.0])
    assert (gained > 0).all(), "the longer one of each pair is ahead by more"
    assert learned.learn(responses, memory)[2]["labels/learned"] == 4


def give_files(folder: Path) -> dict:
    """A reward model and labels in a folder; the changes of a run that learns from them."""
    tiny_run.make_model(folder / "judge", seed=3, scalar_head=True, tied=False)
    (folder / "labels.py").write_text(LABELS)
    return {
        "reward__functions": "()",
        "reward__models": f"('{folder / 'judge'}',)",
        "reward__labels": f"{folder / 'labels.py'}:longer",
    }


def memory_of(workdir: Path) -> dict[str, np.ndarray]:
    return latest_document(workdir / "checkpoints")["host"]["memory"]["reward"]


@pytest.mark.slow
def test_a_run_leaves_the_reward_model_that_it_has_taught(tmp_path, one_device):
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = give_files(tmp_path) | {"checkpoint__every": 1}
    changes |= {"generation__resample": 1, "reward__clip": 1e-8}  # always, as no prompt has signal
    config = command_line.read(tiny_run.arguments(tmp_path, model, **changes))
    trainer.do_run(config)
    workdir = Path(config.workdir)
    steps = tiny_run.lines(workdir / "metrics.jsonl")
    memory = memory_of(workdir)
    assert {step["generation/attempts"] for step in steps} == {2}
    counts = [step["labels/learned"] for step in steps]
    assert 0 < counts[0] < counts[1] < counts[2] == memory["labels"]

    left = open_source(workdir / "reward_model")
    found = left.load(jnp.float32)
    before = open_source(tmp_path / "judge").load(jnp.float32)
    assert found.head is not None and before.head is not None
    assert np.array_equal(np.asarray(found.head)[:, 0], memory["theta"].astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, found.layers, before.layers)
    assert not np.array_equal(found.head, before.head)

    responses = responses_to(["a", "a long one", "b b", "b"])
    judge = RewardModel(open_source(tmp_path / "judge"), before, rows=4)
    learned = LearnedReward("judge", judge, by_length, "active", seed=0)
    expected = values_of(learned.results(responses, memory))
    scores = model_scorer(RewardModel(left, found, rows=4))(responses).values
    np.testing.assert_allclose(scores, expected, atol=1e-5)

    # a later run begins with what this one has learned
    again = changes | {"reward__models": f"('{workdir / 'reward_model'}',)", "steps": 1}
    config = command_line.read(
        tiny_run.arguments(tmp_path, model, **again, workdir=tmp_path / "later")
    )
    trainer.do_run(config)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        transformers: Any = importlib.import_module("transformers")
        kind = transformers.AutoModelForSequenceClassification
        theirs = kind.from_pretrained(workdir / "reward_model")
        np.testing.assert_array_equal(theirs.score.weight.detach().numpy()[0], found.head[:, 0])


@pytest.mark.long
def test_killed_while_it_learns_the_reward_ends_as_if_nothing_had_happened(place, monkeypatch):
    """Bit for bit: the head, its certainty, and what is known of each prompt's capability."""
    changes = resuming.CHANGES | give_files(place)
    changes |= {"generation__fewest_samples": 2, "generation__samples_per_prompt": 4}
    changes |= {"generation__hottest": 1.5, "checkpoint__every": 1, "steps": 5}
    monkeypatch.setattr(resuming, "CHANGES", changes)
    whole = resuming.run(place, "taught", "none", -1)
    assert whole.returncode == 0, whole.stderr
    for event, number in (("generation", 40), ("inference", 6), ("training", 8), ("export", 1)):
        killed = resuming.run(place, "killed", event, number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = resuming.run(place, "killed", "none", -1)
    assert done.returncode == 0, done.stderr
    resuming.check_equal(place / "killed", resuming.left_by(place / "taught"))
    files = [place / name / "reward_model" / "model.safetensors" for name in ("taught", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert memory_of(place / "killed")["labels"] > 0


@pytest.mark.long
def test_two_processes_learn_the_reward_and_the_prompts_of_one(place):
    changes = processes.TWO_SLICES | give_files(place) | {"checkpoint__every": 1, "steps": 3}
    changes |= {"generation__fewest_samples": 2, "generation__hottest": 1.5, "evaluation__every": 0}
    changes |= {"generation__strategy": "plain", "generation__samples_per_prompt": 4}
    processes.one(place, "alone", **changes)
    code, _, errors = processes.two(place, "both", **changes)
    assert code == 0, errors
    alone, both = (tiny_run.lines(place / name / "metrics.jsonl") for name in ("alone", "both"))
    for one, other in zip(alone, both, strict=True):
        for key in ("labels/learned", "labels/predicted", "capability/mean", "reward/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-4), key
    texts = [tiny_run.lines(place / name / "samples.jsonl") for name in ("alone", "both")]
    for one, other in zip(*texts, strict=True):
        assert one["response"] == other["response"]
    assert alone[-1]["capability/mean"] > 0 and len(texts[0]) < 3 * 16


@pytest.mark.slow
def test_a_reward_learns_on_where_samples_are_drawn_ahead(tmp_path, folder):
    tiny_run.make_files(tmp_path)
    run = placed_runs.Runner(tmp_path, folder)
    changes = {"plan": "disaggregated", "training__lag": 1, "deterministic": True}
    changes |= {"checkpoint__every": 1, "steps": 4} | give_files(tmp_path)
    metrics, _ = run("run", **changes)
    counts = [row["labels/learned"] for row in metrics]
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]
    assert memory_of(tmp_path / "run")["labels"] == counts[3]
