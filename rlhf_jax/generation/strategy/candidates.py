"""List the candidate strategies, as arrays that price and value all of them at once."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Mapping

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.protocol import DRAFTERS, drafter_of
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.generation.strategy.roofline import Calls
from rlhf_jax.generation.strategy.settings import CANDIDATE_SETTINGS
from rlhf_jax.types import Strategy

LONGEST_CHAIN = CANDIDATE_SETTINGS.long_chains[-1]  # Most draft tokens of a strategy.


@dataclasses.dataclass(frozen=True)
class Paths:
    """Hold the U distinct nodes of one drafter's strategies.

    A node is identified by the sibling ranks on its path from the root, so strategies may share it.
    """

    columns: np.ndarray  # [S'] int, the drafter's strategies among the candidates
    steps: np.ndarray  # [U, DEPTHS * RANKS] how often a node's path takes the step (depth, rank)
    members: np.ndarray  # [U, S'] 1 where the strategy has the node

    @functools.cached_property
    def columns_and_plain(self) -> np.ndarray:
        """Return [1 + S'] the columns, after that of plain decoding."""
        return np.concatenate([[0], self.columns])


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Hold S strategies: plain decoding first, or one fixed strategy alone."""

    strategies: tuple[Strategy, ...]
    drafters: tuple[str, ...]  # in use, without 'none'
    drafter: np.ndarray  # [S] int, index into `drafters`; -1 for plain
    calls: Calls  # nodes and the grid are node buckets, the root included
    depth: np.ndarray  # [S] int, the longest path
    paths: Mapping[str, Paths]  # by drafter
    # by drafter, its packed chains, if it has any: all of one length
    packed: Mapping[str, np.ndarray]
    longest: int  # most drafts of a strategy

    @property
    def nodes(self) -> np.ndarray:
        """Return [S] int, the verified nodes per row."""
        return self.calls.nodes

    @functools.cached_property
    def place(self) -> dict[Strategy | None, int]:
        """Return the index of each strategy."""
        return {strategy: index for index, strategy in enumerate(self.strategies)}


def build(strategies: Iterable[Strategy], longest: int = LONGEST_CHAIN) -> Candidates:
    """Make candidates of strategies; trees that are added later have at most `longest` drafts."""
    chosen = tuple(dict.fromkeys(strategies))
    drafters = tuple(dict.fromkeys(one.drafter for one in chosen if one.parents))
    depth = np.array([trees.depths(one).max() for one in chosen])
    by_model = np.array([drafter_of(one).needs_model for one in chosen])
    # Nodes with children: the draft model gives the distributions after these.
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


def adaptive(drafters: Iterable[str], longest: int = LONGEST_CHAIN) -> Candidates:
    """Return plain decoding and each drafter's chains of at most `longest` drafts.

    Trees are added once acceptance is measured (`with_trees`).
    """
    strategies = [trees.PLAIN]
    for name in drafters:
        drafter = DRAFTERS[name]
        long_chains = () if drafter.needs_model else CANDIDATE_SETTINGS.long_chains
        lengths = [length for length in (*range(1, DEPTHS + 1), *long_chains) if length <= longest]
        strategies += [Strategy(trees.chain(length), name) for length in lengths]
        if drafter.packs and longest >= CANDIDATE_SETTINGS.packed_chain:
            chain = trees.chain(CANDIDATE_SETTINGS.packed_chain)
            strategies += [
                Strategy(chain, name, nodes) for nodes in CANDIDATE_SETTINGS.packed_nodes
            ]
    return build(strategies, longest)


def parse(name: str, drafters: Iterable[str], longest: int = LONGEST_CHAIN) -> Candidates:
    """Return the candidates of a name: 'adaptive', or that of one strategy.

    Raises ValueError for an unknown name.
    """
    return adaptive(drafters, longest) if name == "adaptive" else build([trees.parse(name)])


def with_trees(candidates: Candidates, rates: Mapping[str, np.ndarray]) -> Candidates:
    """Return plain decoding, the chains, and the best trees by measured rates.

    rates: [DEPTHS, RANKS] by drafter. A tree stays while no other of its size is better, as a new
    one is a new program; one that is no better than the chain of its size is dropped.
    """
    known = candidates.strategies
    chosen = [one for one in known if trees.is_chain(one)]
    for drafter in (one for one in candidates.drafters if DRAFTERS[one].branches and one in rates):
        grown = [one for one in known if one.drafter == drafter and not trees.is_chain(one)]
        old = {len(one.parents): one for one in grown}
        for size in (size for size in CANDIDATE_SETTINGS.tree_sizes if size <= candidates.longest):
            best = Strategy(trees.chain(size), drafter)
            for other in [old.get(size), Strategy(best_tree(rates[drafter], size), drafter)]:
                needed = CANDIDATE_SETTINGS.better_tree * expected_tokens(best, rates[drafter])
                if other and expected_tokens(other, rates[drafter]) > needed:
                    best = other
            chosen.append(best)

    # A chain that replaced a tree is a candidate only if it was one before.
    kept = (one for one in chosen if one in known or not trees.is_chain(one))
    return build(kept, candidates.longest)


def best_tree(rates: np.ndarray, size: int) -> tuple[int, ...]:
    """Return the parents, in level order, of the tree with the most expected tokens.

    size: its drafts, on at most DEPTHS levels; rates [DEPTHS, RANKS], none above those before it in
    its row. The optimum of Sequoia (Chen et al. 2024) without its table: a node's chance is the
    product of rates on its path, independent of the rest of the tree, and never more than that of
    its parent or of the sibling before it. So the likeliest nodes, taken one by one, make an
    optimal tree.
    """
    chosen: list[tuple[int, ...]] = []
    # The chance (negated, as a heap begins with the least), depth and path of each open node.
    open_nodes: list[tuple[float, int, tuple[int, ...]]] = [(-rates[0, 0], 1, (0,))]
    while open_nodes and len(chosen) < size:
        chance, depth, path = heapq.heappop(open_nodes)
        chosen.append(path)
        if path[-1] + 1 < rates.shape[1]:
            ratio = rates[depth - 1, path[-1] + 1] / max(rates[depth - 1, path[-1]], 1e-9)
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(open_nodes, (chance * ratio, depth, sibling))
        if depth < DEPTHS:
            rate = rates[depth, 0]
            heapq.heappush(open_nodes, (chance * rate, depth + 1, (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    return tuple(chosen.index(path[:-1]) if len(path) > 1 else -1 for path in chosen)


def expected_drafts(paths: Paths, rates: np.ndarray) -> np.ndarray:
    """Return [..., S'] draft tokens that a row's round is expected to accept.

    They are the sum, over nodes, of the product of rates on the path (Chen et al. 2024, Sequoia,
    section 3). rates [..., DEPTHS, RANKS], above 0; depths beyond the last use its rate.
    """
    logs = np.log(np.maximum(rates, 1e-9)).reshape(*rates.shape[:-2], DEPTHS * RANKS)
    return np.exp(logs @ paths.steps.T) @ paths.members


def expected_tokens(strategy: Strategy, rates: np.ndarray) -> float:
    """Return the expected tokens of a row's round: accepted drafts and the target's own draw.

    rates [DEPTHS, RANKS].
    """
    return 1.0 + float(expected_drafts(_paths((strategy,), strategy.drafter), rates)[0])


def _paths(strategies: tuple[Strategy, ...], drafter: str) -> Paths:
    """Find the distinct nodes of a drafter's strategies."""
    columns = []
    owned = []  # the paths of each column's strategy
    for column, one in enumerate(strategies):
        if one.parents and one.drafter == drafter:
            ranks = trees.ranks(one)
            paths = [tuple[int, ...]()]
            for node, parent in enumerate(one.parents, start=1):
                paths.append((*paths[parent + 1], int(ranks[node])))
            columns.append(column)
            owned.append(paths[1:])

    distinct = dict.fromkeys(path for paths in owned for path in paths)
    index = {path: place for place, path in enumerate(distinct)}
    steps = np.zeros((len(index), DEPTHS * RANKS))
    members = np.zeros((len(index), len(columns)))
    for path, place in index.items():
        for depth, rank in enumerate(path):
            steps[place, min(depth, DEPTHS - 1) * RANKS + min(rank, RANKS - 1)] += 1
    for column, paths in enumerate(owned):
        members[[index[path] for path in paths], column] = 1
    return Paths(np.array(columns), steps, members)
