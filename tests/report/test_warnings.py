"""What the report says of a run that goes wrong, and that it says nothing of one that does not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_jax import command
from rlhf_jax.monitoring.diversity import commonest_form, commonest_start, distinct_pairs
from rlhf_jax.report.run import read_run
from rlhf_jax.report.warnings import warnings

NOUNS = ["lamp", "chair", "table", "window", "door", "spoon", "fork", "plate", "cup", "bowl"]
VERBS = ["stands", "lies", "waits", "rests", "hides", "shines", "leans", "hangs", "stays", "sits"]
GOOD = [f"The {noun} {verb} in one room." for noun, verb in zip(NOUNS, VERBS, strict=True)]


CONFIG = {
    "generation.prompts_per_step": 8,
    "kl.coefficient": 0.03,
    "training.epochs": 1,
    "training.minibatches": 1,
    "training.learning_rate": 1e-6,
}


def said(folder, metrics=None, texts=GOOD, rewards=None, config=None, **measures):
    """The warnings of a run of eight steps, whose last evaluation is as given."""
    rows = [
        {"step": step, "kl/response": 1.0, "mismatch/mean": 0.001, "response/unfinished": 0.1}
        | {"generation/groups_without_signal": 0.1, "reward/mean": 0.3 + 0.05 * step}
        | {"reward/std": 0.2}
        | (metrics or {})
        for step in range(8)
    ]
    before = {"eval/textblob": 0.6, "eval/distinct_pairs": 0.8, "eval/reward": 0.3}
    evaluations = []
    for step, own, given in ((0, before, GOOD), (8, before | measures, texts)):
        worth = rewards if step and rewards else [0.1 * i for i in range(len(given))]
        pairs = zip(NOUNS, given, worth, strict=True)
        samples = [{"prompt": p, "response": r, "reward": w} for p, r, w in pairs]
        evaluations.append({"step": step, **own, "samples": samples})
    for name, written in (("metrics", rows), ("evaluations", evaluations)):
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    return warnings(read_run(folder))


def test_of_a_good_run_nothing_is_said(tmp_path):
    assert said(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"metrics": {"kl/response": 22.0}}, "An answer is 22.0 nats from the reference"),
        ({"metrics": {"response/unfinished": 0.79}}, "79% of the responses are cut off"),
        ({"metrics": {"response/unfinished": 1.0}}, "All responses are cut off: see whether"),
        (
            {"metrics": {"reward/mean": 0.5, "kl/response": 0.0003}},
            "hardly moved: after 8 steps an answer is 3.0e−4 nats from the reference",
        ),
        ({"metrics": {"reward/mean": 0.5}}, "The reward has not risen in 8 steps, but for chance"),
        (
            {"texts": [f"The {noun} is a generous soul {i}." for i, noun in enumerate(NOUNS)]},
            "100% of the answers have one form, “the … is”",
        ),
        (
            {"metrics": {"reward/mean": 0.5, "kl/response": 4.0}},
            "so look at the samples, then try a lower training.learning_rate, which is 1e-06",
        ),
        ({"config": {"training.clip_high": 0.4}}, "training.clip_high=0.4 reads a ratio of prob"),
        ({"config": {"checkpoint.best": "eval/a/b"}}, "checkpoint.best waits for eval/a/b, which"),
        ({"config": {"stop_at": "eval/a/b > 1"}}, "stop_at waits for eval/a/b, which was never"),
        ({"config": {"algorithm.loss": "own.py:loss"}}, "algorithm.loss=own.py:loss reads a ratio"),
        ({"metrics": {"generation/groups_without_signal": 0.6}}, "60% of the prompts teach noth"),
        ({"metrics": {"mismatch/mean": 0.05}}, "Generation and training differ by 0.050 nats"),
        ({"metrics": {"reward/vader/failed": 2}}, "The reward vader failed on 16 responses"),
        ({"eval/textblob": 0.3}, "Held-out textblob fell from 0.600 to 0.300"),
        ({"eval/distinct_pairs": 0.3}, "of their word pairs 30% are distinct, and 80% were"),
        ({"texts": [f"A wonderful day {i}." for i in range(10)]}, "begin with “a wonderful day”"),
        ({"rewards": [0.99] * 10}, "The reward is at its end: 0.990 on average, 0.990 at most"),
    ],
)
def test_each_fault_is_one_sentence_with_its_number(tmp_path, changed, sentence):
    found = said(tmp_path, **changed)
    assert len(found) == 1 and sentence in found[0], found


def test_kl_that_grows_tenfold_is_told(tmp_path):
    rows = [{"step": s, "kl/response": max(0.1, s - 2.0)} for s in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sentence,) = warnings(read_run(tmp_path))
    assert sentence.startswith("KL has grown from 0.100 to 3.00 nats an answer")


@pytest.mark.parametrize(("last", "told"), [(3.0, True), (1.9, False), (0.3, False)])
def test_answers_that_the_reference_would_hardly_write_are_told(tmp_path, last, told):
    nats = np.linspace(1.5, last, 12)
    rows = [{"step": step, "reference/nats": x} for step, x in enumerate(nats)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = warnings(read_run(tmp_path))
    assert len(found) == told and all("costs the reference" in one for one in found)


def test_answers_are_measured_by_their_words():
    assert distinct_pairs(["a b a b", ""]) == pytest.approx(2 / 3)
    assert distinct_pairs([]) == 1
    assert commonest_start(["The dog sits.", "the dog, sits!", "A cat"]) == ("the dog sits", 2 / 3)


def test_runs_are_compared_by_config_texts_and_curves(tmp_path, capsys):
    for name, rate, last in (("a", 1.0, "x"), ("b", 2.0, "y")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"workdir": name, "kl": {"rate": rate}}))
        rows = [{"step": step, "reward/mean": rate * step} for step in range(3)]
        samples = [{"step": s, "prompt": "p", "response": last if s == 2 else "x"} for s in (1, 2)]
        for kind, written in (("metrics", rows), ("samples", samples)):
            lines = "".join(json.dumps(row) + "\n" for row in written)
            (folder / f"{kind}.jsonl").write_text(lines)
    out = tmp_path / "page.html"
    runs = [str(tmp_path / name) for name in "ab"]
    assert command.main(["compare", *runs, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("kl.rate: 1.0 | 2.0\n") and "Their texts part in step 2." in said
    assert ["reward/mean", "2.00", "4.00"] in [line.split() for line in said.splitlines()]
    page = out.read_text()
    assert page.count("<p>x</p>") == page.count("<p>y</p>") == 1, "the last samples of one prompt"
    assert "Their texts part in step 2." in page and 'class="mean other-1"' in page
    assert command.main(["compare", runs[0], runs[0], "--out", str(out)]) == 0
    assert "Their texts are the same" in capsys.readouterr().out
    assert command.main(["compare", runs[0], str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": {"reward/mean": 0.5}, "eval/reward": 0.9},  # held out it has risen
        {"config": {"training.clip_high": 0.4, "training.minibatches": 2}},
        {"config": {"training.clip_high": 0.4, "training.lag": 1}},
        {"config": {"checkpoint.best": "eval/textblob", "stop_at": "reward/mean > 9"}},
        # keys and values are the prompt's
        {"texts": [f'{{"thing": "{noun}"}}' for noun in NOUNS]},
    ],
)
def test_what_is_well_is_not_told(tmp_path, changed):
    assert said(tmp_path, **changed) == []


def test_a_form_is_found_with_the_prompt_left_blank():
    prompts = [f"Write about the {noun}." for noun in NOUNS]
    answers = [f"The {noun} is a great {noun}" for noun in NOUNS[:9]] + ["Yes"]
    assert commonest_form([*zip(prompts, answers, strict=True)]) == ("… is a", 0.9)
    assert commonest_form([("the a", "A the"), ("x", "only")]) == ("", 0.0)


@pytest.mark.parametrize(("last", "told"), [(2.0, True), (1.2, False)])
def test_a_held_out_loss_that_rises_is_told(tmp_path, last, told):
    rows = [{"step": step, "loss/policy": 2.0} for step in range(8)]
    losses = [(0, 3.0), (4, 1.2), (8, last)]
    evaluations = [{"step": step, "eval/loss/policy": x, "samples": []} for step, x in losses]
    for name, written in (("metrics", rows), ("evaluations", evaluations)):
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = [one for one in warnings(read_run(tmp_path)) if "Held-out" in one]
    sentence = "Held-out loss/policy is 2.00, and was 1.20 after 4 updates: the rows are learned by"
    assert [one.startswith(sentence) for one in found] == [True] * told


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        (
            {"rejected/tokens": 30.0},
            ["Chosen and rejected answers differ in tokens: 20.0 and 30.0"],
        ),
        ({"chosen/temperature": 0.7}, ["Chosen and rejected answers differ in temperature: 0.700"]),
        ({"preference/pairs": 0.0}, ["100% of the steps had no two answers of different reward"]),
        ({"labels/learned": 9.0}, []),
        ({"labels/learned": 0.0}, ["The reward model has learned from no label: the two answers"]),
    ],
)
def test_pairs_that_teach_something_else_are_told(tmp_path, changed, words):
    sides = {"tokens": 20.0, "temperature": 1.0}
    row = {f"{side}/{name}": x for name, x in sides.items() for side in ("chosen", "rejected")}
    row |= {"preference/pairs": 8.0} | changed
    lines = "".join(json.dumps({"step": step, **row}) + "\n" for step in range(4))
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = [one for one in warnings(read_run(tmp_path)) if "answers" in one]
    assert len(found) == len(words)
    assert all(one.startswith(start) for one, start in zip(found, words, strict=True))
