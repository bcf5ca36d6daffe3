"""Forecasts of lengths: what a source is worth is learned, and intervals cover what they say."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_jax.generation.reallocation import forecasts, length_model
from rlhf_jax.generation.reallocation.forecasts import (
    BY_EARLIER,
    BY_SIBLINGS,
    LengthForecasts,
    PromptLengths,
)

LIMIT = 4096.0
GROUP = 8


def prompts(
    seed: int,
    spread: float,
    count: int = 128,
    earlier: int = 1,
    strays: float = 0.0,
    limit: float = LIMIT,
) -> list[PromptLengths]:
    """Responses whose log lengths lie around their prompt's; some have nothing to do with it."""
    luck = np.random.default_rng(seed)
    center = luck.normal(6.0, 1.0, (count, 1))

    def draw(of_each: int) -> np.ndarray:
        logs = center + luck.normal(0, spread / np.sqrt(2), (count, of_each))
        stray = luck.random(logs.shape) < strays
        return np.ceil(np.exp(np.where(stray, luck.normal(6.0, 1.2, logs.shape), logs)))

    before = np.minimum(draw(earlier), limit)
    tokens = draw(GROUP)
    return [
        PromptLengths(*one, limit)
        for one in zip(before, np.minimum(tokens, limit), tokens <= limit, strict=True)
    ]


def learned(*stages: list[PromptLengths]) -> LengthForecasts:
    known = LengthForecasts()
    for stage in stages:
        known = forecasts.after_stage(known, stage, kept=0.5)
    return known


@pytest.mark.parametrize("spread", [0.15, 0.5, 1.0])
@pytest.mark.parametrize("limit", [LIMIT, 500.0])
def test_the_spread_of_each_source_is_learned_from_ended_and_cut_off_responses(spread, limit):
    """Half of the responses are cut off at the lower limit."""
    known = learned(prompts(0, spread, limit=limit), prompts(1, spread, limit=limit))
    slack = 1.3 if limit == LIMIT else 1.6
    for source in forecasts.ALL_SOURCES:
        belief = known.belief(source)
        assert belief is not None and 1 / slack < belief.spread / spread < slack, source


@pytest.mark.parametrize("spread, strays", [(0.3, 0.0), (1.0, 0.0), (0.3, 0.15)])
@pytest.mark.parametrize("earlier", [1, 4])
def test_intervals_cover_what_they_say_after_two_stages(spread, strays, earlier):
    known = learned(*(prompts(seed, spread, 1024, earlier, strays) for seed in (0, 1)))
    fresh = prompts(2, spread, 2048, earlier, strays)
    covered = forecasts.coverage(known, fresh)
    assert len(covered) == 6
    for name, share in covered.items():
        nominal = int(name.rpartition("_")[2]) / 100
        assert abs(share - nominal) < 0.05, (name, share)


def test_lengths_that_follow_no_normal_law_are_covered_too():
    """Answers are short or long, by chance, in shares that differ between prompts."""
    luck = np.random.default_rng(0)

    def stage() -> list[PromptLengths]:
        long = luck.beta(0.4, 0.4, (1024, 1)) > luck.random((1024, GROUP + 2))
        lengths = np.ceil(np.where(long, 1500.0, 60.0) * luck.gamma(4.0, 0.25, long.shape))
        finished = np.ones(GROUP, bool)
        return [PromptLengths(one[:2], one[2:], finished, LIMIT) for one in lengths]

    covered = forecasts.coverage(learned(stage(), stage()), stage())
    for name, share in covered.items():
        nominal = int(name.rpartition("_")[2]) / 100
        assert abs(share - nominal) < 0.05, (name, share)


def test_a_source_that_was_hardly_tried_says_nothing():
    known = learned(prompts(0, 0.3, count=2))
    assert known.belief(BY_EARLIER) is None
    assert (
        forecasts.narrowest(known, [forecasts.earlier_references([np.array([50.0])], [LIMIT])])
        is None
    )
    assert not any(BY_EARLIER in name for name in forecasts.coverage(known, prompts(1, 0.3)))


def test_the_better_source_is_asked():
    """A sibling that ended says more than an earlier roll-out of a policy that has moved."""
    stages = [
        [
            one._replace(earlier=one.earlier * luck.lognormal(0, 1.0, 1))
            for one in prompts(seed, 0.2)
        ]
        for seed, luck in ((seed, np.random.default_rng(seed)) for seed in (0, 1))
    ]
    known = learned(*stages)
    both = [
        forecasts.earlier_references([np.array([50.0])], [LIMIT]),
        forecasts.sibling_references([np.array([400.0])], [GROUP], [LIMIT]),
    ]
    found = forecasts.narrowest(known, both)
    assert found is not None and found.source == BY_SIBLINGS


def test_the_first_siblings_to_end_say_that_the_others_are_longer():
    known = learned(prompts(0, 0.5), prompts(1, 0.5))
    first = forecasts.sibling_references([np.array([300.0])], [GROUP], [LIMIT])
    last = forecasts.sibling_references([np.full(GROUP - 1, 300.0)], [GROUP], [LIMIT])
    means = [
        -np.diff(forecasts.survival(known, one)[0]) @ np.exp(length_model.LOG_MIDDLE)
        for one in (first, last)
    ]
    assert means[0] > 1.3 * means[1]


def test_a_checkpoint_keeps_what_was_learned():
    known = learned(prompts(0, 0.3))
    again = forecasts.restore(forecasts.state(known))
    references = forecasts.earlier_references(
        [np.array([50.0, 70.0]), np.array([900.0])], [LIMIT] * 2
    )
    np.testing.assert_array_equal(
        forecasts.survival(again, references), forecasts.survival(known, references)
    )
    before = forecasts.restore(length_model.state(known.lengths))
    assert before.belief(BY_EARLIER) is None
    np.testing.assert_array_equal(before.lengths.ended, known.lengths.ended)
