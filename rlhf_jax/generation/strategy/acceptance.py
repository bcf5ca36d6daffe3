"""How well each drafter predicts the policy, by what is known before it drafts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

DEPTHS = 8  # of a draft that are told apart
RANKS = 4  # of siblings that are told apart
CLASSES = 4  # of a drafter's own confidence
NOTHING = 0  # the class where nothing is known

WINDOW = 1200.0  # drafts that count for a rate: older ones fade
REALISED_WINDOW = 256.0  # accepted tokens, as predicted, that the calibration remembers
# what counts as realised at first: a few rounds are luck
BELIEF = np.array([[64.0, 64.0], [0.0, 0.0], [0.0, 0.0]])

PRIOR = 0.3 * 0.3 ** np.arange(RANKS)  # rates of a drafter of which nothing is known
WEIGHT = 4.0  # observations that the more general estimate is worth
MOST = 0.99  # nothing is certain
BOUNDS = 0.1, 1.5  # of the calibration
SHIFT = math.log(8.0)  # log odds: what counts as a sudden change
ALARM = 9.0  # log likelihood ratio at which a change is believed
FADE = 64.0  # observations of drafts not used after which a calibration has lost its hold


@dataclasses.dataclass(frozen=True)
class Observations:
    """What n drafts of one drafter, made or only scored, say of it."""

    seen_prompt: np.ndarray  # [n] bool, the prompt has been rolled out before
    confidence: np.ndarray  # [n] int, the class before drafting
    # [n, DEPTHS] int, rank of the true token among the proposals at each depth; -1: none of them
    ranks: np.ndarray
    # [n, DEPTHS] int, ranks tried at each depth, proposed or in vain; 0: not observed
    offered: np.ndarray


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What is known of one drafter.

    The leading axis of counts is the window: the long one, that since a fall may have begun, that
    since a rise may.
    """

    # [3, 2, CLASSES, DEPTHS, RANKS] by window, familiar, class: drafts whose path was right before
    seen: np.ndarray
    hits: np.ndarray  # the same shape: those that were right
    realised: np.ndarray  # [3, 2] by window: tokens accepted in its own rounds, tokens predicted
    # [2] log likelihood ratios of a sudden fall and of a sudden rise (CUSUM, Page 1954)
    drift: np.ndarray

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """`rates`, found once: the next choices and the next evidence both ask."""
        return rates(self)

    @functools.cached_property
    def observations(self) -> float:
        """Drafts that the estimate rests on, faded ones by what is left of them."""
        return float(self.seen[0, :, :, 0, 0].sum())


def unknown() -> Acceptance:
    """The acceptance of a drafter of which nothing is known."""
    counts = np.zeros((3, 2, CLASSES, DEPTHS, RANKS))
    return Acceptance(counts, counts, BELIEF, np.zeros(2))


def observe(acceptance: Acceptance, evidence: Observations, used: bool = False) -> Acceptance:
    """The acceptance after more evidence. `used`: of a round that this drafter drafted, which
    `realise` judges.

    Counts fade as new ones come: none exceeds WINDOW.
    """
    if not len(evidence.seen_prompt):
        return acceptance
    seen, hits = _count(evidence)
    if not used:
        acceptance = _judged(acceptance, acceptance.rates[..., 0], hits[..., 0], seen[..., 0])
        faded = _fade(acceptance.realised, math.exp(-len(evidence.seen_prompt) / FADE))
        acceptance = dataclasses.replace(acceptance, realised=faded)
    totals = acceptance.seen + seen
    right = acceptance.hits + hits
    kept = np.minimum(1.0, WINDOW / np.maximum(totals, 1e-9))
    return _cut_if_changed(dataclasses.replace(acceptance, seen=totals * kept, hits=right * kept))


def _count(evidence: Observations) -> tuple[np.ndarray, np.ndarray]:
    """(seen, hits), each [2, CLASSES, DEPTHS, RANKS]."""
    rank = np.arange(RANKS)
    tried = rank < evidence.offered[..., None]
    right = tried & (evidence.ranks[..., None] == rank)
    cell = evidence.seen_prompt * CLASSES + evidence.confidence
    member = (np.arange(2 * CLASSES)[:, None] == cell).astype(float)  # [2 * CLASSES, n]
    shape = (2, CLASSES, DEPTHS, RANKS)
    seen, hits = (member @ counted.reshape(len(cell), -1) for counted in (tried, right))
    return seen.reshape(shape), hits.reshape(shape)


def realise(acceptance: Acceptance, accepted: float, predicted: float, rows: int) -> Acceptance:
    """The acceptance after one of the drafter's own rounds: draft tokens accepted of `rows` rows,
    and predicted.

    `predicted` is before calibration. The rows' drafts are taken as geometric, with the predicted
    mean.
    """
    if rows == 0 or predicted <= 0:
        return acceptance
    mean = predicted * calibration(acceptance) / rows
    acceptance = _judged(
        acceptance, np.array(mean / (1 + mean)), np.array(accepted), np.array(accepted + rows)
    )
    realised = acceptance.realised + np.array([accepted, predicted])
    kept = np.minimum(1.0, REALISED_WINDOW / realised[:, 1:])
    return _cut_if_changed(dataclasses.replace(acceptance, realised=realised * kept))


def _judged(
    acceptance: Acceptance, expected: np.ndarray, hits: np.ndarray, trials: np.ndarray
) -> Acceptance:
    """The drift after these trials. A window since a change may have begun is emptied where none
    may have.

    The drift is a CUSUM of the log likelihood ratio of odds that have shifted by SHIFT, down and
    up: while it is 0 no change is likely, so that the likeliest time of one is when it was 0 last.
    """
    odds = math.exp(SHIFT)
    expected = np.clip(expected, 0.01, MOST)
    down = SHIFT * (trials - hits) - trials * np.log(expected + odds * (1 - expected))
    up = SHIFT * hits - trials * np.log(odds * expected + 1 - expected)
    lasting = np.array([True, *(acceptance.drift > 0)])
    drift = np.maximum(0.0, acceptance.drift + np.array([down.sum(), up.sum()]))
    by_cell = lasting.reshape(3, 1, 1, 1, 1)
    return Acceptance(
        acceptance.seen * by_cell,
        acceptance.hits * by_cell,
        acceptance.realised * lasting[:, None],
        drift,
    )


def _cut_if_changed(acceptance: Acceptance) -> Acceptance:
    """After a sudden change what came since is all that counts."""
    if acceptance.drift.max() < ALARM:
        return acceptance
    since = [1 + int(acceptance.drift.argmax())] * 3
    return Acceptance(
        acceptance.seen[since], acceptance.hits[since], acceptance.realised[since], np.zeros(2)
    )


def _fade(realised: np.ndarray, kept: float) -> np.ndarray:
    """What was realised, on its way to the belief that it began with."""
    return BELIEF + kept * (realised - BELIEF)


def forget(acceptance: Acceptance, kept: float) -> Acceptance:
    """The acceptance after the policy has moved: counts weigh `kept` (0 to 1) of what they did."""
    realised = _fade(acceptance.realised, kept)
    return Acceptance(acceptance.seen * kept, acceptance.hits * kept, realised, np.zeros(2))


def rates(acceptance: Acceptance) -> np.ndarray:
    """[2, CLASSES, DEPTHS, RANKS] P(this rank is right | all before it right), by familiar and
    class.

    Where counts are small a cell leans on its class, a class on all of the drafter, a depth on the
    one above it, the first depth on the prior. No rank is above the ranks before it, and the ranks
    of a place sum to at most 1.
    """
    seen = acceptance.seen[0]
    hits = acceptance.hits[0]
    seen_by_class = seen.sum(axis=0)
    hits_by_class = hits.sum(axis=0)
    everywhere = _along_depth(seen_by_class.sum(axis=0), hits_by_class.sum(axis=0))
    by_class = _shrunk(seen_by_class, hits_by_class, everywhere)
    found = np.minimum.accumulate(_shrunk(seen, hits, by_class), axis=-1)
    sums = np.minimum(found.cumsum(axis=-1), MOST)
    return np.concatenate([sums[..., :1], sums[..., 1:] - sums[..., :-1]], axis=-1)


def _along_depth(seen: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """[DEPTHS, RANKS] rates over all cells, each depth leaning on the one above."""
    found = []
    above = PRIOR.tolist()
    # of so few numbers, quicker than arrays
    for tried, right in zip(seen.tolist(), hits.tolist(), strict=True):
        above = [
            (r + WEIGHT * a) / (n + WEIGHT) for n, r, a in zip(tried, right, above, strict=True)
        ]
        found.append(above)
    return np.array(found)


def _shrunk(seen: np.ndarray, hits: np.ndarray, general: np.ndarray) -> np.ndarray:
    """Rates that lean on the general ones, tilted by how all depths of the cell compare with
    them.
    """
    tilt = (hits.sum(axis=-2, keepdims=True) + 1) / (
        (seen * general).sum(axis=-2, keepdims=True) + 1
    )
    target = np.minimum(general * tilt, MOST)
    return (hits + WEIGHT * target) / (seen + WEIGHT)


def likeliest(acceptance: Acceptance, seen_prompt: int, confidence: int) -> float:
    """P(the likeliest draft is right) over all depths of a cell: nearer to 1 than any of `rates`
    may be.
    """
    cell = 0, seen_prompt, confidence, slice(None), 0
    seen = acceptance.seen[cell].sum()
    hits = acceptance.hits[cell].sum()
    return float((hits + WEIGHT * MOST) / (seen + WEIGHT))


def pooled(acceptance: Acceptance) -> np.ndarray:
    """[DEPTHS, RANKS] rates over all cells, each cell by the drafts seen of it: what a tree is
    found from.
    """
    weights = acceptance.seen[0, :, :, :1, :1] + 1e-9
    return (acceptance.rates * weights).sum(axis=(0, 1)) / weights.sum(axis=(0, 1))


def calibration(acceptance: Acceptance) -> float:
    """Accepted over predicted tokens of the drafter's own rounds, within bounds; 1 where there were
    none.
    """
    accepted, predicted = acceptance.realised[0].tolist()
    return min(max((accepted + 1.0) / (predicted + 1.0), BOUNDS[0]), BOUNDS[1])


def state(acceptance: Acceptance) -> dict[str, np.ndarray]:
    """All of it as arrays, for a checkpoint."""
    return dataclasses.asdict(acceptance)


def restore(saved: dict[str, Any]) -> Acceptance:
    """The acceptance that `state` saved; what had other windows is forgotten."""
    found = Acceptance(**{name: np.array(value, float) for name, value in saved.items()})
    return found if len(found.seen) == len(BELIEF) else unknown()
