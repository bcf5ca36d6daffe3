"""Drafts by a small model with a cache of its own, sampled with the target's noise."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling, rank
from rlhf_jax.mesh import pin_rows
from rlhf_jax.model import kernels as laid
from rlhf_jax.model.attention import cached
from rlhf_jax.model.transformer import forward, logits
from rlhf_jax.types import Array, Cache, DecodeState, DraftState, Model, Strategy

CHUNK = 8  # tokens a catch-up step feeds


SURE = (0.3, 0.7)  # probabilities of the best token that divide the confidence classes 1, 2 and 3


class Proposal(NamedTuple):
    """What a draft model proposes for one round."""

    drafts: Array  # [B, bucket - 1] int32
    laws: Array | None  # [B, bucket, V] float32, its logits at each node, where they were asked for
    window: Cache  # for `commit`
    confidence: Array  # [B] int8, the class of its own first draft


@functools.partial(
    jax.jit, static_argnames=("strategy", "sampling", "with_laws", "kernels", "mesh")
)
def propose(
    drafter: Model,
    state: DecodeState,
    strategy: Strategy,
    sampling: Sampling,
    with_laws: bool = False,
    kernels: Kernels = REFERENCE,
    mesh=None,
) -> Proposal:
    """Drafts for the strategy's nodes, drawn with the noise that the target will use.

    Level by level: the nodes of one depth that have children are one call; the children of a node
    are the best ranks of the drafter's own draw there. The first call also feeds the token before
    the root, which the cache lacks after a full acceptance; it must lack no more (see `catch_up`).
    """
    tokens = {0: _token_at(state, state.length - 1)}
    laws = {}
    window = ()
    seen = 0
    attention = laid.tree_attention(kernels, mesh)
    for level in _fed_nodes(strategy):
        hidden, window = _feed(drafter, state, strategy, level, tokens, window, seen, attention)
        scores = logits(drafter, hidden[:, -len(level) :])
        seen += hidden.shape[1]
        for place, node in enumerate(level):
            laws[node] = scores[:, place]
            below = trees.children(strategy, node)
            position = state.length + int(trees.depths(strategy)[node])
            ranked = rank(scores[:, place], state.key, position, sampling, len(below))
            tokens |= {child: ranked[:, i] for i, child in enumerate(below)}
    drafts = jnp.stack([tokens[i + 1] for i in range(len(strategy.parents))], axis=1)
    spare = trees.bucket(strategy) - 1 - drafts.shape[1]
    drafts = jnp.pad(drafts, ((0, 0), (0, spare)), constant_values=-1)
    stacked = _stack_laws(laws, trees.bucket(strategy)) if with_laws else None
    return pin_rows(
        Proposal(drafts, stacked, window, confidence(laws[0], tokens[1], sampling)), mesh
    )


def confidence(scores: Array, token: Array, sampling: Sampling) -> Array:
    """[...] int8 the class 1..3 of the probability of token [...] under logits [..., V] at the
    temperature (1 if 0).
    """
    chex.assert_rank(scores, token.ndim + 1)
    tempered = scores / (sampling.temperature or 1.0)
    chosen = jnp.take_along_axis(tempered, token[..., None], axis=-1)[..., 0]
    probability = jnp.exp(chosen - jax.nn.logsumexp(tempered, axis=-1))
    return 1 + sum((probability >= edge).astype(jnp.int8) for edge in SURE)


def _fed_nodes(strategy: Strategy) -> list[list[int]]:
    """Nodes with children, by depth: those whose hidden states are wanted."""
    depth = trees.depths(strategy)
    inner = [node for node in range(len(depth)) if trees.children(strategy, node)]
    return [[node for node in inner if depth[node] == level] for level in range(int(depth.max()))]


def _window_index(strategy: Strategy) -> np.ndarray:
    """[bucket] window entry of each node; entry 0 is the token before the root, unfed nodes point
    at the root.
    """
    index = np.ones(trees.bucket(strategy), np.int32)
    order = [node for level in _fed_nodes(strategy) for node in level]
    index[order] = np.arange(len(order)) + 1
    return index


def _feed(drafter, state, strategy, level, tokens, window, seen, attention):
    depth = trees.depths(strategy)[level]
    queries = jnp.stack([tokens[node] for node in level], axis=1)
    positions = (state.length - 1)[:, None] + depth
    if not window:
        queries = jnp.concatenate([_token_at(state, state.length - 2)[:, None], queries], axis=1)
        positions = jnp.concatenate([jnp.maximum(state.length - 2, 0)[:, None], positions], axis=1)
    mask = _window_mask(strategy, level, seen + queries.shape[1])
    mask = jnp.broadcast_to(mask, (queries.shape[0], *mask.shape))
    first = mask[:, :, :1] & (state.length >= 2)[:, None, None]
    first = first.at[:, 0].set(True) if not window else first  # a query sees at least itself
    mask = jnp.concatenate([first, mask[:, :, 1:]], axis=2)
    attend = functools.partial(
        cached, length=jnp.where(state.done, 0, state.length - 2), mask=mask, attend=attention
    )
    past = window or (None,) * len(state.draft.cache)
    return forward(
        drafter, queries, positions, attend, tuple(zip(state.draft.cache, past, strict=True))
    )


def _window_mask(strategy: Strategy, level: list[int], width: int) -> np.ndarray:
    """[Q, W] what the nodes of a level see: the token before the root and their own ancestors."""
    ancestors = trees.as_data(strategy, 1).ancestors[0]
    index = _window_index(strategy)
    mask = np.zeros((len(level), width), bool)
    mask[:, 0] = True
    for row, node in enumerate(level):
        mask[row, index[ancestors[node]]] = True
    if level == [0]:
        mask = np.concatenate([np.eye(1, width, dtype=bool), mask])
    return mask


def _stack_laws(laws: dict[int, Array], size: int) -> Array:
    blank = jnp.zeros_like(laws[0])
    return jnp.stack([laws.get(node, blank) for node in range(size)], axis=1)


def _token_at(state: DecodeState, place: Array) -> Array:
    return jnp.take_along_axis(state.tokens, jnp.maximum(place, 0)[:, None], axis=1)[:, 0]


@functools.partial(
    jax.jit, static_argnames=("strategy", "kernels", "mesh"), donate_argnames=("state",)
)
def commit(
    state: DecodeState,
    window: Cache,
    path: Array,
    count: Array,
    strategy: Strategy,
    kernels: Kernels = REFERENCE,
    mesh=None,
) -> DecodeState:
    """The draft cache after a round that emitted count[B] tokens along path[B, N+1]. `state` is
    donated.

    `state` is the state after the round; the window began two tokens before the old length. A node
    that was never fed can only be the last one of a fully accepted path: it is left to the next
    call.
    """
    assert state.draft is not None
    before = state.length - count
    index = jnp.asarray(_window_index(strategy))[path]
    entries = jnp.concatenate([jnp.zeros_like(index[:, :1]), index], axis=1)
    start = jnp.maximum(before - 2, 0)
    entries = jnp.where((before >= 2)[:, None], entries, jnp.roll(entries, -1, axis=1))
    inner = jnp.asarray(
        np.array([bool(trees.children(strategy, n)) for n in range(trees.bucket(strategy))])
    )
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    fed = (inner[path] & (steps < count[:, None])).sum(axis=1, dtype=jnp.int32)
    length = jnp.where(count > 0, before - 1 + fed, state.draft.length)
    draft = DraftState(
        laid.commit(kernels, mesh)(state.draft.cache, window, entries, start), length
    )
    return pin_rows(dataclasses.replace(state, draft=draft), mesh)


@functools.partial(jax.jit, static_argnames=("kernels", "mesh"), donate_argnames=("state",))
def catch_up(
    drafter: Model, state: DecodeState, kernels: Kernels = REFERENCE, mesh=None
) -> DecodeState:
    """Feed what the draft cache has not seen, until it lacks one token at most. `state` is donated.

    Needed after rounds that drafted otherwise; CHUNK tokens of every row a step.
    """

    attention = laid.tree_attention(kernels, mesh)
    write = laid.commit(kernels, mesh)

    def lagging(state):
        return jnp.any(~state.done & (state.draft.length < state.length - 2))

    def step(state):
        at = state.draft.length[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
        tokens = jnp.take_along_axis(
            state.tokens, jnp.minimum(at, state.tokens.shape[1] - 1), axis=1
        )
        mask = jnp.broadcast_to(
            jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (at.shape[0], CHUNK, CHUNK)
        )
        known = jnp.where(state.done, 0, state.draft.length)
        attend = functools.partial(cached, length=known, mask=mask, attend=attention)
        layers = tuple((layer, None) for layer in state.draft.cache)
        _, window = forward(drafter, tokens, at, attend, layers)
        order = jnp.broadcast_to(jnp.arange(CHUNK, dtype=jnp.int32), at.shape)
        cache = write(state.draft.cache, window, order, state.draft.length)
        length = jnp.maximum(
            jnp.minimum(state.draft.length + CHUNK, state.length - 1), state.draft.length
        )
        return dataclasses.replace(state, draft=DraftState(cache, length))

    return pin_rows(jax.lax.while_loop(lagging, step, state), mesh)
