"""Measure the diversity of answers, to detect a policy that gives one text to all prompts."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence

START_WORDS = 3
OWN_WORDS = 2  # that a form ends with
BLANK = "…"  # replaces words of the prompt


def distinct_pairs(texts: Sequence[str]) -> float:
    """Compute distinct-2: different pairs of neighbouring words over all pairs (Li et al. 2016).

    It is 1 if there is no pair.
    """
    pairs = [pair for text in texts for pair in itertools.pairwise(_words(text))]
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def commonest_start(texts: Sequence[str]) -> tuple[str, float]:
    """Return the commonest first three words of texts, and the share of texts with them."""
    starts = collections.Counter(" ".join(_words(text)[:START_WORDS]) for text in texts)
    start, count = starts.most_common(1)[0]
    return start, count / len(texts)


def commonest_form(answers: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """Return the commonest form of answers to prompts, as pairs of both, and its share.

    A form ends with the second word that is not in the prompt; words of the prompt are blank.
    Answers with fewer such words have none.
    """
    forms = collections.Counter(_form(prompt, text) for prompt, text in answers)
    del forms[""]
    if not forms:
        return "", 0.0
    form, count = forms.most_common(1)[0]
    return form, count / len(answers)


def _form(prompt: str, text: str) -> str:
    known = {*_words(prompt)}
    form = []
    own = 0
    for word in _words(text):
        if word not in known:
            own += 1
            form.append(word)
        elif form[-1:] != [BLANK]:
            form.append(BLANK)
        if own == OWN_WORDS:
            return " ".join(form)
    return ""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
