"""Drains of rows that gain at different paces: what is predicted of their end, and that the choice
brings it nearer.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlhf_jax.generation.speculative.drafters.replay import FOLLOWS_EARLIER
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, RANKS, Observations
from rlhf_jax.generation.strategy.predict import RowGroups, Situation, group_rows, seconds_left
from rlhf_jax.generation.strategy.select import Selector

CPU = roofline.Machine(roofline.Roofline(8e-3, 1e-6, 5e-3, 1e-8, 5e-4, 2e-3), None, 1e-4)
GPU = roofline.Machine(roofline.Roofline(8e-3, 4e-8, 2.5e-5, 1e-10, 2e-5, 1e-3), None, 1e-4)
# a small batch is hardly quicker
FLAT = roofline.Machine(roofline.Roofline(1e-9, 1e-9, 5e-3, 1e-9, 1e-9, 3e-2), None, 1e-4)
STRAYED = 1  # the class of a text that goes on by position after it has differed
SPAN = 64  # tokens of every sample


def test_rows_of_one_pace_end_as_tokens_a_second_say():
    rows = RowGroups(np.array([[1.0, 4.0]]), np.array([8.0]), np.array([40.0]))
    np.testing.assert_allclose(seconds_left(rows, np.array([1.0, 2.0]), np.ones_like), [40, 20])


def test_who_is_left_over_decodes_plainly_in_a_smaller_batch():
    """Six rows gain four tokens a round and end after ten rounds, two gain one: they have thirty
    plain rounds more.
    """
    rows = RowGroups(
        np.array([[1.0, 1.0], [1.0, 4.0]]), np.array([2.0, 6.0]), np.array([40.0, 40.0])
    )
    ends = seconds_left(rows, np.array([1.0, 2.0]), lambda live: np.where(live <= 2, 0.5, 1.0))
    np.testing.assert_allclose(ends, [40, 10 * 2 + 30 * 0.5])


@pytest.mark.parametrize("stay", [0.9, 0.99])
def test_rows_that_follow_are_foreseen_to_stray_as_often_as_they_do(stay):
    """Of 20 rows with 30 tokens to come, gaining 10 a round while they follow and 1 afterwards."""
    pace = np.ones((2 * CLASSES, 2))
    counts = np.zeros(2 * CLASSES, int)
    pace[-1, 1] = 10.0
    counts[-1] = 20
    counts[-3] = 5
    found = group_rows(pace, counts, np.where(counts, 30 * counts, 0), stay)
    assert found.counts.sum() == pytest.approx(25) and found.counts[0] == 5
    assert found.counts[1] == pytest.approx(20 * stay**30)
    strays = np.minimum(np.random.default_rng(0).geometric(1 - stay, 100_000) - 1, 30)
    rounds = (strays / 10 + (30 - strays)).mean()
    expected = found.counts[1:] @ (found.left / found.pace[:, 1])[1:] / 20
    assert expected == pytest.approx(rounds, rel=0.1)
    np.testing.assert_allclose(found.pace[:, 0], 1.0)


class SimulatedDrain:
    """Samples of SPAN tokens of which a part follows its earlier text until it strays, at `hazard`
    a token.
    """

    def __init__(
        self, machine: roofline.Machine, rows: int, following: float, hazard: float, seed: int
    ):
        self.machine = machine
        self.rows = rows
        self.following = following
        self.hazard = hazard
        self.seed = seed
        self.candidates = candidates.adaptive(["replay"], 8)

    def seconds(self, choose) -> float:
        """Of the whole drain; `choose` maps a situation to an index of the candidates."""
        luck = np.random.default_rng(self.seed)
        total = 0.0
        follows = luck.random(self.rows) < self.following
        rows = self.rows
        # until it strays, and in all
        steps = luck.geometric(self.hazard, rows) * follows
        left = np.full(rows, SPAN)
        while len(left):
            while rows // 2 >= len(left):
                rows //= 2
            at = self.situation(rows, steps > 0, left)
            strategy = choose(at)
            truth = cost.Costs(self.machine, self.machine)
            total += float(
                cost.seconds(truth, self.candidates.calls, rows, at.context, 0)[strategy]
            )
            gained = 1 + np.minimum(
                np.maximum(steps - 1, 0), self.drafts(strategy, rows, steps > 0)
            )
            left = left - gained
            steps = np.maximum(steps - gained, 0)
            left, steps = left[left > 0], steps[left > 0]
        return total

    def drafts(self, strategy: int, rows: int, follows: np.ndarray) -> np.ndarray:
        """[live] drafts of each row; in a packed round those that follow have them, level by
        level.
        """
        depth = int(self.candidates.depth[strategy])
        nodes = int(self.candidates.nodes[strategy])
        if not self.candidates.strategies[strategy].packed:
            return np.full(len(follows), depth)
        each, more = divmod(nodes * rows - len(follows), max(1, follows.sum()))
        return follows * np.minimum(each + (follows.cumsum() <= more), depth)

    def situation(self, rows: int, follows: np.ndarray, left: np.ndarray) -> Situation:
        cells = np.where(follows, FOLLOWS_EARLIER, STRAYED)
        counts, tokens = (
            np.bincount(cells, each, 2 * CLASSES).reshape(2, CLASSES)[::-1] for each in (None, left)
        )
        context = float((32 + SPAN - left).sum())
        return Situation(
            rows, len(left), context, 0, {"replay": counts}, lambda _: True, left={"replay": tokens}
        )

    def selector(self) -> Selector:
        chooser = Selector(
            self.candidates, cost.Costs(self.machine, self.machine), frozen_costs=True
        )
        luck = np.random.default_rng(5)
        follows = np.arange(4000) % 2 == 0
        right = np.cumprod((luck.random((4000, DEPTHS)) > self.hazard) & follows[:, None], axis=1)
        reached = np.hstack([np.ones((4000, 1), int), right[:, :-1]])
        said = Observations(
            np.ones(4000, bool),
            np.where(follows, FOLLOWS_EARLIER, STRAYED),
            right - 1,
            RANKS * reached,
            band=np.zeros(4000, int),
        )
        for part in np.split(np.arange(4000), 100):
            chooser.observe_text(
                "replay", Observations(*(leaf[part] for leaf in dataclasses.astuple(said)))
            )
        return chooser


@pytest.mark.parametrize("machine", [CPU, GPU, pytest.param(FLAT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 32])
@pytest.mark.parametrize(
    "following, hazard", [(1.0, 0.002), (0.8, 0.01), (0.5, 0.01), (0.2, 0.01), (0.9, 0.1)]
)
def test_a_mixed_drain_ends_no_later_than_plain_or_the_best_fixed_chain(
    request, machine, rows, following, hazard
):
    if (machine, rows, following) == (GPU, 32, 0.8):
        why = (
            "drafts end this drain 1.9 % sooner than plain decoding, "
            "and must promise 2 % to be chosen"
        )
        request.applymarker(pytest.mark.xfail(reason=why))
    drains = [SimulatedDrain(machine, rows, following, hazard, seed) for seed in range(12)]
    ours = sum(adaptive(drain) for drain in drains)
    fixed = [
        sum(drain.seconds(lambda at, i=i: i) for drain in drains)
        for i in range(len(drains[0].candidates.nodes))
    ]
    assert ours <= 1.01 * min(fixed)


def adaptive(drain: SimulatedDrain) -> float:
    chooser = drain.selector()
    return drain.seconds(
        lambda at: chooser.candidates.strategies.index(chooser.choose(at).strategy)
    )
