"""The law of response lengths, and what it says of a sample that has come so far: a law too, not a point.

Lengths are counted in bins. A response that was cut off at its limit says only that it would have been longer: the law
is one of hazards (Kaplan and Meier's), the chance to end in a bin for those that reach it. Where nothing was seen a
weak prior rules, by which what has come far goes far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

QUANTILES = 8
EDGES = np.unique(np.concatenate([np.arange(16), np.round(np.geomspace(16, 131_072, 150))]))  # of bins, tokens
BINS = len(EDGES) - 1
PRIOR = 1.0  # responses that the prior is worth, in each bin
TYPICAL = 256.0  # tokens after which half have ended, by the prior
SPREAD = 0.5  # of the logarithm of a length, between roll-outs of one prompt
STRAY = 1e-4  # of the evidence: earlier roll-outs that say nothing

_CHANCES = (np.arange(QUANTILES) + 0.5) / QUANTILES
_PRIOR_HAZARD = 1 - (EDGES[:-1] + TYPICAL) / (EDGES[1:] + TYPICAL)
_LOG_MIDDLE = np.log((EDGES[:-1] + EDGES[1:]) / 2)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Responses counted by bin."""

    ended: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS))
    cut: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS))  # off at their limit


def observe(law: Lengths, lengths: np.ndarray, finished: np.ndarray) -> Lengths:
    """The law after responses of lengths [n]; those not finished [n] were cut off there."""
    bins = np.clip(np.searchsorted(EDGES, lengths, side="left") - 1, 0, BINS - 1)
    ended, cut = (np.bincount(bins[which], minlength=BINS) for which in (finished, ~finished))
    return Lengths(law.ended + ended, law.cut + cut)


def faded(law: Lengths, kept: float) -> Lengths:
    """The law once the policy has moved: what was seen weighs `kept`."""
    return Lengths(kept * law.ended, kept * law.cut)


def survival(law: Lengths) -> np.ndarray:
    """[BINS + 1] chance that a response is longer than each edge."""
    reached = (law.ended + law.cut)[::-1].cumsum()[::-1] - law.cut / 2  # cut somewhere in the bin
    hazard = (law.ended + PRIOR * _PRIOR_HAZARD) / (reached + PRIOR)
    return np.concatenate([[1.0], np.cumprod(1 - np.minimum(hazard, 1.0))])


def remaining(
    law: Lengths, generated: np.ndarray, limit: np.ndarray, earlier: Sequence[Sequence[int] | np.ndarray]
) -> np.ndarray:
    """[n, QUANTILES] tokens to come at equally likely quantiles, ascending, at least 1 where the limit lets them.

    generated, limit [n]: tokens of each response so far, and at most; earlier: lengths of earlier responses to the
    same prompt, for each sample (empty where there are none), which sharpen the law.
    """
    known = np.flatnonzero([len(each) > 0 for each in earlier])
    curves = np.broadcast_to(survival(law), (1, BINS + 1))
    ends = _common(curves[0], generated)
    if len(known):
        ends[known] = conditional(believed(law, [earlier[one] for one in known.tolist()]), generated[known])
    return np.clip(ends - generated[:, None], 1, np.maximum(limit - generated, 1)[:, None])


def believed(law: Lengths, earlier: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """[n, BINS + 1] survival of samples with earlier roll-outs: the law, weighed by how near these were."""
    common = survival(law)
    mass = common[:-1] - common[1:]
    count = np.array([len(each) for each in earlier])
    values = np.log(np.maximum(np.concatenate([np.asarray(each, float) for each in earlier]), 1))
    near = np.exp(-0.5 * ((_LOG_MIDDLE - values[:, None]) / SPREAD) ** 2)
    weight = np.add.reduceat(near, np.cumsum(count) - count, axis=0) / count[:, None] + STRAY
    ends = (mass * weight)[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([ends, np.zeros((len(ends), 1))], axis=1) / ends[:, :1]


def conditional(curves: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """[n, QUANTILES] lengths at the end of samples with survival curves [n, BINS + 1] that have come so far."""
    rows = np.arange(len(curves))
    at = np.clip(np.searchsorted(EDGES, generated, side="right") - 1, 0, BINS - 1)
    part = np.clip((generated - EDGES[at]) / (EDGES[at + 1] - EDGES[at]), 0, 1)
    alive = curves[rows, at] * (1 - part) + curves[rows, at + 1] * part
    wanted = alive[:, None] * (1 - _CHANCES)
    # One ascending array for all rows, so that one search serves.
    flat = (-curves + 2.0 * rows[:, None]).ravel()
    low = np.searchsorted(flat, -wanted + 2.0 * rows[:, None], side="right") - 1 - rows[:, None] * (BINS + 1)
    low = np.clip(low, 0, BINS - 1)
    above, below = curves[rows[:, None], low], curves[rows[:, None], low + 1]
    share = np.where(above > below, (above - wanted) / np.maximum(above - below, 1e-300), 0.0)
    return EDGES[low] + np.clip(share, 0, 1) * (EDGES[low + 1] - EDGES[low])


def _common(curve: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """[n, QUANTILES] lengths at the end, for samples of one law: between those of the bin's two edges."""
    table = conditional(np.broadcast_to(curve, (BINS, BINS + 1)), EDGES[:-1])
    at = np.clip(np.searchsorted(EDGES, generated, side="right") - 1, 0, BINS - 2)
    part = np.clip((generated - EDGES[at]) / (EDGES[at + 1] - EDGES[at]), 0, 1)[:, None]
    return table[at] * (1 - part) + table[at + 1] * part


def state(law: Lengths) -> dict[str, Any]:
    """The law for a checkpoint."""
    return {"ended": law.ended.copy(), "cut": law.cut.copy()}


def restore(saved: Mapping[str, Any]) -> Lengths:
    """The law that `state` saved."""
    return Lengths(np.array(saved["ended"], float), np.array(saved["cut"], float))
