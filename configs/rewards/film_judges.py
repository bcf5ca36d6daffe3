"""Two judges of sentences about films, which no model of the workflow learns from.

    pip install 'rlhf_jax[workflow]'

`judge` is a logistic regression of TF-IDF words on whole reviews and on sentences that no other
part of the workflow reads; `vader` is a dictionary of sentiment (Hutto and Gilbert 2014), which
agrees with people on two of three sentences. Both give the chance that a sentence is positive.
"""

from __future__ import annotations

import functools
from typing import Any

from rlhf_jax.runtime.extensions import load_named

REVIEWS = 5_000  # whole reviews that the judge learns from
FEATURES = 1 << 18


@functools.cache
def fitted() -> Any:
    """Fit the judge; it takes seconds."""
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    parts, reviews, shuffled = (
        load_named(f"configs/data/film_reviews.py:{name}", "The judge's data")
        for name in ("parts", "reviews", "shuffled")
    )
    known = [*parts().others, *shuffled(reviews("imdb"), 0)[:REVIEWS]]
    model = make_pipeline(
        HashingVectorizer(n_features=FEATURES, ngram_range=(1, 2), alternate_sign=False),
        TfidfTransformer(sublinear_tf=True),
        LogisticRegression(C=3.0, max_iter=200),
    )
    return model.fit([one.text for one in known], [one.positive for one in known])


def judge(completions: list[str], **_: Any) -> list[float]:
    """Return how likely each sentence praises its film, by words alone."""
    return fitted().predict_proba(completions)[:, 1].tolist()


@functools.cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def vader(completions: list[str], **_: Any) -> list[float]:
    """Return the sentiment of each sentence by a dictionary, from 0 to 1."""
    return [0.5 + _vader().polarity_scores(text)["compound"] / 2 for text in completions]
