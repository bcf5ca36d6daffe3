"""Rewards of a sentence's facts as a JSON object; a row has the `answer` and the `sentence`.

A value counts as right where its text is, so 34 and "34" are alike. Where the sentence does not
tell a value, the answer has None for it: right is null, an empty text, or no such key.
"""

from __future__ import annotations

import json
import re
from typing import Any


def values(prompt: str, response: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return the share of the values asked for that the response's first JSON object has right.

    Beside it stands the same by the kind of the row.
    """
    del prompt
    found, _ = first_object(response)
    right = [_text(found.get(key)) == _text(value) for key, value in row["answer"].items()]
    share = sum(right) / len(right)
    return share, {row["kind"]: share}


def only_json(prompt: str, response: str, row: dict) -> float:
    """Return 1 where the response is one JSON object and nothing else, else 0."""
    del prompt, row
    found, rest = first_object(response)
    return float(bool(found) and not rest)


def exact(prompt: str, response: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return 1 where the response is the object asked for and nothing else, to the last value.

    Beside it stands the same by the kind of the row, of those that are like what is trained on.
    """
    found, rest = first_object(response)
    right, _ = values(prompt, response, row)
    whole = float(right == 1 and not rest and found.keys() <= row["answer"].keys())
    return whole, {row["kind"]: whole} if row["kind"].endswith("_form") else {}


def from_sentence(prompt: str, response: str, row: dict) -> float:
    """Return the share of the words of the object's values that the sentence has, too."""
    del prompt
    found, _ = first_object(response)
    written = [word for value in found.values() for word in _words(_text(value))]
    known = _words(row["sentence"])
    return sum(word in known for word in written) / len(written) if written else 0.0


def first_object(text: str) -> tuple[dict[str, Any], str]:
    """Return the first JSON object of a text, empty without one, and what stands around it."""
    start = text.find("{")
    try:
        found, end = json.JSONDecoder().raw_decode(text, max(start, 0))
    except (ValueError, RecursionError):
        return {}, text
    around = text[:start] + text[end:]
    return (found, around.strip()) if isinstance(found, dict) else ({}, text)


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)
