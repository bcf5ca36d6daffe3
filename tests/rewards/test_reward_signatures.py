"""A reward is called as its parameters' names say: a response, a prompt's, all; plain or async."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from typing import Any

import numpy as np
import pytest

from rlhf_jax.config import default
from rlhf_jax.rewards import sources
from rlhf_jax.rewards.combination import Response, Score, load_reward
from rlhf_jax.rewards.functions import Form, Signature, arguments, signature_of
from rlhf_jax.rewards.sources import check_columns, source_of
from rlhf_jax.rewards.workers import Workers

FUNCTIONS = """
import asyncio, time

def one(prompt, response, row):
    return len(response) * row["scale"]

async def one_async(prompt, response, row):
    await asyncio.sleep(0.01)
    return float(len(response) * row["scale"])

def group(prompt, responses, row):
    longest = max(map(len, responses))
    return [len(response) / longest for response in responses]

def compared(prompt, responses, row):
    time.sleep(0.3)
    return [float(len(response)) for response in responses]

async def compared_async(prompt, responses, row):
    await asyncio.sleep(0.3)
    return [float(len(response)) for response in responses]

def batched(completions, **columns):
    return [1.0] * len(completions)

def trl(completions, scale, **kwargs):
    assert set(kwargs) >= {"prompts", "completion_ids", "log_metric"} and "prompt" not in kwargs
    kwargs["log_metric"]("batch", len(completions))
    return [len(text) * by if text else None for text, by in zip(completions, scale)]

def trl_of_chats(prompts, completions):
    assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [len(one[0]["content"]) for one in completions]

async def trl_async(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]

def counted(prompt, response, row):
    return 1.0, {"length": len(response)}

def too_few(prompt, responses):
    return []

async def slow(prompt, response, row):
    await asyncio.sleep(0.25)
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def responses(*texts, group=2, chat=False):
    """Responses to prompts of `group` samples each."""
    asked = [{"role": "user", "content": "p"}]
    return [
        Response("p", asked, {"prompt": asked if chat else "p", "scale": 2}, text, [1], i // group)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("one", [2, 4, 6, 0]),
        ("one_async", [2, 4, 6, 0]),
        ("group", [0.5, 1, 1, 0]),
        ("trl", [2, 4, 6, 0]),
        ("trl_async", [1, 2, 3, 0]),
    ],
)
def test_each_form_gives_a_number_for_each_response(file, name, values):
    with Workers(f"{file}:{name}", 2, 20.0, concurrency=4) as pool:
        scores = pool(responses("a", "ab", "abc", ""))
        assert scores.values.tolist() == values and not scores.failures, scores.failures
        assert pool([]).values.shape == (0,)
    if name == "trl":
        assert scores.numbers == {0: {"batch": 4.0}}


def test_a_chat_reaches_trl_rewards_as_messages(file):
    with Workers(f"{file}:trl_of_chats", 1, 20.0) as pool:
        assert pool(responses("a", "ab", chat=True)).values.tolist() == [1, 2]


def test_async_calls_run_beside_each_other(file):
    with Workers(f"{file}:slow", 2, 10.0, concurrency=16) as pool:
        pool(responses("warm"))
        began = time.monotonic()
        assert pool(responses(*["x"] * 64)).values.tolist() == [1.0] * 64
        assert 1.0 <= time.monotonic() - began < 3.0, "64 calls of a quarter, 16 at a time"


def test_what_began_early_is_collected_once(file):
    with Workers(f"{file}:counted", 2, 20.0) as pool:
        for key, response in enumerate(responses("a", "ab", "abc")):
            pool.begin(10 + key, response, (10, 11, 12))
            pool.advance()
        found = pool.collect()
        assert found == {10 + n: Score(1.0, {"length": n + 1}) for n in range(3)}
        assert pool.collect() == {}
    with Workers(f"{file}:too_few", 1, 20.0) as pool:
        pool.begin(0, responses("a")[0], (0,))
        assert pool.collect() == {}, "a call is to find out that it never works"


@contextlib.contextmanager
def opened(where, name, file):
    if where == "worker":
        with Workers(f"{file}:{name}", 2, 20.0, concurrency=4) as pool:
            pool(responses("warm"))
            yield pool
    else:
        spec = sources.offer(load_reward(f"{file}:{name}"), name)
        with source_of(spec).open(spec, default(), lambda: None) as scorer:
            yield scorer


@pytest.mark.parametrize("where", ["worker", "caller"])
@pytest.mark.parametrize("name", ["compared", "compared_async"])
def test_a_prompts_samples_are_scored_when_the_last_of_them_is_there(where, name, file):
    with opened(where, name, file) as scorer:
        for key, text in ((7, "a"), (4, "ab"), (5, "b"), (8, "abc")):
            scorer.begin(key, responses(text)[0], (4, 9) if key == 4 else (7, 5, 8))
            scorer.advance()
        time.sleep(1.0)
        scorer.advance()
        began = time.monotonic()
        assert scorer.collect() == {7: Score(1.0), 5: Score(1.0), 8: Score(3.0)}, "4 waits for 9"
        assert time.monotonic() - began < 0.2, "the call ran beside what else was done"
        scorer.begin(9, responses("c")[0], (4, 9))
        assert scorer.collect() == {}, "what was not whole is forgotten"


@pytest.mark.parametrize("where", ["worker", "caller"])
def test_a_batch_waits_for_all(where, file):
    with opened(where, "batched", file) as scorer:
        scorer.begin(4, responses("a")[0], (4,))
        assert scorer.collect() == {}


def test_calls_of_the_caller_end_with_the_run():
    async def stuck(prompt, response, row):
        await asyncio.sleep(60)

    before = threading.active_count()
    spec = sources.offer(stuck, "stuck")
    with source_of(spec).open(spec, default(), lambda: None) as scorer:
        scorer.begin(0, responses("a")[0], (0,))
    assert threading.active_count() == before


def test_functions_of_the_caller_have_the_same_forms():
    async def judged(prompt, response, row):
        return float(len(response)), {"length": len(response)}

    def compared(prompt, responses, row):
        return [len(one) / max(map(len, responses)) for one in responses]

    for function, values in ((judged, [1, 2, 3, 1]), (compared, [0.5, 1, 1, 1 / 3])):
        spec = sources.offer(function)
        with source_of(spec).open(spec, default(), lambda: None) as score:
            found = score(responses("a", "ab", "abc", "a"))
        np.testing.assert_allclose(found.values, values)


class Called:
    """A reward that is an object."""

    async def __call__(self, row, response):
        return f"{response} {row['scale']}"


def by_position(prompt, response, row, /):
    return f"{prompt} {response} {row['scale']}"


def any_name(response, **others):
    return f"{response} {sorted(others)}"


def verl(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """Its gsm8k's: verl/utils/reward_score/gsm8k.py."""
    return f"{solution_str} {ground_truth} {method}"


def verl_documented(data_source, solution_str, ground_truth, extra_info: Any = None):
    """Of docs/preparation/reward_function.rst."""
    return f"{data_source} {solution_str} {ground_truth} {extra_info['index']}"


def verl_sandboxed(data_source, solution_str, ground_truth, extra_info, url=None, **kwargs):
    """As its default_compute_score: verl/utils/reward_score/__init__.py."""
    return f"{solution_str} {extra_info['num_turns']} {sorted(kwargs)}"


def verl_batched(data_sources, solution_strs, ground_truths, extra_infos):
    """Its compute_score_batched: verl/utils/reward_score/math_batch.py."""
    indices = [info["index"] for info in extra_infos]
    return [
        list(one) for one in zip(data_sources, solution_strs, ground_truths, indices, strict=True)
    ]


def trl_ids(completion_ids, **kwargs):
    """Example 1 of TRL's docs/source/grpo_trainer.md."""
    return completion_ids


def trl_columns(completions, ground_truth, log_extra: Any = None, log_metric: Any = None, **_):
    """Its example 6; the newest names are given to those that take all, except the trainer's."""
    log_extra("golden_answer", list(ground_truth))
    log_metric("accuracy", 0.5)
    return [f"{text} {right}" for text, right in zip(completions, ground_truth, strict=True)]


def trl_positions(completions, prompts, trainer_state=None):
    pairs = zip(prompts, completions, strict=True)
    return [f"{prompt} {text} {trainer_state}" for prompt, text in pairs]


def trl_column_alone(scale, **kwargs):
    return [f"{kwargs['completions']} {scale}"] * len(scale)


OF_VERL = {
    "prompt": "p",
    "scale": 2,
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 7},
}
# A function, and what it returns for the response "r", by hand.
NAMED = [
    (lambda response: response, "r"),
    (lambda row, response, prompt: f"{prompt} {response} {row['scale']}", "p r 2"),
    (lambda: "nothing", "nothing"),
    (lambda *given: given[:2], ("p", "r")),
    (lambda *given, **named: given[:2], ("p", "r")),
    (lambda response, *rest, scale=3: f"{response} {rest} {scale}", "r () 3"),
    (lambda *, row, response: f"{response} {row['scale']}", "r 2"),
    (lambda responses: responses, ["r"]),
    (lambda row, responses, prompt: f"{prompt} {responses} {row['scale']}", "p ['r'] 2"),
    (functools.partial(lambda scale, response: f"{response} {scale}", 5), "r 5"),
    (by_position, "p r 2"),
    (any_name, "r ['prompt', 'row']"),
    (Called(), "r 2"),
    (verl, "r 72 strict"),
    (verl_documented, "gsm8k r 72 7"),
    (verl_sandboxed, "r None []"),
    (verl_batched, [["gsm8k", "r", "72", 7]]),
    (trl_ids, [[1]]),
    (trl_columns, ["r 72"]),
    (trl_positions, ["p r None"]),
    (trl_column_alone, ["['r'] [2]"]),
]


@pytest.mark.parametrize(("function", "right"), NAMED)
def test_names_decide_what_a_reward_is_given(function, right):
    signature = signature_of(function)
    check_columns({"f.py:f": signature}, [OF_VERL])
    given = arguments(function, signature.form, [Response("p", [], OF_VERL, "r", [1])])
    found = function(*given.positional, **given.named)
    assert (asyncio.run(found) if signature.is_async else found) == right


def test_an_async_function_is_known_under_any_cover():
    async def asked(response):
        return 1.0

    for function in (asked, functools.partial(asked), Called()):
        assert signature_of(function) == Signature(Form.ONE, True)
    assert signature_of(len) == Signature(Form.ONE, False), "a builtin names nothing"


UNKNOWN = [
    (lambda respones: 1, "respones"),
    (lambda prompt, answer: 1, "answer"),
    (lambda p, r, row: 1, "p"),
    (lambda response, responses: 1, "response"),
    (lambda prompt, completions: 1, "prompt"),
    (lambda completions, completion: 1, "completion"),
    (lambda prompts, completions, completion_ids, trainer_state: 1, "trainer_state"),
    (lambda completions, environments, **kwargs: 1, "environments"),
    (lambda data_source, solution_str, ground_truth, reward_router_address: 1, "reward_router"),
    (lambda predict_str, ground_truth: 1, "predict_str"),
]


@pytest.mark.parametrize(("function", "name"), UNKNOWN)
def test_a_name_that_no_call_fills_is_refused_with_those_that_are(function, name, tmp_path):
    with pytest.raises(ValueError, match=f"has a parameter '{name}.*may name prompt") as caught:
        signature_of(function)
    assert str(caught.value).count("\n") == 0 and "completions" in str(caught.value)


COLUMNS = [
    (lambda completions, answr: 1, [{"answer": 1}, {"other": 1}], "answr"),
    (lambda completions, other: 1, [{"answer": 1}, {"other": 1}], ""),
    (lambda completions, answr=None: 1, [{"answer": 1}], ""),
    (lambda solution_str, ground_truth: 1, [{"prompt": "p"}], "ground_truth"),
    (lambda solution_strs, ground_truths: 1, [{"prompt": "p"}], "ground_truth"),
    (lambda solution_str, ground_truth: 1, [{"reward_model": {}}], ""),
    (lambda data_source, solution_str: 1, [{"prompt": "p"}], "data_source"),
    (lambda solution_str, extra_info: 1, [{"prompt": "p"}], ""),
]


@pytest.mark.parametrize(("function", "rows", "missing"), COLUMNS)
def test_a_column_that_no_row_has_is_found_before_the_run(function, rows, missing):
    signatures = {"f.py:f": signature_of(function)}
    if not missing:
        return check_columns(signatures, rows)
    with pytest.raises(ValueError, match=f"has a parameter '{missing}', which is no column of the"):
        check_columns(signatures, rows)


def test_a_column_of_some_rows_is_none_in_the_others():
    def kept(completions, **columns):
        return columns["late"]

    rows = [{"prompt": "p"}, {"prompt": "p", "late": 3}]
    asked = [Response("p", [], row, "r", [1], number) for number, row in enumerate(rows)]
    assert kept(**arguments(kept, Form.BATCH, asked).named) == [None, 3]


def test_rewards_of_the_package_are_named_alone():
    with Workers("think_format", 1, 20.0) as pool:
        texts = ("<think>why</think> so", "so", "<think>why</think>", "<think>a<think>b</think> c")
        assert pool(responses(*texts)).values.tolist() == [1, 0, 0, 0]
    pytest.importorskip("math_verify")
    with Workers("math_verify", 1, 20.0) as pool:
        row = {"prompt": "p", "answer": "\\frac{1}{2}"}
        texts = ("It is $0.5$", "$\\frac{2}{4}$", "It is 3.")
        asked = [Response("p", [], row, text) for text in texts]
        assert pool(asked).values.tolist() == [1, 1, 0]
