"""What a reward may return or raise, and what its numbers may be called, as strategies."""

from __future__ import annotations

import asyncio
import fractions
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from reward_endings import Hidden, Raises, Unprintable

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
ERRORS = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from(
        (
            *(RuntimeError, TimeoutError, OSError, KeyError, MemoryError, OverflowError, EOFError),
            *(asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, BaseException),
            Unprintable,
        )
    ),
    TEXTS,
)
# Numbers by all accounts, though one may lie beyond float32.
NUMBERS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.integers(300, 4000).map(lambda digits: -(10**digits)),
    st.sampled_from([3.4028234663852886e38, 3.4028235677973366e38]),
    st.fractions(),
    st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
        lambda kind: st.floats(width=16).map(kind)
    ),
    st.integers(-(1 << 31), (1 << 31) - 1).map(np.int32),
)
OTHERS = st.one_of(
    st.none(),
    TEXTS,
    st.binary(max_size=4),
    st.complex_numbers(),
    st.decimals(),
    st.builds(Raises, ERRORS),
    st.builds(Hidden),
    st.just(float),
)
NAMES = st.one_of(
    st.lists(
        st.sampled_from(
            (
                *(
                    "_",
                    "_x",
                    "_x0040_",
                    "x0041",
                    "/",
                    "//",
                    ".",
                    "..",
                    "@",
                    "%",
                    " ",
                    ":",
                    "(",
                    "é",
                ),
                *("\n", "\0", "\ud800", "😀", "step", "mean", "failed", "own/", "time", "a", "A"),
            )
        ),
        max_size=6,
    ).map("".join),
    TEXTS,
    st.text("abé_/", min_size=200, max_size=300),
)
WITH_NUMBERS = st.tuples(
    NUMBERS | OTHERS, st.dictionaries(NAMES | st.integers(), NUMBERS | OTHERS, max_size=3)
)
VALUES = st.recursive(
    NUMBERS | OTHERS | WITH_NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["score", "acc", "pred"]), inner, max_size=3),
        st.lists(st.floats(), max_size=3).map(np.array),
    ),
    max_leaves=6,
)


def right(value: Any) -> float | None:
    """The score that a value is; None where it is none."""
    numbers = (bool, int, float, fractions.Fraction, np.floating, np.integer)
    if (
        type(value) is Raises
        or not issubclass(type(value), numbers)
        or value != value
        or value in (math.inf, -math.inf)
    ):
        return None
    largest = 2**128 - 2**104  # of float32: IEEE 754-2019, 3.3
    exact = fractions.Fraction(value.item() if isinstance(value, np.generic) else value)
    return float(exact) if abs(exact) <= largest else None
