"""Estimate how often the target accepts each drafter's tokens.

Rates depend on facts known before drafting: whether the prompt has earlier roll-outs, and the
drafter's confidence. A factor for each position in the response compares them with outcomes there.
Counts fade, and a sudden change drops the data before it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.generation.strategy.settings import ACCEPTANCE_SETTINGS

DEPTHS = 8  # The distinguished depths of a draft.
RANKS = 4  # The distinguished ranks of siblings.
CLASSES = 4  # The classes of a drafter's own confidence.
NOTHING = 0  # The class in which a drafter has nothing to draft.

# First tokens of the bands of positions in a response.
BAND_EDGES = np.array([64, 128, 256, 512, 1024, 2048, 4096])
BANDS = len(BAND_EDGES) + 1

# The prior rates [RANKS] of a drafter.
PRIOR_RATES = ACCEPTANCE_SETTINGS.prior_rate * ACCEPTANCE_SETTINGS.prior_rank_ratio ** np.arange(
    RANKS
)

# The initial [3, 2] accepted and predicted tokens of a calibration, by window.
_UNCALIBRATED = np.array([[ACCEPTANCE_SETTINGS.calibration_prior] * 2, [0.0, 0.0], [0.0, 0.0]])
_LOG_CHANGE = math.log(ACCEPTANCE_SETTINGS.change_odds)


@dataclasses.dataclass(frozen=True)
class Observations:
    """Hold observations of n drafts of one drafter, verified or only scored."""

    seen_prompt: np.ndarray  # [n] bool, the prompt has earlier roll-outs
    confidence: np.ndarray  # [n] int, the class before drafting
    # [n, DEPTHS] int, rank of the true token among the proposals at each depth; -1: none of them
    ranks: np.ndarray
    # [n, DEPTHS] int, ranks tried at each depth, proposed or missing; 0: not observed
    offered: np.ndarray
    band: np.ndarray  # [n] int, the band of the response so far


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Hold the acceptance statistics of one drafter.

    Counts have a leading axis of three windows: the long one, the one since a fall of the rates may
    have begun, and the one since a rise may have.
    """

    # [3, 2, CLASSES, DEPTHS, RANKS] by window, seen prompt and class: drafts whose path was right
    seen: np.ndarray
    hits: np.ndarray  # the same shape: those that were right themselves
    realised: np.ndarray  # [3, 2] by window: tokens accepted in its own rounds, tokens predicted
    drift: np.ndarray  # [2] log likelihood ratios of a sudden fall and of a sudden rise
    # [BANDS, 2] by band: drafts that were right, and the number expected by the rates
    by_band: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((BANDS, 2)))

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """Return [2, CLASSES, DEPTHS, RANKS] P(this rank is right | all before it were).

        The axes are seen prompt, class, depth and rank. With small counts a cell is shrunk to its
        class, a class to the whole drafter, a depth to the previous one, the first depth to the
        prior. No rate exceeds that of the rank before, and those of siblings sum to at most 1.
        """
        weight = ACCEPTANCE_SETTINGS.prior_weight
        seen = self.seen[0]
        hits = self.hits[0]
        seen_by_class = seen.sum(axis=0)
        hits_by_class = hits.sum(axis=0)

        # Lists are faster than arrays for so few numbers.
        by_depth = []
        above = PRIOR_RATES.tolist()
        counts = zip(
            seen_by_class.sum(axis=0).tolist(), hits_by_class.sum(axis=0).tolist(), strict=True
        )
        for tried, right in counts:
            ranks = zip(tried, right, above, strict=True)
            above = [(hit + weight * rate) / (count + weight) for count, hit, rate in ranks]
            by_depth.append(above)

        by_class = _shrink(seen_by_class, hits_by_class, np.array(by_depth))
        falling = np.minimum.accumulate(_shrink(seen, hits, by_class), axis=-1)
        sums = np.minimum(falling.cumsum(axis=-1), ACCEPTANCE_SETTINGS.highest_rate)
        return np.concatenate([sums[..., :1], sums[..., 1:] - sums[..., :-1]], axis=-1)

    @property
    def of_bands(self) -> np.ndarray:
        """Return the factors [BANDS] on the rates at each position."""
        prior = ACCEPTANCE_SETTINGS.band_prior
        return (self.by_band[:, 0] + prior) / (self.by_band[:, 1] + prior)

    @functools.cached_property
    def drafts(self) -> float:
        """Return the number of drafts that the rates rest on; faded ones count by their weight."""
        return float(self.seen[0, :, :, 0, 0].sum())


def unknown() -> Acceptance:
    """Return the prior acceptance of a drafter."""
    counts = np.zeros((3, 2, CLASSES, DEPTHS, RANKS))
    return Acceptance(counts, counts, _UNCALIBRATED, drift=np.zeros(2))


def bands(tokens: np.ndarray) -> np.ndarray:
    """Return the band of each response by its length in tokens, of the same shape."""
    return np.searchsorted(BAND_EDGES, tokens, side="right")


def bands_ahead(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Count the tokens [BANDS] in each band of responses that go from `begin` [n] to `end` [n]."""
    first = np.append(0, BAND_EDGES)
    last = np.append(BAND_EDGES, np.inf)
    inside = np.minimum(end[:, None], last) - np.maximum(begin[:, None], first)
    return np.maximum(inside, 0.0).sum(axis=0)


def joined(observations: Sequence[Observations]) -> Observations:
    """Join observations of one drafter."""
    if len(observations) == 1:
        return observations[0]
    parts = zip(*(vars(one).values() for one in observations), strict=True)
    return Observations(*map(np.concatenate, parts))


def observe(known: Acceptance, observations: Observations, used: bool = False) -> Acceptance:
    """Return the acceptance after more observations.

    used: whether they are of a round that this drafter drafted, for which `calibrate` tests for a
    change. Counts fade as new ones come, none exceeds the window of the settings.
    """
    drafts = len(observations.seen_prompt)
    if not drafts:
        return known
    rank = np.arange(RANKS)
    tried = rank < observations.offered[..., None]
    right = tried & (observations.ranks[..., None] == rank)
    cell = observations.seen_prompt * CLASSES + observations.confidence
    member = (np.arange(2 * CLASSES)[:, None] == cell).astype(np.float32)  # [2 * CLASSES, n]
    counted = np.stack((tried, right)).reshape(2, drafts, DEPTHS * RANKS).astype(np.float32)
    seen, hits = (member @ counted).astype(float).reshape(2, 2, CLASSES, DEPTHS, RANKS)
    by_band = _observe_bands(known, observations, right.any(axis=-1))

    if not used:
        known = _test_for_change(known, known.rates[..., 0], hits[..., 0], seen[..., 0])
        kept = math.exp(-drafts / ACCEPTANCE_SETTINGS.calibration_fade)
        faded = _UNCALIBRATED + kept * (known.realised - _UNCALIBRATED)
        known = dataclasses.replace(known, realised=faded)

    seen = known.seen + seen
    kept = np.minimum(1.0, ACCEPTANCE_SETTINGS.window / np.maximum(seen, 1e-9))
    hits = (known.hits + hits) * kept
    updated = dataclasses.replace(known, seen=seen * kept, hits=hits, by_band=by_band)
    return _forget_before_change(updated)


def _observe_bands(known: Acceptance, observations: Observations, right: np.ndarray) -> np.ndarray:
    """Return `by_band` after more observations; right [n, DEPTHS] bool: an offered rank was."""
    cell = np.where(observations.seen_prompt, 1, 0), observations.confidence
    by_ranks = known.rates.cumsum(axis=-1)[cell]  # [n, DEPTHS, RANKS]
    last = np.maximum(observations.offered - 1, 0)[..., None]
    rates = np.take_along_axis(by_ranks, last, axis=-1)[..., 0]
    expected = (rates * (observations.offered > 0)).sum(axis=1)
    counts = [
        np.bincount(observations.band, figures, BANDS) for figures in (right.sum(axis=1), expected)
    ]
    updated = known.by_band + np.stack(counts, axis=1)
    return updated * np.minimum(
        1.0, ACCEPTANCE_SETTINGS.band_window / np.maximum(updated[:, 1:], 1e-9)
    )


def calibrate(known: Acceptance, accepted: float, predicted: float, rows: int) -> Acceptance:
    """Return the acceptance after one round that the drafter drafted.

    accepted, predicted: draft tokens of all `rows` rows, predicted before calibration. For the test
    of a sudden change a row's drafts are taken as geometric, with the predicted mean.
    """
    if rows == 0 or predicted <= 0:
        return known
    mean = predicted * calibration(known) / rows
    known = _test_for_change(
        known, np.array(mean / (1 + mean)), np.array(accepted), np.array(accepted + rows)
    )
    realised = known.realised + np.array([accepted, predicted])
    kept = np.minimum(1.0, ACCEPTANCE_SETTINGS.calibration_window / realised[:, 1:])
    return _forget_before_change(dataclasses.replace(known, realised=realised * kept))


def forget(known: Acceptance, kept: float) -> Acceptance:
    """Return the acceptance after a policy update: counts are weighted by `kept` (0 to 1)."""
    realised = _UNCALIBRATED + kept * (known.realised - _UNCALIBRATED)
    drift = np.zeros(2)
    return Acceptance(known.seen * kept, known.hits * kept, realised, drift, known.by_band * kept)


def likeliest_rate(known: Acceptance, seen_prompt: int, confidence: int) -> float:
    """Return P(rank 0 is right) over all depths of a cell.

    Unlike `Acceptance.rates` it is not shrunk to other cells, so it comes nearer to 1.
    """
    cell = seen_prompt, confidence, slice(None), 0
    seen = known.seen[0][cell].sum()
    hits = known.hits[0][cell].sum()
    weight = ACCEPTANCE_SETTINGS.prior_weight
    return float((hits + weight * ACCEPTANCE_SETTINGS.highest_rate) / (seen + weight))


def pooled_rates(known: Acceptance) -> np.ndarray:
    """Return [DEPTHS, RANKS] rates over all cells, weighted by their drafts."""
    weights = known.seen[0, :, :, :1, :1] + 1e-9
    return (known.rates * weights).sum(axis=(0, 1)) / weights.sum(axis=(0, 1))


def calibration(known: Acceptance) -> float:
    """Return accepted over predicted tokens of the drafter's own rounds, 1 if there were none.

    The figure lies within `AcceptanceSettings.calibration_bounds`.
    """
    low, high = ACCEPTANCE_SETTINGS.calibration_bounds
    accepted, predicted = known.realised[0].tolist()
    return min(max((accepted + 1.0) / (predicted + 1.0), low), high)


def state(known: Acceptance) -> dict[str, np.ndarray]:
    """Return all of an acceptance as arrays, for a checkpoint."""
    return dataclasses.asdict(known)


def restore(saved: dict[str, Any]) -> Acceptance:
    """Return the acceptance that `state` saved, or an unknown one if it had other windows."""
    restored = Acceptance(**{name: np.array(value, float) for name, value in saved.items()})
    return restored if len(restored.seen) == len(_UNCALIBRATED) else unknown()


def _test_for_change(
    known: Acceptance, expected: np.ndarray, hits: np.ndarray, trials: np.ndarray
) -> Acceptance:
    """Update the drift after trials, and empty the windows in which no change may have begun.

    The drift is a CUSUM (Page 1954) of the log likelihood ratio of odds that a change has
    multiplied or divided. While it is 0 no change is likely, so the likeliest time of a change is
    when it was 0 last. expected: the rates of the trials, of the shape of hits and trials.
    """
    odds = math.exp(_LOG_CHANGE)
    expected = np.clip(expected, 0.01, ACCEPTANCE_SETTINGS.highest_rate)
    down = _LOG_CHANGE * (trials - hits) - trials * np.log(expected + odds * (1 - expected))
    up = _LOG_CHANGE * hits - trials * np.log(odds * expected + 1 - expected)

    lasting = np.array([True, *(known.drift > 0)])
    drift = np.maximum(0.0, known.drift + np.array([down.sum(), up.sum()]))
    by_cell = lasting.reshape(3, 1, 1, 1, 1)
    realised = known.realised * lasting[:, None]
    return Acceptance(known.seen * by_cell, known.hits * by_cell, realised, drift, known.by_band)


def _forget_before_change(known: Acceptance) -> Acceptance:
    """Keep only observations since a sudden change, once one is detected."""
    if known.drift.max() < ACCEPTANCE_SETTINGS.alarm:
        return known
    since = [1 + int(known.drift.argmax())] * 3
    realised = known.realised[since]
    drift = np.zeros(2)
    return Acceptance(known.seen[since], known.hits[since], realised, drift, known.by_band)


def _shrink(seen: np.ndarray, hits: np.ndarray, general: np.ndarray) -> np.ndarray:
    """Return rates shrunk to general ones, which are scaled to the cell's level.

    seen, hits [..., DEPTHS, RANKS]; general broadcasts to them. One scale serves all depths.
    """
    expected = (seen * general).sum(axis=-2, keepdims=True)
    scale = (hits.sum(axis=-2, keepdims=True) + 1) / (expected + 1)
    target = np.minimum(general * scale, ACCEPTANCE_SETTINGS.highest_rate)
    weight = ACCEPTANCE_SETTINGS.prior_weight
    return (hits + weight * target) / (seen + weight)
