"""Loading rewards, scoring samples, and the two measures of sentiment."""

import numpy as np
import pytest

from rlhf_jax.inference import rewards

SENTIMENT = "configs/rewards/sentiment.py"


def length(prompt, response, row):
    return len(response) / row["unit"]


def run(reward, responses, rows=None):
    return rewards.score(reward, ["p"] * len(responses), responses, rows or [{}] * len(responses))


def test_loads_from_a_module_and_from_a_file(tmp_path, monkeypatch):
    assert rewards.load_reward("math:dist").__name__ == "dist"
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Scale:\n    by: float = 2.0\n"
        "def scaled(prompt, response, row):\n    return Scale().by * len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    for spec in ("mine.py:scaled", f"{tmp_path}/mine.py:scaled"):
        assert rewards.load_reward(spec)("", "abc", {}) == 6.0
    assert rewards.load_reward(f"{SENTIMENT}:vader")  # found in the repository from any folder


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("sentiment", "must look like"),
        ("file.py:", "must look like"),
        ("nowhere/file.py:f", "there is no file nowhere/file.py"),
        ("no_such_package.module:f", "cannot be imported: ModuleNotFoundError"),
        ("math:no_such", "defines no 'no_such'"),
        ("math:pi", "is of type float, not a function"),
        ("broken.py:f", "cannot be imported: SyntaxError"),
    ],
)
def test_bad_specs_end_in_one_sentence(spec, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as caught:
        rewards.load_reward(spec)
    assert "\n" not in str(caught.value)


def test_scores_each_sample_with_its_row():
    scores = run(length, ["a", "bcd"], [{"unit": 1}, {"unit": 2}])
    assert scores.dtype == np.float32 and scores.tolist() == [1.0, 1.5]
    assert run(lambda *_: True, ["a"]).tolist() == [1.0]
    assert run(lambda *_: np.float64(0.5), ["a"]).tolist() == [0.5]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1e300, "1e.300"),
        ("0.5", "type str"),
        (None, "type NoneType"),
    ],
)
def test_bad_values_name_their_sample(value, sentence):
    with pytest.raises(ValueError, match=rf"sample 1 \(prompt 'p', response 'second'\) is .*{sentence}"):
        run(lambda prompt, response, row: value if response == "second" else 0.0, ["first", "second"])


def test_a_failing_reward_names_its_sample():
    with pytest.raises(ValueError, match=r"Reward length of sample 0 .* failed with KeyError: 'unit'"):
        run(length, ["a"])


@pytest.fixture(scope="module")
def vader():
    pytest.importorskip("vaderSentiment")
    return lambda text: rewards.load_reward(f"{SENTIMENT}:vader")("", text, {})


def test_vader_orders_texts_within_bounds(vader):
    bad, neutral, good = map(vader, ("The lamp is ugly.", "The lamp is on the table.", "The lamp is beautiful."))
    assert 0.0 < bad < neutral == 0.5 < good < 1.0
    assert vader("") == vader(" \n") == vader("!!!") == 0.0


def test_vader_pays_for_no_cheap_trick(vader):
    honest = vader("A beautiful lamp brings a warm glow and joy to the happy home.")
    assert vader("love " * 20) == vader("love, LOVE love!!!") == pytest.approx(vader("love")) and vader("love") < honest
    assert vader(":) " * 20) == vader(":)")
    plain = vader("The lamp is beautiful.")
    assert vader("The LAMP is BEAUTIFUL!!!!") == vader("The lamp is beautiful. I love it. So great.") == plain
    assert vader("The 3.5 inch lamp is beautiful.") > 0.5  # a decimal point ends no sentence


def test_textblob_is_another_opinion_without_downloads():
    pytest.importorskip("textblob")
    measure = rewards.load_reward(f"{SENTIMENT}:textblob_polarity")
    bad, neutral, good = (measure("", f"The lamp is {word}.", {}) for word in ("ugly", "there", "beautiful"))
    assert 0.0 <= bad < neutral == 0.5 < good <= 1.0
    assert measure("", "", {}) == 0.0
