"""Preference models: learned from pairs in random order, and read as a source of rewards."""

from __future__ import annotations

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tokenizers import processors

from rlhf_jax import trainer
from rlhf_jax.algorithms.preference_model import as_comparison
from rlhf_jax.config import command_line
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.models import PreferenceModel, preference_scorer

PROMPT = "Name a colour."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_run.make_model(tmp_path_factory.mktemp("judge") / "model", num_layers=1)


def test_the_order_of_answers_is_random_and_the_letter_names_the_better():
    row = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    found = [
        as_comparison(row, np.random.default_rng((0, number)), "Row 1") for number in range(200)
    ]
    first = [one["prompt"].index("Because.") < one["prompt"].index("No.") for one in found]
    assert [one["chosen"] for one in found] == ["A" if early else "B" for early in first]
    assert [one["rejected"] for one in found] == ["B" if early else "A" for early in first]
    assert 70 < sum(first) < 130
    again = as_comparison(row, np.random.default_rng((0, 7)), "Row 1")
    assert again == found[7]


def test_rewards_are_mean_chances_against_the_others_of_a_group(folder):
    source = open_source(folder)
    model = source.load(jnp.float32)
    judge = PreferenceModel(source, model, rows=3, length_bucket=16)
    texts = ["one", "two", "three", "one"]
    responses = [
        Response(PROMPT, [{"role": "user", "content": PROMPT}], {}, text, group=group)
        for group, text in [*((0, text) for text in texts), (1, "alone")]
    ]
    scores = preference_scorer(judge)(responses)
    assert list(scores.failures) == [4] and "no other response" in scores.failures[4]

    def chance(first: str, second: str) -> float:
        if first == second:
            return 0.5
        text = f"[CONTEXT] {PROMPT} [RESPONSE A] {first} [RESPONSE B] {second}"
        tokenizer = source.tokenizer
        tokens = jnp.array([tokenizer.encode_chat([{"role": "user", "content": text}])])
        hidden, _ = forward(model, tokens, jnp.arange(tokens.shape[1])[None])
        named = logits(model, hidden[:, -1])[0, jnp.array(judge.letters)]
        return float(jax.nn.softmax(named)[0])

    for index, text in enumerate(texts):
        others = [other for place, other in enumerate(texts) if place != index]
        wanted = [(chance(text, other) + 1 - chance(other, text)) / 2 for other in others]
        np.testing.assert_allclose(scores.values[index], np.mean(wanted), atol=2e-6)
    np.testing.assert_allclose(scores.values[:4].mean(), 0.5, atol=1e-6)  # one wins, one loses


def test_a_beginning_of_text_is_no_letter_and_an_unread_pair_no_failure(folder):
    source = open_source(folder)
    plain = PreferenceModel(source, source.load(jnp.float32), rows=3, length_bucket=16)
    backend = copy.deepcopy(source.tokenizer.backend)
    backend.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", backend.token_to_id("a"))]
    )
    begun = dataclasses.replace(source.tokenizer, backend=backend)
    assert begun.encode("A")[0] == begun.encode("B")[0]
    judge = dataclasses.replace(plain, source=dataclasses.replace(source, tokenizer=begun))
    assert judge.letters == plain.letters
    responses = [
        Response(PROMPT, [{"role": "user", "content": PROMPT}], {}, text)
        for text in ("one", "two", "three" * 40)
    ]
    scores = preference_scorer(plain)(responses)
    assert list(scores.failures) == [2] and "the context is 128" in scores.failures[2]
    assert np.isfinite(scores.values[:2]).all()


@pytest.mark.slow
def test_a_preference_model_learns_and_gives_the_rewards_of_a_run(tmp_path, folder, one_device):
    tiny_run.make_files(tmp_path)
    rows = [
        {"prompt": f"Say {word}", "chosen": f"yes {word}", "rejected": f"no {word}"}
        for word in "abcdefgh"
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "workdir": tmp_path / "judge",
        "algorithm__name": "preference_model",
        "data__train": tmp_path / "pairs.jsonl",
        "data__rows_per_step": 8,
        "data__max_response_tokens": 4,
        "data__max_prompt_tokens": 96,
        "reward__functions": "()",
        "evaluation__every": 0,
        "steps": 40,
        "training__learning_rate": 3e-3,
    }
    trainer.do_run(command_line.read(tiny_run.arguments(tmp_path, folder, **changes)))
    learned = tiny_run.lines(tmp_path / "judge" / "metrics.jsonl")
    assert learned[-1]["preference/accuracy"] == 1.0
    assert learned[-1]["loss/policy"] < 0.3 < learned[0]["loss/policy"]

    changes = {
        "reward__functions": "()",
        "reward__preference_models": f"('{tmp_path}/judge/policy',)",
        "evaluation__every": 0,
        "steps": 1,
    }
    trainer.do_run(command_line.read(tiny_run.arguments(tmp_path, folder, **changes)))
    (rewarded,) = tiny_run.lines(tmp_path / "run" / "metrics.jsonl")
    assert rewarded["reward/judge/failed"] == 0
    # each comparison that one response wins another loses
    np.testing.assert_allclose(rewarded["reward/judge/mean"], 0.5, atol=1e-5)
    assert rewarded["reward/std"] > 0
