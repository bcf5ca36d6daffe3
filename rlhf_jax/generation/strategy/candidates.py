"""Which strategies may be chosen, as arrays that price and value all of them at once."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Mapping

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.generation.strategy.cost import Calls
from rlhf_jax.types import Strategy

CHAINS = tuple(range(1, DEPTHS + 1))
LONG_CHAINS = (16, 32)  # of drafters that draft without a model
TREE_SIZES = (4, 8, 16)  # draft nodes
BRANCHING = ("lookup", "model")  # drafters whose siblings are worth trees
# drafters whose rows differ so much that packed rounds are worth their programs
PACKING = ("replay",)
# drafts of such a round's chains, and nodes a row that it verifies
PACKED_CHAIN = 8
PACKED_NODES = (2, 3, 5)
# expected tokens over those of the shape it replaces that make a tree worth a program
BETTER = 1.02


@dataclasses.dataclass(frozen=True)
class Paths:
    """All nodes of one drafter's strategies, each named by the ranks on its way from the root. U
    distinct nodes.
    """

    columns: np.ndarray  # [S'] int, the drafter's strategies in the menu
    steps: np.ndarray  # [U, DEPTHS * RANKS] how often a node's path takes the step (depth, rank)
    members: np.ndarray  # [U, S'] 1 where the strategy has the node

    @functools.cached_property
    def plain_too(self) -> np.ndarray:
        """[1 + S'] the columns, after that of plain decoding."""
        return np.concatenate([[0], self.columns])


@dataclasses.dataclass(frozen=True)
class Candidates:
    """S strategies, plain first (a menu of one fixed strategy holds that alone)."""

    strategies: tuple[Strategy, ...]
    drafters: tuple[str, ...]  # that occur, 'none' left out
    drafter: np.ndarray  # [S] int, index into `drafters`; -1 for plain
    calls: Calls  # nodes and the grid are node buckets, the root included
    depth: np.ndarray  # [S] int, the longest path
    paths: Mapping[str, Paths]  # by drafter
    # by drafter, its packed chains, if it has any: all of one length
    packed: Mapping[str, np.ndarray]
    longest: int  # drafts of a strategy at most

    @property
    def nodes(self) -> np.ndarray:
        """[S] int, verified a row."""
        return self.calls.nodes

    @functools.cached_property
    def place(self) -> dict[Strategy | None, int]:
        """The index of each strategy."""
        return {strategy: index for index, strategy in enumerate(self.strategies)}


def build(strategies: Iterable[Strategy], longest: int = LONG_CHAINS[-1]) -> Candidates:
    """The menu of these strategies; trees that join it later have at most `longest` drafts."""
    chosen = tuple(dict.fromkeys(strategies))
    drafters = tuple(dict.fromkeys(one.drafter for one in chosen if one.parents))
    depth = np.array([trees.depths(one).max() for one in chosen])
    by_model = np.array([one.drafter == "model" for one in chosen])
    # nodes with children: those whose law is wanted
    inner = np.array([len(set(one.parents)) for one in chosen])
    packed: dict[str, list[int]] = {}
    for column, one in enumerate(chosen):
        if one.packed:
            packed.setdefault(one.drafter, []).append(column)
    return Candidates(
        strategies=chosen,
        drafters=drafters,
        drafter=np.array([drafters.index(one.drafter) if one.parents else -1 for one in chosen]),
        calls=Calls(
            nodes=np.array([one.packed or trees.bucket(one) for one in chosen]),
            steps=depth * by_model,
            fed=inner * by_model,
            grid=np.array([trees.bucket(one) for one in chosen]),
        ),
        depth=depth,
        paths={drafter: _paths(chosen, drafter) for drafter in drafters},
        packed={drafter: np.array(columns) for drafter, columns in packed.items()},
        longest=longest,
    )


def adaptive(drafters: Iterable[str], longest: int = LONG_CHAINS[-1]) -> Candidates:
    """Plain and, for each drafter, the chains of at most `longest` drafts; trees join once
    acceptance is measured.
    """
    strategies = [trees.PLAIN]
    for drafter in drafters:
        lengths = CHAINS if drafter == "model" else CHAINS + LONG_CHAINS
        strategies += [
            Strategy(trees.chain(length), drafter) for length in lengths if length <= longest
        ]
        if drafter in PACKING and longest >= PACKED_CHAIN:
            strategies += [
                Strategy(trees.chain(PACKED_CHAIN), drafter, nodes) for nodes in PACKED_NODES
            ]
    return build(strategies, longest)


def parse(name: str, drafters: Iterable[str], longest: int = LONG_CHAINS[-1]) -> Candidates:
    """The menu called `name`: 'adaptive', or one strategy's name for a menu of that alone. Raises
    ValueError.
    """
    return adaptive(drafters, longest) if name == "adaptive" else build([trees.parse(name)])


def _rank_paths(strategy: Strategy) -> list[tuple[int, ...]]:
    """The ranks on the way from the root to each draft node."""
    ranks = trees.ranks(strategy)
    paths = [tuple[int, ...]()]
    for node, parent in enumerate(strategy.parents, start=1):
        paths.append((*paths[parent + 1], int(ranks[node])))
    return paths[1:]


def _paths(strategies: tuple[Strategy, ...], drafter: str) -> Paths:
    columns = [
        column for column, one in enumerate(strategies) if one.parents and one.drafter == drafter
    ]
    owned = [_rank_paths(strategies[column]) for column in columns]
    index = {
        path: place
        for place, path in enumerate(dict.fromkeys(path for paths in owned for path in paths))
    }
    steps = np.zeros((len(index), DEPTHS * RANKS))
    members = np.zeros((len(index), len(columns)))
    for path, place in index.items():
        for depth, rank in enumerate(path):
            steps[place, min(depth, DEPTHS - 1) * RANKS + min(rank, RANKS - 1)] += 1
    for column, paths in enumerate(owned):
        members[[index[path] for path in paths], column] = 1
    return Paths(np.array(columns), steps, members)


def expected_drafts(paths: Paths, rates: np.ndarray) -> np.ndarray:
    """[..., S'] expected draft tokens accepted in a row's round: sum over nodes of the product of
    rates on the path.

    rates [..., DEPTHS, RANKS], above 0. Depths beyond the last use its rate. (Chen et al. 2024,
    Sequoia, section 3.)
    """
    logs = np.log(np.maximum(rates, 1e-9)).reshape(*rates.shape[:-2], DEPTHS * RANKS)
    return np.exp(logs @ paths.steps.T) @ paths.members


def best_tree(rates: np.ndarray, size: int, deepest: int = DEPTHS) -> tuple[int, ...]:
    """Parents, in level order, of the tree of `size` drafts, `deepest` levels at most, that expects
    most tokens.

    rates [DEPTHS, RANKS], none above those before it in its row. Sequoia's optimum (Chen et al.
    2024), without its table: a node is worth the product of rates on its path, whatever else the
    tree holds, never more than its parent or the sibling before it, so that taking the worthiest
    nodes one by one yields a tree, and none is worth more.
    """
    found: list[tuple[int, ...]] = []
    # worth (below 0), depth, ranks
    open_nodes: list[tuple[float, int, tuple[int, ...]]] = [(-rates[0, 0], 1, (0,))]
    while open_nodes and len(found) < size:
        worth, depth, path = heapq.heappop(open_nodes)
        found.append(path)
        if path[-1] + 1 < rates.shape[1]:
            ratio = rates[depth - 1, path[-1] + 1] / max(rates[depth - 1, path[-1]], 1e-9)
            heapq.heappush(open_nodes, (worth * ratio, depth, (*path[:-1], path[-1] + 1)))
        if depth < deepest:
            heapq.heappush(
                open_nodes, (worth * rates[min(depth, len(rates) - 1), 0], depth + 1, (*path, 0))
            )
    found.sort(key=lambda path: (len(path), path))
    return tuple(found.index(path[:-1]) if len(path) > 1 else -1 for path in found)


def with_trees(menu: Candidates, rates: Mapping[str, np.ndarray]) -> Candidates:
    """The menu with the trees that measured rates ([DEPTHS, RANKS] by drafter) call for; plain and
    chains stay.

    A tree of the menu stays while no other of its size is better, for a new one is a new program; a
    tree that is no better than the chain of its size goes.
    """
    chosen = [one for one in menu.strategies if trees.is_chain(one)]
    for drafter in (drafter for drafter in BRANCHING if drafter in rates):
        old = {
            len(one.parents): one
            for one in menu.strategies
            if one.drafter == drafter and not trees.is_chain(one)
        }
        sizes = [size for size in TREE_SIZES if size <= menu.longest]
        chosen += [_worthiest(drafter, size, old.get(size), rates[drafter]) for size in sizes]
    in_menu = (one for one in chosen if one in menu.strategies or not trees.is_chain(one))
    return build(in_menu, menu.longest)


def _worthiest(drafter: str, size: int, old: Strategy | None, rates: np.ndarray) -> Strategy:
    """The chain of this size, or a tree that is clearly better: rather the old one than a new
    one.
    """
    best = Strategy(trees.chain(size), drafter)
    for candidate in [old, Strategy(best_tree(rates, size), drafter)]:
        if candidate and expected_tokens(candidate, rates) > BETTER * expected_tokens(best, rates):
            best = candidate
    return best


def expected_tokens(strategy: Strategy, rates: np.ndarray) -> float:
    """Tokens that a row's round yields: the accepted drafts and the target's own draw. rates
    [DEPTHS, RANKS].
    """
    return 1.0 + float(expected_drafts(_paths((strategy,), strategy.drafter), rates)[0])
