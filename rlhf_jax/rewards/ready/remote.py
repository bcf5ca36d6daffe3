"""Rewards that a server computes: any that answers JSON, or a language model that judges.

    from rlhf_jax.rewards.ready.remote import judge
    helpful = judge("http://localhost:8000/v1", model="...", question="How helpful is the answer?")

in a file of one's own, which a config names as FILE.py:helpful.
"""

from __future__ import annotations

import asyncio
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
REQUEST_SECONDS = 60.0  # the longest that one try may take

GRADING = """Grade the answer below with a number from 0 (worst) to 10 (best). {question}

Request:
{prompt}

Answer:
{response}

Write the number and nothing else."""

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
_clients = weakref.WeakKeyDictionary()


def http(url: str, *, headers: Mapping[str, str] = {}, retries: int = 3) -> AsyncReward:
    """Make a reward that a server computes.

    It is sent {"prompt", "response", "row"} as JSON, and answers a number, or an object with a
    "reward" and, if it likes, "numbers" by name that are logged. A try that finds no server, a busy
    one (429) or one with an error of its own (5xx) is repeated.
    """

    async def reward(prompt: str, response: str, row: dict[str, Any]) -> Any:
        asked = {"prompt": prompt, "response": response, "row": row}
        found = await ask(url, asked, headers, retries)
        if isinstance(found, dict):
            return found["reward"], found.get("numbers", {})
        return found

    return reward


def judge(
    url: str,
    *,
    model: str,
    question: str,
    template: str = GRADING,
    key_variable: str = "OPENAI_API_KEY",
    retries: int = 3,
) -> AsyncReward:
    """Make a reward of 0 to 1: the grade that a language model gives a response, over 10.

    url: of a server with OpenAI's interface, up to and with its /v1. template: has {question},
    {prompt} and {response}. key_variable: the environment variable that holds the server's key.
    """

    async def reward(prompt: str, response: str, row: dict[str, Any]) -> float:
        filled = template.format(question=question, prompt=prompt, response=response)
        key = os.environ.get(key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": filled}],
            "temperature": 0,
            "max_tokens": 16,
        }
        found = await ask(f"{url.rstrip('/')}/chat/completions", asked, headers, retries)
        text = str(found["choices"][0]["message"]["content"])
        grade = re.search(r"-?\d+(\.\d+)?", text)
        if grade is None or not 0 <= float(grade[0]) <= 10:
            raise ValueError(f"the judge gave no grade from 0 to 10 but {text[:60]!r}")
        return float(grade[0]) / 10

    return reward


async def ask(url: str, asked: Any, headers: Mapping[str, str], retries: int) -> Any:
    """Return what a server answers to JSON; raises ValueError, in one sentence, where it fails."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=REQUEST_SECONDS)
    why = ""
    for tries in range(retries + 1):
        if tries:
            await asyncio.sleep(FIRST_PAUSE * 2 ** (tries - 1))
        try:
            answer = await _clients[loop].post(url, json=asked, headers=dict(headers))
        except httpx.TransportError as error:
            why = f"could not be asked ({type(error).__name__}: {error})"
            continue
        if answer.is_success:
            if len(answer.content) > LARGEST_ANSWER:
                raise ValueError(f"{url} answered more than {LARGEST_ANSWER:,} bytes")
            return json.loads(answer.content)
        why = f"answered {answer.status_code} {answer.text[:100]!r}"
        if answer.status_code != 429 and answer.status_code < 500:
            break
    raise ValueError(f"{url} {why}")
