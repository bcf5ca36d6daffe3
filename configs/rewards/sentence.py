"""Two rewards for one sentence about a thing: it names the thing, and it is complete."""

from __future__ import annotations

import re

END = re.compile(r"[.!?][\"'”’)]*\s*$")


def named(prompt: str, response: str, row: dict) -> float:
    """1 if the response contains row["noun"] as a word, singular or plural; else 0."""
    del prompt
    noun = re.escape(row["noun"])
    return float(re.search(rf"\b{noun}(e?s)?\b", response, re.IGNORECASE) is not None)


def ended(prompt: str, response: str, row: dict) -> float:
    """1 if the response ends with the end of a sentence; 0 if it was cut off."""
    del prompt, row
    return float(END.search(response) is not None)
