"""One-pass reward modelling: the update of rank one is the dense algorithm; certainty chooses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDEN

from rlhf_jax.models.files.source import open_source
from rlhf_jax.rewards.combination import Response, as_scores
from rlhf_jax.rewards.learned import LearnedReward
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.rewards.one_pass import CG_ABOVE, LABEL_CHOICES, OnePassReward, cg_step, sigmoid

D = 12


def labelled(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Differences [n, d], labels [n] and the theta [d] that they follow."""
    random = np.random.default_rng(seed)
    theta = random.normal(size=D)
    differences = random.normal(size=(count, D)) / np.sqrt(D)
    labels = (random.random(count) < sigmoid(differences @ theta)).astype(float)
    return differences, labels, theta


def dense(differences: np.ndarray, labels: np.ndarray, regularizer: float, rate: float):
    """Algorithm 1 as it is written, with a solve of d equations a label."""
    theta = np.zeros(D)
    hessian = regularizer * np.eye(D)
    for z, label in zip(differences, labels, strict=True):
        chance = sigmoid(z @ theta)
        looked = hessian + rate * chance * (1 - chance) * np.outer(z, z)
        theta = theta - rate * np.linalg.solve(looked, (chance - label) * z)
        chance = sigmoid(z @ theta)
        hessian = hessian + chance * (1 - chance) * np.outer(z, z)
    return theta, hessian


@pytest.mark.parametrize(("regularizer", "rate"), [(1.0, 1.0), (0.1, 3.0)])
def test_the_update_of_rank_one_is_the_dense_algorithm(regularizer, rate):
    differences, labels, _ = labelled(300)
    found = OnePassReward.begin(D, regularizer, rate)
    for part in np.split(np.arange(300), [1, 50]):  # however labels come
        found.learn(differences[part], labels[part])
    theta, hessian = dense(differences, labels, regularizer, rate)
    np.testing.assert_allclose(found.theta, theta, rtol=0, atol=1e-12)
    upper = np.triu_indices(D)
    np.testing.assert_allclose(found.inverse[upper], np.linalg.inv(hessian)[upper], atol=1e-12)
    norms = np.sqrt(np.einsum("nd,de,ne->n", differences, np.linalg.inv(hessian), differences))
    np.testing.assert_allclose(found.uncertainty(differences), norms, atol=1e-12)
    assert found.labels == 300


def test_it_comes_near_to_the_fit_of_all_labels():
    differences, labels, theta = labelled(4000)
    found = OnePassReward.begin(D)
    found.learn(differences, labels)
    angle = found.theta @ theta / np.linalg.norm(found.theta) / np.linalg.norm(theta)
    assert angle > 0.97


def test_certainty_chooses():
    model = OnePassReward.begin(2)
    seen = np.tile([1.0, 0.0], (200, 1))
    model.learn(seen, np.ones(200))
    answers = np.array([[1.0, 0.0], [1.0, 3.0], [0.2, 0.0]])
    assert model.choose_active(answers) == 1  # along the second feature nothing is known
    assert model.choose_passive(answers, beta=1.0) == 0
    best, other = model.choose_deployment(answers, beta=1.0)
    assert (best, other) == (0, 1)


def test_a_rule_chooses_two_answers_of_a_prompt():
    model = OnePassReward.begin(2, theta=np.array([1.0, 0.0]))
    model.learn(np.tile([1.0, 0.0], (200, 1)), np.ones(200))
    random = np.random.default_rng(0)
    answers = np.array([[0.0, 0.0], [0.5, 2.0], [1.0, 0.0], [0.2, -2.0]])
    assert model.choose_pair(answers, "active", random) == (1, 3)  # least is known of 1 less 3
    assert model.choose_pair(answers, "deployment", random) == (2, 1)
    certain = np.array([[1.0, 0.0], [-9.0, 0.0], [-9.0, 0.0]])  # where none may be better
    shown = [model.choose_pair(certain, "deployment", random) for _ in range(50)]
    assert set(shown) == {(0, 1), (0, 2)}
    drawn = {model.choose_pair(answers, "random", random) for _ in range(400)}
    assert drawn == {(first, second) for first in range(4) for second in range(4)} - {
        (same, same) for same in range(4)
    }


def test_conjugate_gradients_solve_the_damped_equations():
    differences, labels, _ = labelled(64)
    theta = np.full(D, 0.1)
    chance = sigmoid(differences @ theta)
    hessian = differences.T @ ((chance * (1 - chance) / 64)[:, None] * differences)
    gradient = differences.T @ (chance - labels) / 64
    exact = theta - 0.5 * np.linalg.solve(hessian + 0.3 * np.eye(D), gradient)
    found = cg_step(theta, differences, labels, rate=0.5, damping=0.3, steps=D)
    np.testing.assert_allclose(found, exact, atol=1e-12)
    early = cg_step(theta, differences, labels, rate=0.5, damping=0.3)
    assert np.linalg.norm(early - exact) < 0.05 * np.linalg.norm(exact - theta)


def test_what_cannot_be_learned_is_one_sentence():
    with pytest.raises(ValueError, match="is not finite"):
        OnePassReward.begin(D).learn(np.full((1, D), np.nan), np.ones(1))
    with pytest.raises(ValueError, match="use cg_step"):
        OnePassReward.begin(CG_ABOVE + 1).learn(np.ones((1, CG_ABOVE + 1)), np.ones(1))


def test_what_is_saved_learns_on_as_before():
    differences, labels, _ = labelled(64)
    whole = OnePassReward.begin(D, regularizer=2.0, theta=np.full(D, 0.1))
    whole.learn(differences, labels)
    first = OnePassReward.begin(D, regularizer=2.0, theta=np.full(D, 0.1))
    first.learn(differences[:40], labels[:40])
    second = OnePassReward.restored(first.state())
    second.learn(differences[40:], labels[40:])
    np.testing.assert_array_equal(second.theta, whole.theta)
    np.testing.assert_array_equal(second.average, whole.average)
    assert second.labels == 64 and first.labels == 40


def by_length(responses):
    return as_scores([float(len(one.response)) for one in responses])


def values_of(results) -> np.ndarray:
    return np.array([results[index].value for index in range(len(results))])


def groups_of_words(random, count: int) -> list[Response]:
    """Four responses of some words to each prompt."""
    words = ("so", "be", "it", "now", "then")
    return [
        Response("Hi", [{"role": "user", "content": "Hi"}], {}, " ".join(text), [], group)
        for group in range(count)
        for text in (random.choice(words, 1 + place) for place in random.permutation(4))
    ]


@pytest.fixture(scope="module")
def reward_model():
    source = open_source(GOLDEN / "qwen2_reward")
    return RewardModel(source, source.load(jnp.float32), rows=8)


@pytest.mark.parametrize("choice", LABEL_CHOICES)
def test_a_head_learns_from_labels_of_a_runs_own_responses(reward_model, choice):
    learned = LearnedReward("judge", reward_model, by_length, choice, seed=0)
    responses = groups_of_words(np.random.default_rng(0), 3)
    before = model_scorer(reward_model)(responses).values
    found = values_of(learned.results(responses, {}))
    np.testing.assert_allclose(found, before, atol=2e-5)

    memory, predicted = {}, []
    for step in range(30):
        responses = groups_of_words(np.random.default_rng(step + 1), 8)
        _, memory, metrics = learned.learn(responses, memory)
        predicted.append(metrics["labels/predicted"])
    assert 200 < metrics["labels/learned"] <= 30 * 8  # some are equally long
    assert metrics["labels/failed"] == 0
    assert np.mean(predicted[-8:]) > 0.65
    fresh = groups_of_words(np.random.default_rng(99), 50)
    results, same, _ = learned.learn(fresh[:1], memory)  # nothing to compare it with
    assert same is memory and results[0] == learned.results(fresh[:1], memory)[0]
    rated = values_of(learned.results(fresh, memory)).reshape(-1, 4)
    lengths = np.array([len(one.response) for one in fresh]).reshape(-1, 4)
    best = lengths[np.arange(50), rated.argmax(axis=1)] == lengths.max(axis=1)
    assert best.mean() > 0.45  # 0.25 by chance


def test_equal_and_failed_labels_teach_nothing(reward_model):
    responses = groups_of_words(np.random.default_rng(0), 4)
    for labels, failed in (
        (lambda own: as_scores([1.0] * len(own)), 0),
        (lambda own: as_scores(["has no label"] * len(own)), 4),
    ):
        learned = LearnedReward("judge", reward_model, labels, "random", seed=0)
        _, memory, metrics = learned.learn(responses, {})
        assert (memory, metrics["labels/learned"]) == ({}, 0.0)
        assert metrics["labels/failed"] == failed and "labels/predicted" not in metrics
