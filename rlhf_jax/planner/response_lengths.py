"""Distributions of response lengths: tables of percentiles, laws, and draws from them."""

from __future__ import annotations

import csv
import math
import pathlib
import statistics
from typing import NamedTuple

import numpy as np

# Percentiles of first turns of ShareGPT chats, the default.
LENGTHS_TABLE = str(pathlib.Path(__file__).with_suffix(".csv"))
LOGNORMAL = "lognormal:"
LOGNORMAL_PROMPT = 200.0  # tokens of a prompt, if lengths follow such a law
SIBLING_CORRELATION = 0.85  # correlation of normal scores of lengths of one prompt


class Percentiles(NamedTuple):
    """Hold the distribution of response lengths, and the mean prompt."""

    percentiles: np.ndarray  # [k] ascending, up to 100
    tokens: np.ndarray  # [k] of a response
    prompt: float  # tokens


def read_percentiles(path: str) -> Percentiles:
    """Read a table of percentiles, or a law lognormal:MEDIAN:SIGMA:MOST of response tokens.

    The table is a CSV file with columns percentile, prompt_tokens, response_tokens, and a row of
    means. Raises ValueError on another file, FileNotFoundError if there is none.
    """
    if path.startswith(LOGNORMAL):
        return _lognormal(path)
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            f"There is no table of lengths {path}; --lengths takes the path of a CSV file, or"
            f" {LOGNORMAL}MEDIAN:SIGMA:MOST."
        )
    with pathlib.Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        prompt = next(float(row["prompt_tokens"]) for row in rows if row["percentile"] == "mean")
        table = [
            (float(row["percentile"]), float(row["response_tokens"]))
            for row in rows
            if row["percentile"] != "mean"
        ]
        percentiles, tokens = np.array(sorted(table)).T
    except (KeyError, StopIteration, ValueError) as error:
        wanted = "columns percentile, prompt_tokens, response_tokens, and a row of means"
        raise ValueError(f"{path} is no table of lengths ({error!r}): {wanted}.") from error
    return Percentiles(percentiles, tokens, prompt)


def _lognormal(law: str) -> Percentiles:
    """Return the percentiles of a law lognormal:MEDIAN:SIGMA:MOST; ValueError for another."""
    try:
        median, sigma, most = map(float, law.removeprefix(LOGNORMAL).split(":"))
        normal = statistics.NormalDist(math.log(median), sigma)
    except ValueError as error:
        raise ValueError(f"{law} is not {LOGNORMAL}MEDIAN:SIGMA:MOST, three numbers.") from error
    percentiles = np.append(np.linspace(0, 100, 20_001)[1:-1], 100.0)
    tokens = [math.exp(normal.inv_cdf(each / 100)) for each in percentiles[:-1]]
    return Percentiles(percentiles, np.minimum([*tokens, most], most), LOGNORMAL_PROMPT)


def draw_lengths(
    known: Percentiles, count: int, luck: np.random.Generator, alike: int = 1
) -> np.ndarray:
    """Draw response tokens [count], linear between percentiles, from 1 below the first.

    None is above the last. Each group of `alike` neighbours is of one prompt, by a normal copula of
    correlation SIBLING_CORRELATION.
    """
    chance = luck.random(count)
    if alike > 1:
        own = luck.normal(0, math.sqrt(1 - SIBLING_CORRELATION), count)
        prompts = luck.normal(0, math.sqrt(SIBLING_CORRELATION), -(-count // alike))
        scores = prompts.repeat(alike)[:count] + own
        chance = np.vectorize(statistics.NormalDist().cdf)(scores)
    drawn = np.interp(100 * chance, [0, *known.percentiles], [1, *known.tokens])
    return np.maximum(np.round(drawn), 1)
