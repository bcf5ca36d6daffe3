"""Two rewards of one sentence about a thing: does it name the thing, and does it end?"""

from __future__ import annotations

import re

END = re.compile(r"[.!?][\"'”’)]*\s*$")


def named(prompt: str, response: str, row: dict) -> float:
    """1 where the response has row["noun"] as a word, its plural included; else 0."""
    del prompt
    noun = re.escape(row["noun"])
    return float(re.search(rf"\b{noun}(e?s)?\b", response, re.IGNORECASE) is not None)


def ended(prompt: str, response: str, row: dict) -> float:
    """1 where the response ends with the end of a sentence; 0 where it was cut off."""
    del prompt, row
    return float(END.search(response) is not None)
