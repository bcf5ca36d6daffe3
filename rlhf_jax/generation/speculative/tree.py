"""Parse and format names of drafting strategies, and turn strategies into trees on the device."""

from __future__ import annotations

import functools
import itertools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.speculative.protocol import DRAFTERS
from rlhf_jax.runtime import messages
from rlhf_jax.types import Array, Strategy, Tree

PLAIN = Strategy()
messages.register(Strategy)
# Node counts, root included, of a row in one call of the target.
NODE_BUCKETS = (1, 2, 3, 5, 9, 17, 33)


def parse(name: str) -> Strategy:
    """Return the strategy called `name`; raises ValueError with the grammar if there is none."""
    if name == "plain":
        return PLAIN
    drafters = "|".join(DRAFTERS)
    shape = r"chain-\d+|tree-\d+(?:x\d+)*|parents:-?\d+(?:,-?\d+)*"
    match = re.fullmatch(rf"({drafters})-({shape})(?:-packed-(\d+))?", name)
    if match is None:
        raise ValueError(f"Unknown strategy {name!r}: {_grammar()}.")

    kind, figures = re.split("[-:]", match[2], maxsplit=1)
    numbers = tuple(int(figure) for figure in re.split("[x,]", figures))
    counts = {"chain": numbers[0], "parents": len(numbers)}
    drafts = counts.get(kind, sum(itertools.accumulate(numbers, operator.mul)))
    if drafts >= NODE_BUCKETS[-1]:  # checked before they are listed
        raise ValueError(
            f"Strategy {name!r} drafts {drafts} tokens; the most is {NODE_BUCKETS[-1] - 1}."
        )
    if kind == "parents":
        parents = numbers
    else:
        parents = chain(numbers[0]) if kind == "chain" else full_tree(numbers)
    strategy = Strategy(parents, match[1], int(match[3] or 0))

    levels = depths(strategy) if all(-1 <= p < i for i, p in enumerate(parents)) else None
    if levels is None or list(levels) != sorted(levels) or not parents:
        raise ValueError(f"Strategy {name!r} is no tree in level order: {_grammar()}.")
    chains = DRAFTERS[strategy.drafter].packs and is_chain(strategy)
    if match[3] is not None and not (chains and 1 < strategy.packed <= len(parents)):
        packing = " or ".join(drafter.name for drafter in DRAFTERS.values() if drafter.packs)
        raise ValueError(
            f"Strategy {name!r} packs nothing: only chains by {packing} are packed, into 2 nodes a"
            f" row or more, but no more than their {len(parents)} drafts."
        )
    return strategy


def name_of(strategy: Strategy) -> str:
    """Return the name that `parse` reads as the strategy."""
    if not strategy.parents:
        return "plain"
    shape = f"parents:{','.join(map(str, strategy.parents))}"
    if is_chain(strategy):
        shape = f"chain-{len(strategy.parents)}"
    packed = f"-packed-{strategy.packed}" if strategy.packed else ""
    return f"{strategy.drafter}-{shape}{packed}"


def _grammar() -> str:
    """Return a sentence on the grammar of strategies, with the names of the drafters."""
    first, *others = DRAFTERS
    beginnings = ", ".join(f"'{name}-'" for name in others)
    return (
        f"write 'plain', '{first}-chain-4' (or {beginnings}), 'replay-chain-8-packed-3' (the"
        " worthiest drafts only,"
        " so that rows have 3 nodes on average), 'model-tree-2x2x1' (children per level) or"
        " 'model-parents:-1,-1,0,0' (the"
        " parent of each draft, -1 for the last committed token)"
    )


def chain(length: int) -> tuple[int, ...]:
    """Return the parents of a chain of `length` drafts."""
    return tuple(range(-1, length - 1))


def is_chain(strategy: Strategy) -> bool:
    """Return whether the strategy is a chain; plain is a chain without drafts."""
    return strategy.parents == chain(len(strategy.parents))


def full_tree(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parents of the tree whose nodes at level d each have widths[d] children."""
    parents = []
    level = [-1]
    for width in widths:
        born = [parent for parent in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(born)))
        parents += born
    return tuple(parents)


def depths(strategy: Strategy) -> np.ndarray:
    """Return the depth [N+1] int32 of every node, the root first with 0."""
    depth = [0]
    for parent in strategy.parents:
        depth.append(depth[parent + 1] + 1)
    return np.array(depth, np.int32)


def ranks(strategy: Strategy) -> np.ndarray:
    """Return the rank [N+1] int32 of every node among its siblings, 0 the likeliest; root 0."""
    parents = strategy.parents
    return np.array([0, *(parents[:i].count(parent) for i, parent in enumerate(parents))], np.int32)


def children(strategy: Strategy, node: int) -> list[int]:
    """List the children of `node` by rank, as node indices (the root is 0)."""
    return [i + 1 for i, parent in enumerate(strategy.parents) if parent + 1 == node]


def bucket(strategy: Strategy) -> int:
    """Return the nodes of a row in the strategy's round, the root and padding included."""
    return next(size for size in NODE_BUCKETS if size > len(strategy.parents))


@functools.cache
def as_data(strategy: Strategy, rows: int) -> Tree:
    """Return the strategy as a `Tree` of `rows` equal rows, padded to its node bucket.

    The arrays are on the host and must not be written to.
    """
    return Tree(*(np.broadcast_to(leaf, (rows, *leaf.shape)) for leaf in _arrays(strategy)))


@functools.cache
def _arrays(strategy: Strategy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the parents, depths and ancestors of one row of a `Tree`."""
    count = len(strategy.parents)
    size = bucket(strategy)
    parents = np.zeros(size, np.int32)
    depth = np.full(size, -1, np.int32)
    ancestors = np.eye(size, dtype=bool)
    parents[1 : count + 1] = np.array(strategy.parents, np.int32) + 1
    depth[: count + 1] = depths(strategy)
    for node in range(1, count + 1):
        ancestors[node] |= ancestors[parents[node]]
    return parents, depth, ancestors


def path_to(tree: Tree, last: Array) -> jax.Array:
    """Return the node [B, N+1] int32 at each depth on the path from the root to node last[B].

    Beyond its depth, `last` repeats.
    """
    above = jnp.take_along_axis(tree.ancestors, last[:, None, None], axis=1)[:, 0]  # [B, N+1]
    levels = jnp.arange(tree.depth.shape[1], dtype=jnp.int32)
    hit = above[:, None, :] & (tree.depth[:, None, :] == levels[None, :, None])
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1).astype(jnp.int32), last[:, None])


def accept_equal(tokens: Array, draws: Array, tree: Tree) -> jax.Array:
    """Return the deepest node [B] int32 whose whole path equals the target's own draws.

    This is replayable acceptance. tokens [B, N+1] were drafted (node 0 is unused, -1 is never
    accepted); draws [B, N+1] are the target's after each node.
    """
    drawn = jnp.take_along_axis(draws, tree.parents, axis=1)
    fits = (tokens == drawn) & (tree.depth > 0)
    fits = fits.at[:, 0].set(True)
    accepted = jnp.all(fits[:, None, :] | ~tree.ancestors, axis=-1)
    return jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1).astype(jnp.int32)
