"""Rewards for the form of a response."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

THINKING = r"<think>(?!.*<think>).+?</think>.+"


def of_form(pattern: str) -> Callable[[str, str, dict[str, Any]], float]:
    """Make a reward of 1 if the whole response, without surrounding white space, matches a pattern.

    pattern: a regular expression whose `.` matches line ends, too.
    """
    form = re.compile(pattern, re.DOTALL)

    def reward(prompt: str, response: str, row: dict[str, Any]) -> float:
        return float(form.fullmatch(response.strip()) is not None)

    return reward


# of one <think>...</think> and an answer after it
think_format = of_form(THINKING)
