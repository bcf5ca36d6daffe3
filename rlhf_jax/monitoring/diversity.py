"""Measure how much answers differ: a policy that gives one text to all has lost the rest."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence

START_WORDS = 3


def distinct_pairs(texts: Sequence[str]) -> float:
    """Compute distinct-2: different pairs of neighbouring words over all pairs (Li et al. 2016).

    It is 1 where there is no pair.
    """
    pairs = [pair for text in texts for pair in itertools.pairwise(_words(text))]
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def commonest_start(texts: Sequence[str]) -> tuple[str, float]:
    """Return the first three words that most texts begin with, and the share that does."""
    starts = collections.Counter(" ".join(_words(text)[:START_WORDS]) for text in texts)
    start, count = starts.most_common(1)[0]
    return start, count / len(texts)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
