"""Strategies as names, as trees and as the arrays of the device, against walks in plain Python."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.types import Strategy

TREES = [(), (-1,), (-1, 0, 1), (-1, -1, 0, 0, 1, 4), (-1, -1, -1, 1, 1, 3, 4, 4), trees.chain(32)]

NAMES = {  # of a strategy that each name gives
    "plain": ((), "none", 0),
    "lookup-chain-1": ((-1,), "lookup", 0),
    "replay-chain-3": ((-1, 0, 1), "replay", 0),
    "model-chain-32": (tuple(range(-1, 31)), "model", 0),
    "replay-chain-8-packed-2": (tuple(range(-1, 7)), "replay", 2),
    "replay-chain-8-packed-8": (tuple(range(-1, 7)), "replay", 8),
    "model-parents:-1,-1,0,0": ((-1, -1, 0, 0), "model", 0),
    "lookup-parents:-1,-1,-1,0,2": ((-1, -1, -1, 0, 2), "lookup", 0),
}
SHORTER = {  # names that are read, and then written otherwise
    "model-tree-3": ((-1, -1, -1), "model", 0),
    "model-tree-2x2": ((-1, -1, 0, 0, 1, 1), "model", 0),
    "model-tree-1x2x1": ((-1, 0, 0, 1, 2), "model", 0),
    "lookup-tree-1x1": ((-1, 0), "lookup", 0),
    "model-parents:-1,0,1": ((-1, 0, 1), "model", 0),
    "model-tree-32": ((-1,) * 32, "model", 0),
}


@pytest.mark.parametrize("name", NAMES | SHORTER)
def test_a_name_is_its_strategy(name):
    parents, drafter, packed = (NAMES | SHORTER)[name]
    strategy = Strategy(parents, drafter, packed) if parents else trees.PLAIN
    assert trees.parse(name) == strategy
    assert (trees.name_of(strategy) == name) == (name in NAMES)
    assert trees.parse(trees.name_of(strategy)) == strategy


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chain-4", r"Unknown strategy 'chain-4': write 'plain'"),
        ("plain-4", "Unknown strategy 'plain-4'"),
        ("model-chain-33", r"'model-chain-33' drafts 33 tokens; the most is 32\."),
        ("model-tree-4x8", r"drafts 36 tokens; the most is 32\."),
        ("model-tree-99999x99999x99999", r"the most is 32\."),
        ("model-parents:" + ",".join(["-1"] * 33), r"drafts 33 tokens; the most is 32\."),
        ("model-chain-0", "'model-chain-0' is no tree in level order"),
        ("model-parents:0", "is no tree in level order"),
        ("model-parents:-1,1", "is no tree in level order"),
        ("model-parents:-2,0", "is no tree in level order"),
        ("model-parents:-1,0,-1", "is no tree in level order"),
        ("replay-chain-8-packed-1", "packs nothing: only chains by .*replay.* are packed"),
        ("replay-chain-8-packed-9", "no more than their 8 drafts"),
        ("replay-tree-2-packed-2", "packs nothing"),
        ("model-chain-8-packed-2", "packs nothing"),
    ],
)
def test_a_name_that_is_none_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        trees.parse(name)


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root, 0, down to a node."""
    return [*path(parents, parents[node - 1] + 1), node] if node else [0]


@pytest.mark.parametrize("parents", TREES, ids=len)
def test_trees_are_those_of_a_walk(parents):
    strategy = Strategy(parents, "model")
    paths = [path(parents, node) for node in range(len(parents) + 1)]
    assert trees.depths(strategy).tolist() == [len(one) - 1 for one in paths]
    by_parent: dict[int, list[int]] = {node: [] for node in range(len(parents) + 1)}
    for node, parent in enumerate(parents, start=1):
        by_parent[parent + 1].append(node)
    assert all(trees.children(strategy, node) == own for node, own in by_parent.items())
    ranks = [0, *(by_parent[parent + 1].index(i) for i, parent in enumerate(parents, start=1))]
    assert trees.ranks(strategy).tolist() == ranks
    assert trees.is_chain(strategy) == all(len(own) <= 1 for own in by_parent.values())

    data = trees.as_data(strategy, 3)
    size = len(data.depth[0])
    assert size == trees.bucket(strategy)
    assert size == min(each for each in (1, 2, 3, 5, 9, 17, 33) if each >= len(parents) + 1)
    padding = [0] * (size - len(parents) - 1)
    above = np.eye(size, dtype=bool)
    for node, one in enumerate(paths):
        above[node, one] = True
    depths = [*(len(one) - 1 for one in paths), *(-1 for _ in padding)]
    for row in range(3):
        assert data.parents[row].tolist() == [0, *(parent + 1 for parent in parents), *padding]
        assert data.depth[row].tolist() == depths
        np.testing.assert_array_equal(data.ancestors[row], above)


def deepest(parents: tuple[int, ...], tokens: np.ndarray, draws: np.ndarray) -> int:
    """The first of the deepest nodes all of whose path was drawn."""
    best = [0]
    for node in range(len(parents) + 1):
        way = path(parents, node)
        drawn = all(tokens[below] == draws[above] for above, below in itertools.pairwise(way))
        if drawn and len(way) > len(best):
            best = way
    return best[-1]


@pytest.mark.parametrize("parents", TREES, ids=len)
def test_the_path_that_is_accepted_is_that_of_a_walk(parents):
    """Of two tokens, so that half of the drafts are right; -1 is no draft, nor is it drawn."""
    rows = 64
    random = np.random.default_rng(len(parents))
    data = trees.as_data(Strategy(parents, "model"), rows)
    shape = data.depth.shape
    tokens = random.integers(-1, 2, shape, dtype=np.int32)
    tokens[: rows // 2] = 1
    draws = np.where(random.random(shape) < 0.8, 1, 0).astype(np.int32)
    last = np.asarray(jax.jit(trees.accept_equal)(tokens, draws, data))
    wanted = [deepest(parents, *pair) for pair in zip(tokens, draws, strict=True)]
    assert last.tolist() == wanted
    ways = np.asarray(jax.jit(trees.path_to)(data, last)).tolist()
    for way, node in zip(ways, wanted, strict=True):
        one = path(parents, node)
        assert way == one + [node] * (shape[1] - len(one))
