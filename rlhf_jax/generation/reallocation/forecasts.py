"""Forecast a response's length from others to its prompt: earlier ones, and siblings that ended.

Responses to one prompt are alike in length. How much alike is learned from those that ended and
those that were cut off, for each source by itself: a normal law of log lengths, and then how the
chances that it gave came true. Until a source has proved itself it says nothing, and the
distribution of all responses holds.
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

BY_EARLIER = "earlier"  # Responses to the prompt in stages before.
BY_SIBLINGS = "siblings"  # Those that have ended in the same stage.
ALL_SOURCES = (BY_EARLIER, BY_SIBLINGS)

# Responses that a source must have been tried on before it is used; by hand.
_FEW_TRIED = 32.0
# Responses of a stage that a source is tried on, at most; by hand, for the time that it takes.
_MOST_TRIED = 512
# Shares of a prompt's samples after whose end the siblings are tried on the others; by hand.
_TRIED_AT = (0.25, 0.5, 0.75)
# The central intervals of a forecast whose coverage is measured.
_INTERVALS = (0.5, 0.9)
# Share of stages after which a source may be worth something else than before; by hand.
_CHANGES = 0.1
# Parts of a forecast, equally likely if it is right, in which responses are counted.
_PARTS = 20
_PART_EDGES = np.linspace(0, 1, _PARTS + 1)
# Responses that a source is taken to have forecast rightly to begin with; by hand.
_RIGHT_AT_FIRST = 40.0


class Belief(NamedTuple):
    """Say how true a source is."""

    spread: float  # standard deviation of a log length around one response
    strays: float  # share of responses of which the source says nothing

    def width(self, count: np.ndarray) -> np.ndarray:
        """Return the standard deviation [n] of log lengths around the mean of `count` [n].

        A response and each that is referred to are as far from what the prompt is like.
        """
        return self.spread * np.sqrt((1 + 1 / count) / 2)


_BELIEFS = [
    Belief(float(spread), strays)
    for spread in np.geomspace(0.05, 2.0, 16)
    for strays in (1e-5, 0.01, 0.05, 0.15)
]


class References(NamedTuple):
    """Hold the responses that n forecasts of one source refer to."""

    source: str
    center: np.ndarray  # [n] mean of their log lengths
    count: np.ndarray  # [n] how many they are
    # [n] standard deviations that the prompt's mean is above theirs, as the shortest end first
    lift: np.ndarray
    limit: np.ndarray  # [n] tokens of a response at most, which those referred to had, too
    since: np.ndarray  # [n] tokens that a response has in any case: as many as those that ended


@dataclasses.dataclass(frozen=True)
class LengthForecasts:
    """Hold what is known of lengths: of all responses, and of how well each source has done."""

    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    # [sources, beliefs] log likelihoods of what came, [sources] of how many responses
    likelihood: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((len(ALL_SOURCES), len(_BELIEFS)))
    )
    tried: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(ALL_SOURCES)))
    # [sources, parts] responses that fell into each part of their forecasts
    parts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((len(ALL_SOURCES), _PARTS))
    )

    def belief(self, source: str) -> Belief | None:
        """Return the likeliest belief in a source; None where it was tried on few responses."""
        at = ALL_SOURCES.index(source)
        enough = self.tried[at] >= _FEW_TRIED
        return _BELIEFS[int(self.likelihood[at].argmax())] if enough else None


class PromptLengths(NamedTuple):
    """Hold the lengths of a prompt's samples at the end of a stage, and before it."""

    earlier: np.ndarray  # [E] tokens of responses in stages before
    tokens: np.ndarray  # [G] of the samples
    finished: np.ndarray  # [G] bool, not cut off at the limit
    limit: float  # tokens of a response at most


class _Tried(NamedTuple):
    """Hold what became of n forecasts."""

    references: References
    tokens: np.ndarray  # [n] that the sample had in the end
    finished: np.ndarray  # [n] bool


def earlier_references(lengths: Sequence[np.ndarray], limit: Sequence[float]) -> References:
    """Return what n samples refer to whose prompts had responses of these lengths before."""
    center = np.array([np.log(np.maximum(one, 1)).mean() for one in lengths])
    count = np.array([len(one) for one in lengths])
    none = np.zeros(len(count))
    return References(BY_EARLIER, center, count, lift=none, limit=np.array(limit), since=none)


def sibling_references(
    ended: Sequence[np.ndarray], size: Sequence[int], limit: Sequence[float]
) -> References:
    """Return what n samples refer to of whose `size` [n] siblings those of these lengths ended."""
    center = np.array([np.log(np.maximum(one, 1)).mean() for one in ended])
    count = np.array([len(one) for one in ended])
    lift = [_lift(len(one), of) for one, of in zip(ended, size, strict=True)]
    since = np.array([one.max() for one in ended])
    return References(BY_SIBLINGS, center, count, np.array(lift), np.array(limit), since)


@functools.cache
def _lift(ended: int, size: int) -> float:
    """Return by how much the mean of normal draws exceeds that of the least of them (Blom 1958)."""
    places = [(rank - 0.375) / (size + 0.25) for rank in range(1, ended + 1)]
    return -statistics.fmean(statistics.NormalDist().inv_cdf(place) for place in places)


def joined(several: Sequence[References]) -> References:
    """Return references of one source as one."""
    _, *parts = zip(*several, strict=True)
    return References(several[0].source, *map(np.concatenate, parts))


def survival(known: LengthForecasts, references: References) -> np.ndarray:
    """Return [n, bins + 1] chances that a response is longer than each of `length_model.EDGES`.

    The source must be believed in. The distribution of all responses is weighed by how near each
    length is to the mean of those referred to.
    """
    belief = known.belief(references.source)
    assert belief is not None, "A source that has not proved itself says nothing."
    curves = _survival(length_model.survival(known.lengths), references, belief)
    counts = known.parts[ALL_SOURCES.index(references.source)] + _RIGHT_AT_FIRST / _PARTS
    came_true = np.append(0.0, counts.cumsum() / counts.sum())
    return 1 - np.interp(1 - curves, _PART_EDGES, came_true)


def _survival(common: np.ndarray, references: References, belief: Belief) -> np.ndarray:
    """Return `survival` under a belief alone. common [bins + 1]: that of all responses."""
    near = _near(common, references, belief)
    curves = (1 - belief.strays) * near + belief.strays * _everyone_within(common)
    reached = length_model.chance(curves, references.since)
    return np.minimum(curves / np.maximum(reached, 1e-12)[:, None], 1.0)


def _everyone_within(common: np.ndarray) -> np.ndarray:
    """Return [bins + 1] chances of all responses, none of which is beyond the last edge."""
    return (common - common[-1]) / (common[0] - common[-1])


def _near(common: np.ndarray, references: References, belief: Belief) -> np.ndarray:
    """Return [n, bins + 1] chances to be longer than each edge, were there no strays."""
    mass = common[:-1] - common[1:]
    width = belief.width(references.count)
    center = references.center + belief.spread / math.sqrt(2) * references.lift
    # Whatever would have been longer than the limit looks like the limit, there as here.
    near = np.minimum(length_model.LOG_MIDDLE, np.log(references.limit)[:, None])
    logs = -0.5 * ((near - center[:, None]) / width[:, None]) ** 2
    logs += np.log(mass + 1e-300)
    near = np.exp(logs - logs.max(axis=1, keepdims=True))
    ends = near[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([ends, np.zeros((len(ends), 1))], axis=1) / ends[:, :1]


def _likelihoods(common: np.ndarray, tried: _Tried) -> np.ndarray:
    """Return the log likelihood [beliefs] of what came, under each belief alone."""
    references = tried.references
    everyone = _everyone_within(common)[None]
    first = np.zeros(len(tried.tokens), int)
    found = []
    for _, alike in itertools.groupby(_BELIEFS, key=lambda belief: belief.spread):
        beliefs = list(alike)
        near = _near(common, references, beliefs[0])
        # Chances are asked for at three lengths alone, for strays of any share.
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
            found.append(np.log(np.maximum(np.minimum(low / since, 1.0) - after, 1e-12)).sum())
    return np.array(found)


def narrowest(known: LengthForecasts, both: Sequence[References]) -> References | None:
    """Return which references to one prompt make the narrowest forecast; None without belief."""
    widths = []
    for references in both:
        belief = known.belief(references.source)
        widths.append(math.inf if belief is None else float(belief.width(references.count)[0]))
    at = int(np.argmin(widths)) if widths else 0
    return both[at] if widths and math.isfinite(widths[at]) else None


def after_stage(
    known: LengthForecasts, prompts: Sequence[PromptLengths], kept: float
) -> LengthForecasts:
    """Return what is known after a stage; what was known before weighs `kept`."""
    everyone = _everyone(prompts)
    lengths = length_model.faded(known.lengths, kept)
    lengths = length_model.observe(lengths, everyone.tokens, everyone.finished)
    # Any belief may have taken the place of another since: so what many responses said in stages
    # before is soon outdone (fixed share; Herbster and Warmuth 1998).
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
    """Return between which chances [n], [n] responses ended; cut off ones before certainty."""
    low = 1 - length_model.chance(curves, tried.tokens - tried.finished)
    high = 1 - length_model.chance(curves, tried.tokens)
    return low, np.where(tried.finished, high, 1.0)


def _inside(low: np.ndarray, high: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return [n, k] chances that responses, anywhere between low and high, are between edges."""
    part = np.diff(np.clip(edges, low[:, None], high[:, None]), axis=1)
    return part / np.maximum(high - low, 1e-12)[:, None]


def coverage(known: LengthForecasts, prompts: Sequence[PromptLengths]) -> dict[str, float]:
    """Return, by metric, the share of responses in the 50 and 90 % intervals of their forecasts.

    They are those of what was known before the stage, of a source each, and of the distribution of
    all responses. Of a response that was cut off the chance counts that it was to end in there.
    """
    found = {}
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
            found[f"lengths/{name}_within_{round(100 * inside)}"] = share
    return found


def _everyone(prompts: Sequence[PromptLengths]) -> _Tried:
    """Return forecasts of no source, made when samples begin."""
    tokens = np.concatenate([prompt.tokens for prompt in prompts])
    finished = np.concatenate([prompt.finished for prompt in prompts])
    none = np.zeros(len(tokens))
    return _Tried(References("all", *[none] * 5), tokens, finished)


def _tried(prompts: Sequence[PromptLengths]) -> list[_Tried]:
    """Return what became of forecasts, by source: each on some of the responses of a stage."""
    found = []
    rows = [
        (prompt.earlier, prompt.tokens[one], prompt.finished[one], prompt.limit)
        for prompt in prompts
        if len(prompt.earlier)
        for one in range(len(prompt.tokens))
    ]
    if rows:
        earlier, tokens, finished, limit = zip(*_some(rows), strict=True)
        references = earlier_references(earlier, limit)
        found.append(_Tried(references, np.array(tokens), np.array(finished)))
    siblings = [one for prompt in prompts for one in _siblings(prompt)]
    if siblings:
        ended, size, limit, tokens, finished = zip(*_some(siblings), strict=True)
        references = sibling_references(ended, size, limit)
        found.append(_Tried(references, np.array(tokens), np.array(finished)))
    return found


def _siblings(prompt: PromptLengths) -> list[tuple[np.ndarray, int, float, float, bool]]:
    """Return forecasts by siblings, each when a share of a prompt's samples had just ended.

    It is the lengths of these, how many samples there are, their limit, the tokens that the sample
    had in the end, and whether it was not cut off.
    """
    size = len(prompt.tokens)
    order = np.lexsort((~prompt.finished, prompt.tokens))
    tokens = prompt.tokens[order]
    finished = prompt.finished[order]
    found = []
    for count in sorted({math.ceil(share * size) for share in _TRIED_AT}):
        if count < size and finished[:count].all():
            found += [
                (tokens[:count], size, prompt.limit, tokens[one], bool(finished[one]))
                for one in range(count, size)
                if tokens[one] > tokens[count - 1]
            ]
    return found


def _some(rows: list[Any]) -> list[Any]:
    """Return at most `_MOST_TRIED` of rows, evenly among them."""
    places = np.unique(np.linspace(0, len(rows) - 1, _MOST_TRIED).astype(int))
    return [rows[place] for place in places.tolist()]


def state(known: LengthForecasts) -> dict[str, Any]:
    """Return what a checkpoint keeps."""
    names = ("likelihood", "tried", "parts")
    return length_model.state(known.lengths) | {name: getattr(known, name).copy() for name in names}


def restore(saved: Mapping[str, Any]) -> LengthForecasts:
    """Return what `state` saved; sources begin anew where they were of other beliefs."""
    lengths = length_model.restore(saved)
    likelihood = np.array(saved.get("likelihood", ()), float)
    if likelihood.shape != (len(ALL_SOURCES), len(_BELIEFS)):
        return LengthForecasts(lengths)
    counts = (np.array(saved[name], float) for name in ("tried", "parts"))
    return LengthForecasts(lengths, likelihood, *counts)
