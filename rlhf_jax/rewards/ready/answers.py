"""Rewards for answers that are right, as a library of mathematics decides."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

ANSWER_COLUMNS = ("answer", "solution")  # of the prompt file, in which the right answer may stand


def math_verify(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Give 1 where the response's last answer equals the row's, as formulas, sets or numbers.

    Raises KeyError where the row has neither an `answer` nor a `solution`.
    """
    column = next((name for name in ANSWER_COLUMNS if name in row), None)
    if column is None:
        raise KeyError(f"the row has no {' or '.join(ANSWER_COLUMNS)}")
    return float(verify(parse(f"${row[column]}$"), parse(response)))
