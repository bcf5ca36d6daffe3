"""The chi-square test of a sampled law, which the tests of both acceptance rules share."""

from __future__ import annotations

import numpy as np
from scipy import stats

from rlhf_jax.generation.speculative.sampling import Sampling, Truncation

SIGNIFICANCE = 1e-4
EXPECTED = 5.0  # the least expected count of a bin


def law_of(sampling: Sampling) -> tuple[float, Truncation]:
    """Temperature and truncation, as all that draws takes them."""
    return sampling.temperature, sampling.truncation


def expected_law(logits, sampling: Sampling) -> np.ndarray:
    """The law in float64 by sorting: another way than the code's."""
    z = np.asarray(logits, np.float64) / sampling.temperature
    order = np.argsort(-z)
    probabilities = np.exp(z - z.max())
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= sampling.top_p]] = 0
    return probabilities / probabilities.sum()


def p_value(outcomes: np.ndarray, probabilities: np.ndarray) -> float:
    """P-value of integer `outcomes` under `probabilities`; 0 where an impossible outcome was drawn.

    Rare outcomes, sorted by probability, are pooled in bins of about five expected counts or more.
    """
    counts = np.bincount(outcomes.ravel(), minlength=probabilities.size)
    if len(counts) > probabilities.size or counts[probabilities == 0].any():
        return 0.0
    order = np.argsort(probabilities)[(probabilities == 0).sum() :]
    expected = probabilities[order] / probabilities.sum() * outcomes.size
    bins = (np.cumsum(expected) - expected) // EXPECTED
    starts = np.flatnonzero(np.diff(bins, prepend=-1.0))
    observed, expected = (np.add.reduceat(x, starts) for x in (counts[order], expected))
    return float(stats.chisquare(observed, expected).pvalue)
