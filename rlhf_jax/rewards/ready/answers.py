"""Rewards for correct answers, as decided by a library of mathematics."""

from __future__ import annotations

import threading
from typing import Any

from math_verify import parse, verify

LIBRARY_SECONDS = 5  # for the library to parse, or to compare
ANSWER_COLUMNS = ("answer", "solution")  # columns that may hold the correct answer


def math_verify(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response's last answer equals the row's, as formulas, sets or numbers.

    Raises KeyError if the row has neither an `answer` nor a `solution`.
    """
    column = next((name for name in ANSWER_COLUMNS if name in row), None)
    if column is None:
        raise KeyError(f"the row has no {' or '.join(ANSWER_COLUMNS)}")
    # The library's own time limits are signals, which only the main thread may set: elsewhere the
    # limit of the reward's call is the only one.
    in_main = threading.current_thread() is threading.main_thread()
    limit = LIBRARY_SECONDS if in_main else None
    right = parse(f"${row[column]}$", parsing_timeout=limit)  # pyright: ignore[reportArgumentType]
    given = parse(response, parsing_timeout=limit)  # pyright: ignore[reportArgumentType]
    return float(verify(right, given, timeout_seconds=limit))
