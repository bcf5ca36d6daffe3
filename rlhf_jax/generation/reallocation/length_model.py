"""Estimate the distribution of response lengths, and the remaining length of a sample.

Lengths are counted in bins. A response that was cut off at its limit only shows that it would have
been longer, so hazards are estimated (Kaplan and Meier 1958): the chance to end in a bin for
responses that reach it. Without data a weak prior applies, under which long responses tend to
become longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

# The chances of the Q outcomes that represent a distribution, in ascending order of length. They
# are unequal because the extreme outcome of one row in many determines the end of a stage.
SHARES = np.array([0.25, 0.25, 0.2, 0.15, 0.1, 0.04, 0.008, 0.0015, 0.0004, 0.0001])
CHANCES = SHARES.cumsum() - SHARES / 2  # The chances to end before each outcome.
# The edges of the bins, in tokens.
EDGES = np.unique(np.concatenate([np.arange(16), np.round(np.geomspace(16, 131_072, 150))]))

_BINS = len(EDGES) - 1
_WIDTHS = np.diff(EDGES)
LOG_MIDDLE = np.log((EDGES[:-1] + EDGES[1:]) / 2)

# Weight of the prior in each bin, in responses; by hand.
_PRIOR_RESPONSES = 1.0
# Median length under the prior, in tokens; by hand.
_PRIOR_MEDIAN = 256.0
_PRIOR_HAZARD = 1 - (EDGES[:-1] + _PRIOR_MEDIAN) / (EDGES[1:] + _PRIOR_MEDIAN)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Hold responses counted by bin, [bins] each."""

    # responses that ended
    ended: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BINS))
    # responses that were cut off at their limit
    cut: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BINS))


def observe(known: Lengths, lengths: np.ndarray, finished: np.ndarray) -> Lengths:
    """Return the counts after responses of lengths [n]; those not finished [n] were cut off."""
    bins = np.clip(np.searchsorted(EDGES, lengths, side="left") - 1, 0, _BINS - 1)
    ended, cut = (np.bincount(bins[which], minlength=_BINS) for which in (finished, ~finished))
    return Lengths(known.ended + ended, known.cut + cut)


def faded(known: Lengths, kept: float) -> Lengths:
    """Return the counts after a policy update: earlier ones are weighted by `kept`."""
    return Lengths(kept * known.ended, kept * known.cut)


def survival(known: Lengths) -> np.ndarray:
    """Return [bins + 1] chances that a response is longer than each edge."""
    weight = _PRIOR_RESPONSES
    # Responses that were cut off were so somewhere in their bin.
    reached = (known.ended + known.cut)[::-1].cumsum()[::-1] - known.cut / 2
    hazard = (known.ended + weight * _PRIOR_HAZARD) / (reached + weight)
    return np.concatenate([[1.0], np.cumprod(1 - np.minimum(hazard, 1.0))])


def chance(curves: np.ndarray, tokens: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
    """Return [n] chances that responses are longer than the given tokens [n].

    curves [k, bins + 1]: survival, and which [n] of them applies to each response: by default one
    for each. Between two edges it is linear.
    """
    at = np.clip(np.searchsorted(EDGES, tokens, side="right") - 1, 0, _BINS - 1)
    part = np.clip((tokens - EDGES[at]) / _WIDTHS[at], 0, 1)
    rows = np.arange(len(curves)) if which is None else which
    return curves[rows, at] * (1 - part) + curves[rows, at + 1] * part


def remaining(
    curves: np.ndarray, which: np.ndarray, generated: np.ndarray, limit: np.ndarray | float
) -> np.ndarray:
    """Return [n, Q] tokens to come in the outcomes of `SHARES`, ascending.

    curves [k, bins + 1]: survival, and which [n] of them applies to each sample; generated, limit
    [n]: tokens of each response so far, and at most. The results are at least 1, and at most what
    the limit leaves if that is 1 or more.
    """
    alive = chance(curves, generated, which)

    # One ascending array for all curves, so that one search suffices.
    flat = (2.0 * np.arange(len(curves))[:, None] - curves).ravel()
    own = which[:, None]
    wanted = 2.0 * own - alive[:, None] * (1 - CHANCES)
    begin = own * (_BINS + 1)
    low = np.clip(np.searchsorted(flat, wanted, side="right") - 1, begin, begin + _BINS - 1)

    # Between two edges survival is linear.
    before = flat.take(low)
    share = (wanted - before) / np.maximum(flat.take(low + 1) - before, 1e-300)
    ends = EDGES.take(low - begin) + np.clip(share, 0, 1) * _WIDTHS.take(low - begin)
    return np.clip(ends - generated[:, None], 1, np.maximum(limit - generated, 1)[:, None])


def state(known: Lengths) -> dict[str, Any]:
    """Return the counts for a checkpoint."""
    return {"ended": known.ended.copy(), "cut": known.cut.copy()}


def restore(saved: Mapping[str, Any]) -> Lengths:
    """Return the counts that `state` saved."""
    none = np.zeros(_BINS)
    return Lengths(*(np.array(saved.get(name, none), float) for name in ("ended", "cut")))
