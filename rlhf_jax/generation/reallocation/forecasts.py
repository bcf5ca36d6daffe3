"""Forecast a response's length from others to its prompt: earlier ones, and ended siblings.

Responses to one prompt have similar lengths. The similarity is learned from ended and cut off
responses, for each source separately: a normal distribution of log lengths, and the calibration of
its forecasts. A source is used only once it has proved itself; until then the distribution of all
responses applies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.generation.reallocation import length_model
from rlhf_jax.generation.reallocation.length_model import Lengths

BY_EARLIER = "earlier"  # Responses to the prompt in earlier stages.
BY_SIBLINGS = "siblings"  # Those that have ended in the same stage.
ALL_SOURCES = (BY_EARLIER, BY_SIBLINGS)

# Responses on which a source is tested before it is used; by hand.
_FEW_TRIED = 32.0
# Most responses of a stage on which a source is tested; by hand, limits the time.
_MOST_TRIED = 512
# Shares of a prompt's samples after whose end the siblings are tested on the others; by hand.
_TRIED_AT = (0.25, 0.5, 0.75)
# The central intervals of a forecast whose coverage is measured.
_INTERVALS = (0.5, 0.9)
# Share of stages after which the value of a source may change; by hand.
_CHANGES = 0.1
# Bins of a forecast, equally likely if it is right, in which responses are counted.
_PARTS = 20
_PART_EDGES = np.linspace(0, 1, _PARTS + 1)
# Initial count of correctly forecast responses of a source; by hand.
_RIGHT_AT_FIRST = 40.0


class Belief(NamedTuple):
    """Hold the parameters of a source's accuracy."""

    spread: float  # standard deviation of a log length around one response
    strays: float  # share of responses that are unrelated to the source

    def width(self, count: np.ndarray) -> np.ndarray:
        """Return the standard deviation [n] of log lengths around the mean of `count` [n].

        A response and each reference deviate equally from the prompt's centre.
        """
        return self.spread * np.sqrt((1 + 1 / count) / 2)


_BELIEFS = [
    Belief(float(spread), strays)
    for spread in np.geomspace(0.05, 2.0, 16)
    for strays in (1e-5, 0.01, 0.05, 0.15)
]


class References(NamedTuple):
    """Hold the references of n forecasts of one source."""

    source: str
    center: np.ndarray  # [n] mean of their log lengths
    count: np.ndarray  # [n] their number
    # [n] standard deviations of the prompt's mean above theirs, as the shortest end first
    lift: np.ndarray
    limit: np.ndarray  # [n] most tokens of a response, also of the references
    since: np.ndarray  # [n] least tokens of a response: as many as those that ended


@dataclasses.dataclass(frozen=True)
class LengthForecasts:
    """Hold the model of lengths: the distribution of all responses, and each source's record."""

    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    # [sources, beliefs] log likelihoods of the outcomes, [sources] the number of responses
    likelihood: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((len(ALL_SOURCES), len(_BELIEFS)))
    )
    tried: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(ALL_SOURCES)))
    # [sources, parts] responses by bin of their forecasts
    parts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((len(ALL_SOURCES), _PARTS))
    )

    def belief(self, source: str) -> Belief | None:
        """Return the likeliest belief in a source; None if it was tested on few responses."""
        at = ALL_SOURCES.index(source)
        enough = self.tried[at] >= _FEW_TRIED
        return _BELIEFS[int(self.likelihood[at].argmax())] if enough else None


class PromptLengths(NamedTuple):
    """Hold the lengths of a prompt's samples at the end of a stage, and of earlier ones."""

    earlier: np.ndarray  # [E] tokens of responses in earlier stages
    tokens: np.ndarray  # [G] of the samples
    finished: np.ndarray  # [G] bool, not cut off at the limit
    limit: float  # most tokens of a response


class _Tried(NamedTuple):
    """Hold the outcomes of n forecasts."""

    references: References
    tokens: np.ndarray  # [n] the final length of the sample
    finished: np.ndarray  # [n] bool


def earlier_references(lengths: Sequence[np.ndarray], limit: Sequence[float]) -> References:
    """Return the references of n samples whose prompts had earlier responses of these lengths."""
    center = np.array([np.log(np.maximum(one, 1)).mean() for one in lengths])
    count = np.array([len(one) for one in lengths])
    none = np.zeros(len(count))
    return References(BY_EARLIER, center, count, lift=none, limit=np.array(limit), since=none)


def sibling_references(
    ended: Sequence[np.ndarray], size: Sequence[int], limit: Sequence[float]
) -> References:
    """Return the references of n samples with `size` [n] siblings, of which these lengths ended."""
    center = np.array([np.log(np.maximum(one, 1)).mean() for one in ended])
    count = np.array([len(one) for one in ended])
    lift = [_lift(len(one), of) for one, of in zip(ended, size, strict=True)]
    since = np.array([one.max() for one in ended])
    return References(BY_SIBLINGS, center, count, np.array(lift), np.array(limit), since)


@functools.cache
def _lift(ended: int, size: int) -> float:
    """Return the expected gap of the mean of normal draws over the least of them (Blom 1958)."""
    places = [(rank - 0.375) / (size + 0.25) for rank in range(1, ended + 1)]
    return -statistics.fmean(statistics.NormalDist().inv_cdf(place) for place in places)


def joined(several: Sequence[References]) -> References:
    """Join references of one source."""
    _, *parts = zip(*several, strict=True)
    return References(several[0].source, *map(np.concatenate, parts))


def survival(known: LengthForecasts, references: References) -> np.ndarray:
    """Return [n, bins + 1] chances that a response is longer than each of `length_model.EDGES`.

    There must be a belief in the source. The distribution of all responses is weighted by the
    distance of each length to the mean of the references.
    """
    belief = known.belief(references.source)
    assert belief is not None, "Only a source with a belief is used."
    curves = _survival(length_model.survival(known.lengths), references, belief)
    counts = known.parts[ALL_SOURCES.index(references.source)] + _RIGHT_AT_FIRST / _PARTS
    came_true = np.append(0.0, counts.cumsum() / counts.sum())
    return 1 - np.interp(1 - curves, _PART_EDGES, came_true)


def _survival(common: np.ndarray, references: References, belief: Belief) -> np.ndarray:
    """Return `survival` under one belief. common [bins + 1]: that of all responses."""
    near = _near(common, references, belief)
    curves = (1 - belief.strays) * near + belief.strays * _everyone_within(common)
    reached = length_model.chance(curves, references.since)
    return np.minimum(curves / np.maximum(reached, 1e-12)[:, None], 1.0)


def _everyone_within(common: np.ndarray) -> np.ndarray:
    """Return [bins + 1] chances of all responses, none of which is beyond the last edge."""
    return (common - common[-1]) / (common[0] - common[-1])


def _near(common: np.ndarray, references: References, belief: Belief) -> np.ndarray:
    """Return [n, bins + 1] chances to be longer than each edge, without strays."""
    mass = common[:-1] - common[1:]
    width = belief.width(references.count)
    center = references.center + belief.spread / math.sqrt(2) * references.lift
    # Anything longer than the limit is indistinguishable from the limit, in both.
    near = np.minimum(length_model.LOG_MIDDLE, np.log(references.limit)[:, None])
    logs = -0.5 * ((near - center[:, None]) / width[:, None]) ** 2
    logs += np.log(mass + 1e-300)
    near = np.exp(logs - logs.max(axis=1, keepdims=True))
    ends = near[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([ends, np.zeros((len(ends), 1))], axis=1) / ends[:, :1]


def _likelihoods(common: np.ndarray, tried: _Tried) -> np.ndarray:
    """Return the log likelihood [beliefs] of the outcomes, under each belief."""
    references = tried.references
    everyone = _everyone_within(common)[None]
    first = np.zeros(len(tried.tokens), int)
    likelihoods = []
    for _, alike in itertools.groupby(_BELIEFS, key=lambda belief: belief.spread):
        beliefs = list(alike)
        near = _near(common, references, beliefs[0])
        # Chances are needed at three lengths only, for any share of strays.
        lengths = (references.since, tried.tokens - tried.finished, tried.tokens)
        both = [
            (length_model.chance(near, at), length_model.chance(everyone, at, first))
            for at in lengths
        ]
        for belief in beliefs:
            since, low, high = (
                (1 - belief.strays) * own + belief.strays * any_of for own, any_of in both
            )
            since = np.maximum(since, 1e-12)
            after = np.where(tried.finished, np.minimum(high / since, 1.0), 0.0)
            likelihoods.append(
                np.log(np.maximum(np.minimum(low / since, 1.0) - after, 1e-12)).sum()
            )
    return np.array(likelihoods)


def narrowest(known: LengthForecasts, both: Sequence[References]) -> References | None:
    """Return the references to one prompt with the narrowest forecast; None without a belief."""
    widths = []
    for references in both:
        belief = known.belief(references.source)
        widths.append(math.inf if belief is None else float(belief.width(references.count)[0]))
    at = int(np.argmin(widths)) if widths else 0
    return both[at] if widths and math.isfinite(widths[at]) else None


def after_stage(
    known: LengthForecasts, prompts: Sequence[PromptLengths], kept: float
) -> LengthForecasts:
    """Return the updated forecasts after a stage; earlier evidence is weighted by `kept`."""
    everyone = _everyone(prompts)
    lengths = length_model.faded(known.lengths, kept)
    lengths = length_model.observe(lengths, everyone.tokens, everyone.finished)
    # Any belief may have replaced another since, so that new evidence soon outweighs many responses
    # of earlier stages (fixed share; Herbster and Warmuth 1998).
    chance = np.exp(known.likelihood - known.likelihood.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    likelihood = np.log((1 - _CHANGES) * chance + _CHANGES / len(_BELIEFS))
    count = kept * known.tried
    parts = kept * known.parts
    common = length_model.survival(lengths)
    for tried in _tried(prompts):
        at = ALL_SOURCES.index(tried.references.source)
        count[at] += len(tried.tokens)
        likelihood[at] += _likelihoods(common, tried)
        likeliest = _BELIEFS[int(likelihood[at].argmax())]
        came = _came(_survival(common, tried.references, likeliest), tried)
        parts[at] += _inside(*came, _PART_EDGES).sum(axis=0)
    return LengthForecasts(lengths, likelihood, count, parts)


def _came(curves: np.ndarray, tried: _Tried) -> tuple[np.ndarray, np.ndarray]:
    """Return the chances [n], [n] between which responses ended; up to 1 for cut off ones."""
    low = 1 - length_model.chance(curves, tried.tokens - tried.finished)
    high = 1 - length_model.chance(curves, tried.tokens)
    return low, np.where(tried.finished, high, 1.0)


def _inside(low: np.ndarray, high: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return [n, k] chances that responses, anywhere between low and high, are between edges."""
    part = np.diff(np.clip(edges, low[:, None], high[:, None]), axis=1)
    return part / np.maximum(high - low, 1e-12)[:, None]


def coverage(known: LengthForecasts, prompts: Sequence[PromptLengths]) -> dict[str, float]:
    """Return, by metric, the share of responses in the 50 and 90 % intervals of their forecasts.

    The forecasts are those from before the stage, by source, and the distribution of all responses.
    A cut off response counts by its chance to end in the interval.
    """
    shares = {}
    everyone = length_model.survival(known.lengths)
    for tried in [_everyone(prompts), *_tried(prompts)]:
        name = tried.references.source
        if name in ALL_SOURCES and known.belief(name) is None:
            continue
        curves = survival(known, tried.references) if name in ALL_SOURCES else everyone[None]
        came = _came(np.broadcast_to(curves, (len(tried.tokens), curves.shape[1])), tried)
        for inside in _INTERVALS:
            edges = np.array([1 - inside, 1 + inside]) / 2
            share = float(_inside(*came, edges).mean())
            shares[f"lengths/{name}_within_{round(100 * inside)}"] = share
    return shares


def _everyone(prompts: Sequence[PromptLengths]) -> _Tried:
    """Return forecasts without a source, made when samples begin."""
    tokens = np.concatenate([prompt.tokens for prompt in prompts])
    finished = np.concatenate([prompt.finished for prompt in prompts])
    none = np.zeros(len(tokens))
    return _Tried(References("all", *[none] * 5), tokens, finished)


def _tried(prompts: Sequence[PromptLengths]) -> list[_Tried]:
    """Return the outcomes of forecasts by source, each for some of the responses of a stage."""
    tried = []
    rows = [
        (prompt.earlier, prompt.tokens[one], prompt.finished[one], prompt.limit)
        for prompt in prompts
        if len(prompt.earlier)
        for one in range(len(prompt.tokens))
    ]
    if rows:
        earlier, tokens, finished, limit = zip(*_some(rows), strict=True)
        references = earlier_references(earlier, limit)
        tried.append(_Tried(references, np.array(tokens), np.array(finished)))
    siblings = [one for prompt in prompts for one in _siblings(prompt)]
    if siblings:
        ended, size, limit, tokens, finished = zip(*_some(siblings), strict=True)
        references = sibling_references(ended, size, limit)
        tried.append(_Tried(references, np.array(tokens), np.array(finished)))
    return tried


def _siblings(prompt: PromptLengths) -> list[tuple[np.ndarray, int, float, float, bool]]:
    """Return forecasts by siblings, each when a share of a prompt's samples had just ended.

    A forecast has the lengths of these, the number of samples, their limit, the sample's final
    length, and whether it was not cut off.
    """
    size = len(prompt.tokens)
    order = np.lexsort((~prompt.finished, prompt.tokens))
    tokens = prompt.tokens[order]
    finished = prompt.finished[order]
    forecasts = []
    for count in sorted({math.ceil(share * size) for share in _TRIED_AT}):
        if count < size and finished[:count].all():
            forecasts += [
                (tokens[:count], size, prompt.limit, tokens[one], bool(finished[one]))
                for one in range(count, size)
                if tokens[one] > tokens[count - 1]
            ]
    return forecasts


def _some(rows: list[Any]) -> list[Any]:
    """Return at most `_MOST_TRIED` of the rows, evenly spaced."""
    places = np.unique(np.linspace(0, len(rows) - 1, _MOST_TRIED).astype(int))
    return [rows[place] for place in places.tolist()]


def state(known: LengthForecasts) -> dict[str, Any]:
    """Return the content of a checkpoint."""
    names = ("likelihood", "tried", "parts")
    return length_model.state(known.lengths) | {name: getattr(known, name).copy() for name in names}


def restore(saved: Mapping[str, Any]) -> LengthForecasts:
    """Restore what `state` saved; sources start fresh if they were of other beliefs."""
    lengths = length_model.restore(saved)
    likelihood = np.array(saved.get("likelihood", ()), float)
    if likelihood.shape != (len(ALL_SOURCES), len(_BELIEFS)):
        return LengthForecasts(lengths)
    counts = (np.array(saved[name], float) for name in ("tried", "parts"))
    return LengthForecasts(lengths, likelihood, *counts)
