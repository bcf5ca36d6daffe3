"""Two measures of sentiment from independent lexicons, both in [0, 1] with 0.5 as neutral.

`vader` is the reward; `textblob_polarity` is never trained on and shows whether the text really
became kinder. A word list is easy to hack ("love love love!!!" scores 0.98), so `vader` scores only
the first sentence, in lower case, without closing punctuation and with each word counted once. The
packages are vaderSentiment and textblob (no corpora are downloaded).
"""

from __future__ import annotations

import functools
import re

try:
    from textblob.en import polarity
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ModuleNotFoundError as error:
    needs = f"{error.name} is missing; to have it: pip install 'rlhf_jax[quickstart]'"
    raise ModuleNotFoundError(needs) from None

ENOUGH = 0.8


def vader(prompt: str, response: str, row: dict) -> float:
    """VADER's score (Hutto and Gilbert 2014) of the first sentence, (compound + 1) / 2, or 0."""
    del prompt, row
    sentence = first_sentence(response)
    return (_vader().polarity_scores(sentence)["compound"] + 1) / 2 if sentence else 0.0


def kind(prompt: str, response: str, row: dict) -> float:
    """`vader` up to ENOUGH, divided by it: more sentiment than ENOUGH earns nothing."""
    return min(vader(prompt, response, row), ENOUGH) / ENOUGH


def textblob_polarity(prompt: str, response: str, row: dict) -> float:
    """TextBlob's polarity (pattern lexicon) of the response, (polarity + 1) / 2; 0 if empty."""
    del prompt, row
    return (polarity(response) + 1) / 2 if response.strip() else 0.0


def first_sentence(text: str) -> str:
    """The lower-case text up to its first sentence end or line break, without repeated words."""
    words = re.split(r"[.!?]+(?:\s|$)|\n", text.strip().lower(), maxsplit=1)[0].split()
    bare = [re.sub(r"\W", "", word) for word in words]
    return " ".join(word for place, word in enumerate(words) if bare[place] not in bare[:place])


@functools.cache
def _vader():
    return SentimentIntensityAnalyzer()
