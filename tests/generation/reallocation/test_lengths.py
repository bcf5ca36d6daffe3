"""The law of response lengths: what a sample has to come, against brute force on the responses
themselves.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_jax.generation.reallocation import length_model
from rlhf_jax.generation.reallocation.length_model import CHANCES, Lengths


def drawn(count: int, seed: int = 0) -> np.ndarray:
    luck = np.random.default_rng(seed)
    return np.maximum(np.round(luck.lognormal(5.6, 0.8, count)), 1)


def law_of(tokens: np.ndarray, finished: np.ndarray | None = None) -> Lengths:
    return length_model.observe(
        Lengths(), tokens, np.ones(len(tokens), bool) if finished is None else finished
    )


def left(law: Lengths, generated, limit: float = 8192.0) -> np.ndarray:
    generated = np.atleast_1d(np.asarray(generated, float))
    curves = length_model.survival(law)[None]
    return length_model.remaining(curves, np.zeros(len(generated), int), generated, limit)


@pytest.mark.parametrize("generated", [0, 37, 250, 801, 1500])
def test_the_law_given_the_length_so_far_is_that_of_the_longer_responses(generated):
    tokens = drawn(200_000)
    longer = tokens[tokens > generated] - generated
    enough = len(longer) * (1 - CHANCES) >= 100  # the outcomes that so many responses are beyond
    np.testing.assert_allclose(
        left(law_of(tokens), generated)[0][enough],
        np.quantile(longer, CHANCES[enough]),
        rtol=0.05,
        atol=2,
    )


def test_a_response_that_was_cut_off_says_only_that_it_is_longer():
    tokens = drawn(100_000)
    # beyond the last outcome: none is a guess
    limits = np.random.default_rng(1).integers(100, 4000, len(tokens))
    seen = law_of(np.minimum(tokens, limits), tokens <= limits)
    enough = len(tokens) * (1 - CHANCES) >= 100
    np.testing.assert_allclose(
        left(seen, 0)[0][enough], np.quantile(tokens, CHANCES[enough]), rtol=0.06
    )
    naive = law_of(np.minimum(tokens, limits))
    assert left(naive, 0)[0, -1] < 0.9 * left(seen, 0)[0, -1]


def test_nothing_lasts_beyond_the_limit_and_nothing_takes_no_time():
    found = left(law_of(drawn(1000)), [0, 990, 1000, 5000], limit=1000.0)
    assert (found <= [[1000], [10], [1], [1]]).all() and (found >= 1).all()
    assert (np.diff(found, axis=1) >= 0).all()


def test_beyond_all_that_was_seen_what_has_come_far_goes_far():
    law = law_of(drawn(1000).clip(max=600))
    found = left(law, [700, 1400], limit=100_000.0)
    assert (found[0] > 1).all() and np.median(found[1]) > np.median(found[0])


def test_without_evidence_there_is_a_prior():
    found = left(Lengths(), [0, 1000])
    assert np.isfinite(found).all() and np.median(found[1]) > np.median(found[0]) > 50


def test_samples_may_share_a_law_and_differ_in_limits():
    curves = np.stack(
        [length_model.survival(law_of(drawn(5000).clip(max=most))) for most in (100, 4000)]
    )
    which = np.array([1, 0, 1])
    generated = np.array([0.0, 50.0, 50.0])
    limit = np.array([4000, 4000, 120])
    together = length_model.remaining(curves, which, generated, limit)
    for one in range(3):
        alone = length_model.remaining(
            curves[which[[one]]], np.zeros(1, int), generated[[one]], limit[one]
        )
        np.testing.assert_allclose(together[one], alone[0])


def test_old_evidence_fades_and_a_checkpoint_keeps_the_law():
    old = law_of(drawn(1000).clip(max=200))
    new = np.full(1000, 1500.0)
    kept, faded = (
        length_model.observe(law, new, np.ones(1000, bool))
        for law in (old, length_model.faded(old, 0.1))
    )
    assert left(faded, 0)[0, 1] > left(kept, 0)[0, 1]
    again = length_model.restore(length_model.state(faded))
    np.testing.assert_array_equal(left(again, [0, 100]), left(faded, [0, 100]))
