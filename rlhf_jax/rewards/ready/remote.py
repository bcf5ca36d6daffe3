"""Rewards that a server computes: any that answers JSON, or a language model that judges.

    from rlhf_jax.rewards.ready.remote import judge
    helpful = judge("http://localhost:8000/v1", model="...", question="How helpful is the answer?")

in a file of one's own, which a config names as FILE.py:helpful.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import os
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

AsyncReward = Callable[[str, str, dict[str, Any]], Awaitable[Any]]

LARGEST_ANSWER = 1 << 20  # bytes of a server's answer
FIRST_PAUSE = 0.5  # seconds before the second try; each later pause is twice as long
LONGEST_PAUSE = 60.0  # longest pause that a server may request before the next try
REQUEST_SECONDS = 60.0  # the longest that one try may take
MOST_REDIRECTS = 5

GRADING = """Grade the answer below with a number from 0 (worst) to 10 (best). {question}

Request:
{prompt}

Answer:
{response}

Write the number and nothing else."""

# Ends of the text that a model writes before its answer.
THINKING_ENDS = re.compile(r".*(?:</(?:think|thinking|thought|reasoning)>|\[/THINK\])", re.S | re.I)
THINKING_BEGINS = re.compile(r"\s*(?:<(?:think|thinking|thought|reasoning)>|\[THINK\])", re.I)
# The scale is not a grade: "from 0 (worst) to 10 (best)", "/10", "out of 10".
SCALE = re.compile(
    r"\b[01](?:\s*\([^)]*\))?\s*(?:to|and|through|-|–|\.\.)\s*10\b(?!\.\d)|(?:/|\bof)\s*10\b(?!\.\d)",
    re.I,
)
NUMBER = re.compile(r"(?<!\w)-?\d+(?:[.,]\d+)?")
# "7 to 8" and "8/9" are not grades.
RANGE = re.compile(r"\d\s*(?:to|and|[-–/])\s*\d", re.I)

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
_clients = weakref.WeakKeyDictionary()


def http(url: str, *, headers: Mapping[str, str] = {}, retries: int = 3) -> AsyncReward:
    """Make a reward that a server computes.

    It receives {"prompt", "response", "row"} as JSON, and returns a number, or an object with a
    "reward" and optionally "numbers" by name to log. A try that finds no server, a busy one (429)
    or one with an internal error (5xx) is repeated, after the pause that the server requests
    (Retry-After). A redirect that keeps the request (307, 308) is followed on the same host.
    """

    async def reward(prompt: str, response: str, row: dict[str, Any]) -> Any:
        payload = {"prompt": prompt, "response": response, "row": row}
        reply = await post_json(url, payload, headers, retries)
        if isinstance(reply, dict):
            return reply["reward"], reply.get("numbers", {})
        return reply

    return reward


def judge(
    url: str,
    *,
    model: str,
    question: str,
    template: str = GRADING,
    pattern: str = "",
    max_tokens: int = 4096,
    key_variable: str = "OPENAI_API_KEY",
    retries: int = 3,
) -> AsyncReward:
    """Make a reward of 0 to 1: the grade that a language model gives a response, over 10.

    url: of a server with OpenAI's interface, up to and with its /v1. template: has {question},
    {prompt} and {response}. pattern: a regular expression whose last match in the judge's answer,
    its group 1 if it has one, is the grade; without it, `grade_of` reads it. max_tokens: of the
    judge's thinking and answer. key_variable: the environment variable with the server's key.
    """
    form = re.compile(pattern) if pattern else None

    async def reward(prompt: str, response: str, row: dict[str, Any]) -> float:
        filled = template.format(question=question, prompt=prompt, response=response)
        key = os.environ.get(key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        payload = {
            "model": model,
            "messages": [{"role": "user", "content": filled}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        reply = await post_json(f"{url.rstrip('/')}/chat/completions", payload, headers, retries)
        choice = reply["choices"][0]
        if choice.get("finish_reason") == "length":
            raise ValueError(f"the judge did not end within max_tokens = {max_tokens}: raise it")
        return grade_of(str(choice["message"]["content"]), form) / 10

    return reward


def grade_of(text: str, form: re.Pattern[str] | None = None) -> float:
    """Return the grade, 0 to 10, of a judge's answer, after its thinking.

    It is the last match of a form, else the only number besides the scale, or the one that ends the
    answer. Raises ValueError if there is none, or if several are ambiguous.
    """
    answer = THINKING_ENDS.sub("", text)
    if THINKING_BEGINS.match(answer):
        raise ValueError("the judge did not end its thinking: raise max_tokens")
    if form is not None:
        matches = [one[1] if form.groups else one[0] for one in form.finditer(answer)][-1:]
    else:
        matches = _clear_numbers(SCALE.sub(" ", answer))
    numbers = [NUMBER.fullmatch((one or "").strip()) for one in matches]
    grades = [float(one[0].replace(",", ".")) for one in numbers if one is not None]
    if len(grades) != 1 or not 0 <= grades[0] <= 10:
        raise ValueError(f"the judge gave no clear grade from 0 to 10 but {answer.strip()[:60]!r}")
    return grades[0]


def _clear_numbers(answer: str) -> list[str]:
    """Return the distinct numbers of an answer; only the last one if it ends the answer."""
    if RANGE.search(answer):
        return []
    matches = list(NUMBER.finditer(answer))
    if matches and not re.search(r"\w", answer[matches[-1].end() :]):
        return [matches[-1][0]]
    return list(dict.fromkeys(one[0] for one in matches))


async def post_json(url: str, payload: Any, headers: Mapping[str, str], retries: int) -> Any:
    """Return a server's response to JSON; raises ValueError, in one sentence, if it fails."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=REQUEST_SECONDS)
    why = ""
    for tries in range(retries + 1):
        pause = FIRST_PAUSE * 2**tries
        try:
            answer = await _post(_clients[loop], url, payload, headers)
        except httpx.TransportError as error:
            why = f"could not be reached ({type(error).__name__}: {error})"
        else:
            if answer.is_success:
                return _content(url, answer)
            why = f"answered {answer.status_code} {answer.text[:100]!r}"
            if answer.is_redirect:
                why = f"leads to {answer.headers.get('location')!r}: give that address"
            if answer.status_code != 429 and answer.status_code < 500:
                break
            pause = _retry_after(answer, pause)
            if pause > LONGEST_PAUSE:
                why = f"answered {answer.status_code} and requests {pause:.0f} s of pause"
                break
        if tries < retries:
            await asyncio.sleep(pause)
    raise ValueError(f"{url} {why}")


async def _post(
    client: httpx.AsyncClient, url: str, payload: Any, headers: Mapping[str, str]
) -> httpx.Response:
    """Send JSON; follow redirects that keep the request, as long as they stay on the host."""
    answer = await client.post(url, json=payload, headers=dict(headers))
    for _ in range(MOST_REDIRECTS):
        following = answer.next_request
        if answer.status_code not in (307, 308) or following is None:
            break
        before = answer.request.url
        after = following.url
        if after.host != before.host or (before.scheme, after.scheme) == ("https", "http"):
            break
        answer = await client.send(following)
    return answer


def _content(url: str, answer: httpx.Response) -> Any:
    """Return the JSON in a server's response."""
    if len(answer.content) > LARGEST_ANSWER:
        raise ValueError(f"{url} answered more than {LARGEST_ANSWER:,} bytes")
    try:
        return json.loads(answer.content)
    except ValueError as error:
        raise ValueError(f"{url} answered no JSON but {answer.text[:60]!r}") from error


def _retry_after(answer: httpx.Response, otherwise: float) -> float:
    """Return the pause in seconds that a server requests: RFC 9110, section 10.2.3."""
    header = answer.headers.get("retry-after", "").strip()
    if header.isascii() and header.isdigit():
        return float(header)
    try:
        until = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return otherwise
    if until.tzinfo is None:  # -0000 is UTC
        until = until.replace(tzinfo=datetime.UTC)
    return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
