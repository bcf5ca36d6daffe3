"""Candidates: their figures, expected tokens against enumeration, and the best trees against brute
force.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import candidates
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.types import Strategy


def random_rates(rng: np.random.Generator, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Rates whose ranks fall and sum to less than 1."""
    found = rng.dirichlet(np.ones(RANKS + 1), (*shape, DEPTHS))[..., :RANKS]
    return -np.sort(-found, axis=-1)


def by_enumeration(strategy: Strategy, rates: np.ndarray) -> float:
    """Expected tokens of a round: 1 and the chance of each draft to be on the accepted path."""
    ranks = trees.ranks(strategy)
    depth = trees.depths(strategy)
    chance = np.ones(len(strategy.parents) + 1)
    for node, parent in enumerate(strategy.parents, start=1):
        chance[node] = chance[parent + 1] * rates[min(depth[node], DEPTHS) - 1, ranks[node]]
    return chance.sum()


def every_tree(size: int) -> set[tuple[int, ...]]:
    """Parents in level order of every tree of `size` drafts with at most RANKS children a node."""
    found = set()
    for parents in itertools.product(*(range(-1, node) for node in range(size))):
        depth = trees.depths(Strategy(parents))
        full = max(parents.count(parent) for parent in parents) <= RANKS
        if full and list(depth) == sorted(depth) and list(parents) == sorted(parents):
            found.add(parents)
    return found


def test_the_adaptive_candidates_are_plain_and_the_chains():
    choices = candidates.parse("adaptive", ["lookup", "replay", "model"])
    names = {trees.name_of(one) for one in choices.strategies}
    free = {
        f"{drafter}-chain-{k}" for drafter in ("lookup", "replay") for k in (*range(1, 9), 16, 32)
    }
    assert choices.strategies[0] == trees.PLAIN
    packed = {f"replay-chain-8-packed-{nodes}" for nodes in (2, 3, 5)}
    assert names == {"plain"} | free | packed | {f"model-chain-{k}" for k in range(1, 9)}


def test_no_strategy_is_longer_than_the_limit():
    choices = candidates.adaptive(["lookup", "model"], longest=5)
    assert max(len(one.parents) for one in choices.strategies) == 5
    rng = np.random.default_rng(0)
    grown = candidates.with_trees(choices, {"model": random_rates(rng)})
    assert max(len(one.parents) for one in grown.strategies) == 5


def test_candidates_count_what_a_round_feeds():
    choices = candidates.build(
        trees.parse(name) for name in ("plain", "lookup-chain-4", "model-chain-3", "model-tree-2x2")
    )
    np.testing.assert_array_equal(choices.nodes, [1, 5, 5, 9])
    np.testing.assert_array_equal(choices.calls.steps, [0, 0, 3, 2])
    # the root and the nodes that have children
    np.testing.assert_array_equal(choices.calls.fed, [0, 0, 3, 3])
    np.testing.assert_array_equal(choices.depth, [0, 4, 3, 2])
    assert [choices.drafters[i] if i >= 0 else "none" for i in choices.drafter] == [
        "none",
        "lookup",
        "model",
        "model",
    ]


def test_a_fixed_name_is_the_one_candidate():
    assert candidates.parse("replay-chain-8", []).strategies == (
        Strategy(trees.chain(8), "replay"),
    )
    assert candidates.parse("plain", ["lookup"]).strategies == (trees.PLAIN,)
    with pytest.raises(ValueError, match="Unknown strategy 'adaptiv'"):
        candidates.parse("adaptiv", ["lookup"])


def test_expected_tokens_are_those_of_enumeration():
    names = (
        "lookup-chain-1",
        "lookup-chain-16",
        "lookup-tree-2x2x2",
        "lookup-parents:-1,-1,-1,0,0,1,3",
        "lookup-chain-5",
    )
    choices = candidates.build([trees.PLAIN, *map(trees.parse, names)])
    rates = random_rates(np.random.default_rng(1), (2, 4))
    found = 1 + candidates.expected_drafts(choices.paths["lookup"], rates)
    for cell in np.ndindex(2, 4):
        wanted = [by_enumeration(one, rates[cell]) for one in choices.strategies[1:]]
        np.testing.assert_allclose(found[cell], wanted, rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_the_best_tree_is_that_of_brute_force(size):
    every = every_tree(size)
    for seed in range(10):
        rates = random_rates(np.random.default_rng(seed))
        found = candidates.best_tree(rates, size)
        best = max(by_enumeration(Strategy(parents), rates) for parents in every)
        assert by_enumeration(Strategy(found), rates) == pytest.approx(best, rel=1e-9)
        assert trees.parse(trees.name_of(Strategy(found, "model"))).parents == found


def test_a_tree_is_as_deep_as_it_may():
    rates = np.tile([0.9, 0.05, 0.01, 0.01], (DEPTHS, 1))
    assert trees.depths(Strategy(candidates.best_tree(rates, 16))).max() == DEPTHS


def test_trees_come_where_they_beat_chains_and_go_where_they_do_not():
    broad = np.tile([0.4, 0.3, 0.2, 0.05], (DEPTHS, 1))
    narrow = np.tile([0.95, 0.01, 0.01, 0.01], (DEPTHS, 1))
    choices = candidates.adaptive(["lookup", "replay", "model"])
    grown = candidates.with_trees(choices, {"model": broad, "lookup": narrow, "replay": broad})
    found = [one for one in grown.strategies if not trees.is_chain(one)]
    assert {(one.drafter, len(one.parents)) for one in found} == {
        ("model", 4),
        ("model", 8),
        ("model", 16),
    }
    assert set(candidates.with_trees(grown, {"model": narrow}).strategies) == set(
        choices.strategies
    )


def test_a_tree_stays_while_no_other_is_clearly_better():
    rates = np.tile([0.4, 0.3, 0.2, 0.05], (DEPTHS, 1))
    grown = candidates.with_trees(candidates.adaptive(["model"]), {"model": rates})
    assert (
        candidates.with_trees(grown, {"model": rates * [1.02, 0.98, 1.0, 1.0]}).strategies
        == grown.strategies
    )
    other = candidates.with_trees(grown, {"model": np.tile([0.7, 0.15, 0.01, 0.01], (DEPTHS, 1))})
    assert set(other.strategies) != set(grown.strategies)
