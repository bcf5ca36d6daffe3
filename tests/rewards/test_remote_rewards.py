"""Rewards that a server computes, and grades of a judge: what is asked, waited for and read."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import http.server
import json
import threading
import urllib.parse

import pytest

from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.workers import Workers

pytest.importorskip("httpx")

from rlhf_jax.rewards.ready import remote


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as its script says, one entry a request: status, headers, content."""

    script: list[tuple[int, dict[str, str], object]] = []  # noqa: RUF012
    asked: list[tuple[str, object, str | None]] = []  # noqa: RUF012

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, sent, self.headers.get("X-Key")))
        status, headers, content = self.script.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            if value.startswith("in "):
                value = in_seconds(int(value.removeprefix("in ")))
            self.send_header(name, value.replace("PORT", self.headers["Host"].partition(":")[2]))
        self.end_headers()
        text = content if isinstance(content, str) else json.dumps(content)
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def listening():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def served(listening):
    """The server, with nothing asked of it yet."""
    Server.asked.clear()
    return listening


def in_seconds(seconds):
    now = datetime.datetime.now(datetime.UTC)
    return email.utils.format_datetime(now + datetime.timedelta(seconds=seconds), usegmt=True)


BUSY = (429, {}, "later")
FINE = (200, {}, 3.0)
# Names of the same machine, one of which is another host.
SAME = "http://127.0.0.1:PORT/other"
OTHER = "http://localhost:PORT/other"
# What a server answers in turn, the pauses in seconds (RFC 9110), and the value or the failure.
ANSWERS = {
    "at once": ([FINE], [], 3.0),
    "busy twice": ([BUSY, (503, {}, ""), FINE], [0.5, 1.0], 3.0),
    "busy for ever": ([BUSY] * 4, [0.5, 1.0, 2.0], "answered 429 'later'"),
    "a pause in seconds": ([(429, {"Retry-After": "7"}, ""), FINE], [7.0], 3.0),
    "no pause": ([(503, {"Retry-After": "0"}, ""), FINE], [0.0], 3.0),
    "a pause until": ([(503, {"Retry-After": "in 20"}, ""), FINE], [20.0], 3.0),
    "a pause that is over": ([(503, {"Retry-After": "in -9"}, ""), FINE], [0.0], 3.0),
    "a pause of nonsense": ([(429, {"Retry-After": "soon"}, ""), FINE], [0.5], 3.0),
    "a negative pause": ([(429, {"Retry-After": "-5"}, ""), FINE], [0.5], 3.0),
    "too long a pause": ([(429, {"Retry-After": "3600"}, "")], [], "requests 3600 s of pause"),
    "missing": ([(404, {"Retry-After": "1"}, "gone")], [], "answered 404 'gone'"),
    "moved here": ([(307, {"Location": "/other"}, ""), FINE], [], 3.0),
    "moved for good": ([(308, {"Location": SAME}, ""), FINE], [], 3.0),
    "moved twice": ([(307, {"Location": "/a"}, ""), (308, {"Location": "/b"}, ""), FINE], [], 3.0),
    "moved, then busy": ([(307, {"Location": "/a"}, ""), BUSY, FINE], [0.5], 3.0),
    "moved for ever": ([(307, {"Location": "/a"}, "")] * 6, [], "leads to '/a': give that address"),
    "moved elsewhere": ([(307, {"Location": OTHER}, "")], [], "leads to 'http://localhost"),
    "moved as another request": ([(302, {"Location": "/a"}, "")], [], "leads to '/a'"),
    "no JSON": ([(200, {}, "<html>")], [], "answered no JSON but '<html>'"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_is_asked_as_its_answers_say(name, served, monkeypatch):
    script, pauses, right = ANSWERS[name]
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    Server.script[:] = script
    asked = remote.post_json(f"{served}/reward", {"a": 1}, {"X-Key": "secret"}, 3)
    if isinstance(right, str):
        with pytest.raises(ValueError) as caught:
            asyncio.run(asked)
        assert right in str(caught.value) and str(caught.value).startswith(f"{served}/reward ")
    else:
        assert asyncio.run(asked) == right
    assert waited == pytest.approx(pauses, abs=1.5) and not Server.script
    assert {tuple(one[1:]) for one in map(repr_of, Server.asked)} == {('{"a": 1}', "secret")}


def repr_of(asked):
    path, sent, key = asked
    return path, json.dumps(sent), key


def test_a_server_that_is_not_there_is_a_failure(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.0)
    with pytest.raises(ValueError, match="could not be reached"):
        asyncio.run(remote.post_json("http://127.0.0.1:9/none", {}, {}, 1))


# An answer of a judge, and the grade that a reader finds in it; None where nobody can tell.
GRADES = {
    "9": 9,
    " 10\n": 10,
    "0": 0,
    "7.5": 7.5,
    "7,5": 7.5,
    "Grade: 7": 7,
    "**8**": 8,
    "8/10": 8,
    "**8** / 10": 8,
    "8 out of 10.": 8,
    "10 out of 10": 10,
    "On a scale of 0 to 10, I give 8.": 8,
    "I give 8 on a scale from 0 (worst) to 10 (best).": 8,
    "8 (0-10)": 8,
    "Clarity 7, depth 9. Overall: 8": 8,
    "<think>1. clear</think>9": 9,
    "<think>3?</think><think>4?</think>\n\n5": 5,
    "3 to 4 flaws</think>6": 6,
    "<thinking>2</thinking>6": 6,
    "[THINK]2[/THINK]6": 6,
    "<think>8": None,
    "<think>8</think>": None,
    "": None,
    "none": None,
    "11": None,
    "-1": None,
    "10.5": None,
    "80/100": None,
    "8 to 9": None,
    "I give 8, though it has 2 flaws in it": None,
}


@pytest.mark.parametrize("answer", GRADES)
def test_the_grade_is_what_follows_the_thinking(answer):
    right = GRADES[answer]
    if right is not None:
        assert remote.grade_of(answer) == right
        return
    with pytest.raises(ValueError, match="the judge") as caught:
        remote.grade_of(answer)
    assert "\n" not in str(caught.value)


def judged(served, content, reason="stop", **settings):
    """The reward of a judge that answers so."""
    choice = {"message": {"content": content}, "finish_reason": reason}
    Server.script[:] = [(200, {}, {"choices": [choice]})]
    judge = remote.judge(f"{served}/v1", model="small", question="Is it kind?", **settings)
    return asyncio.run(judge("What?", "That.", {}))  # pyright: ignore[reportArgumentType]


def test_a_judge_is_asked_the_question_and_may_be_read_by_a_pattern(served):
    assert judged(served, "<think>1</think>Grade: 7") == 0.7
    path, sent, _ = Server.asked[0]
    assert path == "/v1/chat/completions" and isinstance(sent, dict)
    assert "Is it kind?" in sent["messages"][0]["content"] and sent["max_tokens"] == 4096
    assert judged(served, "A=3; B=9; total 12", pattern=r"B=(\d+)") == 0.9
    assert judged(served, "<think>B=1</think>3, then 4.", pattern=r"\d") == 0.4
    for content, reason, settings in (
        ("8", "length", {}),
        ("7", "stop", {"pattern": r"B=(\d+)"}),
        ("B=x", "stop", {"pattern": r"B=(\w+)"}),
    ):
        with pytest.raises(ValueError, match="the judge"):
            judged(served, content, reason, **settings)


def test_remote_rewards_are_named_from_a_file(served, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rlhf_jax.rewards.ready.remote import http\n"
        f"mine = http({served + '/reward'!r}, headers={{'X-Key': 'k'}})\n"
    )
    Server.script[:] = [(200, {}, {"reward": 3, "numbers": {"seen": 1}}), (200, {}, 2)]
    with Workers(f"{tmp_path}/mine.py:mine", 1, 20.0, concurrency=1) as pool:
        scores = pool([Response("p", [], {"a": 1}, text, [1], 0) for text in ("abc", "a")])
    assert scores.values.tolist() == [3, 2] and scores.numbers == {0: {"seen": 1.0}}
    assert [urllib.parse.urlsplit(path).path for path, _, _ in Server.asked] == ["/reward"] * 2
    assert Server.asked[0][1] == {"prompt": "p", "response": "abc", "row": {"a": 1}}
