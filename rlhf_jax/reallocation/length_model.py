"""The law of response lengths, and what it says of a sample that has come so far: a law too, not a
point.

Lengths are counted in bins. A response that was cut off at its limit says only that it would have
been longer: the law is one of hazards (Kaplan and Meier's), the chance to end in a bin for those
that reach it. Where nothing was seen a weak prior rules, by which what has come far goes far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# of the outcomes that stand for a law, ascending
SHARES = np.array([0.25, 0.25, 0.2, 0.15, 0.1, 0.04, 0.008, 0.002])
CHANCES = SHARES.cumsum() - SHARES / 2  # to end before each
# of bins, tokens
EDGES = np.unique(np.concatenate([np.arange(16), np.round(np.geomspace(16, 131_072, 150))]))
BINS = len(EDGES) - 1
PRIOR = 1.0  # responses that the prior is worth, in each bin
TYPICAL = 256.0  # tokens after which half have ended, by the prior
SPREAD = 0.5  # of the logarithm of a length, between roll-outs of one prompt
STRAY = 1e-4  # of the evidence: earlier roll-outs that say nothing

_PRIOR_HAZARD = 1 - (EDGES[:-1] + TYPICAL) / (EDGES[1:] + TYPICAL)
_WIDTHS = np.diff(EDGES)
_LOG_MIDDLE = np.log((EDGES[:-1] + EDGES[1:]) / 2)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Responses counted by bin."""

    ended: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS))
    # off at their limit
    cut: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS))


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


def believed(law: Lengths, earlier: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """[n, BINS + 1] survival of samples with earlier roll-outs: the law, weighed by how near these
    were.
    """
    common = survival(law)
    mass = common[:-1] - common[1:]
    count = np.array([len(each) for each in earlier])
    values = np.log(np.maximum(np.concatenate([np.asarray(each, float) for each in earlier]), 1))
    near = np.exp(-0.5 * ((_LOG_MIDDLE - values[:, None]) / SPREAD) ** 2)
    weight = np.add.reduceat(near, np.cumsum(count) - count, axis=0) / count[:, None] + STRAY
    ends = (mass * weight)[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.concatenate([ends, np.zeros((len(ends), 1))], axis=1) / ends[:, :1]


def remaining(
    curves: np.ndarray, which: np.ndarray, generated: np.ndarray, limit: np.ndarray | float
) -> np.ndarray:
    """[n, Q] tokens to come in outcomes of `SHARES`, ascending, at least 1 where the limit lets
    them.

    curves [k, BINS + 1]: survival, and which [n] of them holds for each sample; generated, limit
    [n]: tokens of each response so far, and at most.
    """
    at = np.clip(np.searchsorted(EDGES, generated, side="right") - 1, 0, BINS - 1)
    part = np.clip((generated - EDGES[at]) / (EDGES[at + 1] - EDGES[at]), 0, 1)
    alive = curves[which, at] * (1 - part) + curves[which, at + 1] * part
    # One ascending array for all curves, so that one search serves.
    flat = (2.0 * np.arange(len(curves))[:, None] - curves).ravel()
    own = which[:, None]
    wanted = 2.0 * own - alive[:, None] * (1 - CHANCES)
    begin = own * (BINS + 1)
    low = np.clip(np.searchsorted(flat, wanted, side="right") - 1, begin, begin + BINS - 1)
    before = flat.take(low)
    share = (wanted - before) / np.maximum(flat.take(low + 1) - before, 1e-300)
    ends = EDGES.take(low - begin) + np.clip(share, 0, 1) * _WIDTHS.take(low - begin)
    return np.clip(ends - generated[:, None], 1, np.maximum(limit - generated, 1)[:, None])


def state(law: Lengths) -> dict[str, Any]:
    """The law for a checkpoint."""
    return {"ended": law.ended.copy(), "cut": law.cut.copy()}


def restore(saved: Mapping[str, Any]) -> Lengths:
    """The law that `state` saved."""
    return Lengths(np.array(saved["ended"], float), np.array(saved["cut"], float))
