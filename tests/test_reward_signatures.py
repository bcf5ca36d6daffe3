"""A reward is called as its parameters' names say: a response, a prompt's, all; plain or async."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time

import numpy as np
import pytest

from rlhf_jax.config import default
from rlhf_jax.rewards import callers
from rlhf_jax.rewards.combination import Response, Score, Term, load_reward, weighted
from rlhf_jax.rewards.signatures import Form, Signature, signature_of
from rlhf_jax.rewards.sources import source_of
from rlhf_jax.rewards.workers import Workers

FUNCTIONS = """
import asyncio, os, time

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

def taken(prompt, response, row):
    return 1.0, {"mean": 3.0}

def too_few(completions, **kwargs):
    return [1.0]

async def slow(prompt, response, row):
    await asyncio.sleep(1.0)
    return 1.0

async def some_hang(prompt, response, row):
    await asyncio.sleep(60 if response == "hang" else 0)
    if response == "raise":
        raise RuntimeError("no")
    if response == "exit":
        os._exit(3)
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


def test_numbers_beside_a_reward_are_logged_by_name(file):
    with Workers(f"{file}:counted", 1, 20.0) as pool:
        scores, metrics = weighted([Term("mine", 1.0, pool)], responses("a", "abc"))
    assert scores.values.tolist() == [1, 1]
    assert metrics == {"reward/mine/mean": 1, "reward/mine/failed": 0, "reward/mine/length": 2}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("taken", "a number named 'mean', which is taken"),
        ("too_few", "gave a list of 1 instead of a list of 2 floats"),
    ],
)
def test_what_is_no_reward_is_refused_in_a_sentence(file, name, reason):
    with (
        Workers(f"{file}:{name}", 1, 20.0) as pool,
        pytest.raises(ValueError, match=reason) as caught,
    ):
        pool(responses("a", "b"))
    assert "\n" not in str(caught.value)


def test_async_calls_run_beside_each_other(file):
    with Workers(f"{file}:slow", 2, 10.0, concurrency=16) as pool:
        pool(responses("warm"))
        began = time.monotonic()
        assert pool(responses(*["x"] * 64)).values.tolist() == [1.0] * 64
        assert 4.0 <= time.monotonic() - began < 6.0, "64 calls of a second, 16 at a time"


def test_async_calls_fail_one_by_one(file):
    with Workers(f"{file}:some_hang", 1, 0.5, concurrency=8) as pool:
        pool(responses("fine"))
        scores = pool(responses("fine", "hang", "raise", "fine"))
        assert scores.failures == {1: "took longer than 0.5 s", 2: "raised RuntimeError: no"}
        assert "exit code 3" in pool(responses("exit")).failures[0]
        assert pool(responses("fine")).values.tolist() == [1.0], "another process serves"


def test_what_began_early_is_collected_once(file):
    with Workers(f"{file}:counted", 2, 20.0) as pool:
        for key, response in enumerate(responses("a", "ab", "abc")):
            pool.begin(10 + key, response, (10, 11, 12))
            pool.advance()
        found = pool.collect()
        assert found == {10 + n: Score(1.0, {"length": n + 1}) for n in range(3)}
        assert pool.collect() == {}
    with Workers(f"{file}:taken", 1, 20.0) as pool:
        pool.begin(0, responses("a")[0], (0,))
        assert pool.collect() == {}, "a call is to find out that it never works"


@contextlib.contextmanager
def opened(where, name, file):
    if where == "worker":
        with Workers(f"{file}:{name}", 2, 20.0, concurrency=4) as pool:
            pool(responses("warm"))
            yield pool
    else:
        spec = callers.offer(load_reward(f"{file}:{name}"), name)
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
    spec = callers.offer(stuck, "stuck")
    with source_of(spec).open(spec, default(), lambda: None) as scorer:
        scorer.begin(0, responses("a")[0], (0,))
    assert threading.active_count() == before


def test_functions_of_the_caller_have_the_same_forms():
    async def judged(prompt, response, row):
        return float(len(response)), {"length": len(response)}

    def compared(prompt, responses, row):
        return [len(one) / max(map(len, responses)) for one in responses]

    for function, values in ((judged, [1, 2, 3, 1]), (compared, [0.5, 1, 1, 1 / 3])):
        spec = callers.offer(function)
        with source_of(spec).open(spec, default(), lambda: None) as score:
            found = score(responses("a", "ab", "abc", "a"))
        np.testing.assert_allclose(found.values, values)
    assert signature_of(judged) == Signature(Form.ONE, True)
    assert signature_of(len) == Signature(Form.ONE, False)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a reward, or a grade, at the third time of asking."""

    asked: list[dict] = []  # noqa: RUF012

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(sent)
        busy = len(self.asked) in (1, 2)
        grade = {"choices": [{"message": {"content": "Grade: 7"}}]}
        own = {"reward": len(sent.get("response", "")), "numbers": {"seen": 1}}
        told = grade if self.path.endswith("/chat/completions") else own
        self.send_response(503 if busy else 404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Server.asked = []
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}"
    listening.shutdown()
    listening.server_close()


def test_servers_are_asked_again_and_their_answers_are_rewards(server, tmp_path):
    pytest.importorskip("httpx")
    (tmp_path / "mine.py").write_text(
        "from rlhf_jax.rewards.ready.remote import http, judge\n"
        f"mine = http('{server}/reward')\n"
        f"graded = judge('{server}/v1', model='small', question='Is it kind?')\n"
        f"wrong = http('{server}/none')\n"
        "gone = http('http://127.0.0.1:9/none', retries=1)\n"
    )
    with Workers(f"{tmp_path}/mine.py:mine", 1, 20.0, concurrency=1) as pool:
        scores = pool(responses("abc", "a"))
    assert scores.values.tolist() == [3, 1] and scores.numbers[0] == {"seen": 1.0}
    assert len(Server.asked) == 4, "two tries of four found it busy"
    with Workers(f"{tmp_path}/mine.py:graded", 1, 20.0, concurrency=2) as pool:
        np.testing.assert_allclose(pool(responses("abc", "a")).values, 0.7)
    assert "Is it kind?" in Server.asked[-1]["messages"][0]["content"]
    for name, reason in (("wrong", "answered 404"), ("gone", "could not be asked")):
        with (
            Workers(f"{tmp_path}/mine.py:{name}", 1, 20.0) as pool,
            pytest.raises(ValueError, match=reason),
        ):
            pool(responses("a"))


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
