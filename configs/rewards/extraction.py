"""Rewards of a sentence's facts as a JSON object; a row has the `answer` and the `sentence`.

A value is correct if its text is correct, so 34 and "34" are equal. If the sentence lacks a value,
the answer has None for it; null, an empty text or a missing key are then correct.
"""

from __future__ import annotations

import json
import re
from typing import Any


def values(prompt: str, response: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return the share of correct values in the response's first JSON object.

    The extra number is the same share, by the kind of the row.
    """
    del prompt
    found, _ = first_object(response)
    right = [_text(found.get(key)) == _text(value) for key, value in row["answer"].items()]
    share = sum(right) / len(right)
    return share, {row["kind"]: share}


def only_json(prompt: str, response: str, row: dict) -> float:
    """Return 1 if the response is one JSON object and nothing else, else 0."""
    del prompt, row
    found, rest = first_object(response)
    return float(bool(found) and not rest)


def exact(prompt: str, response: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return 1 if the response is exactly the requested object and nothing else.

    The extra number is the same, by the kind of the row, for kinds with the keys of training.
    """
    found, rest = first_object(response)
    right, _ = values(prompt, response, row)
    whole = float(right == 1 and not rest and found.keys() <= row["answer"].keys())
    return whole, {row["kind"]: whole} if row["kind"].endswith("_form") else {}


def from_sentence(prompt: str, response: str, row: dict) -> float:
    """Return the share of the words of the object's values that are in the sentence."""
    del prompt
    found, _ = first_object(response)
    written = [word for value in found.values() for word in _words(_text(value))]
    known = _words(row["sentence"])
    return sum(word in known for word in written) / len(written) if written else 0.0


def first_object(text: str) -> tuple[dict[str, Any], str]:
    """Return the first JSON object of a text, empty without one, and the text around it."""
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
