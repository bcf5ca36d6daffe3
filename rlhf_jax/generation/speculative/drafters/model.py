"""Draft by a small model with a cache of its own, sampled with the target's noise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import cast

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.verify_head import tempered
from rlhf_jax.cache.cache import Window
from rlhf_jax.cache.state import DecodeState, DraftState
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.protocol import DraftContext, Drafter, Execute, Proposal
from rlhf_jax.generation.speculative.sampling import Truncation, rank
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.types import Array, Emission, Model, Strategy

CATCH_UP_TOKENS = 8  # Tokens per row that one step of `catch_up` feeds.
# Probabilities of the drafter's best token that separate the confidence classes 1, 2 and 3.
CONFIDENT_PROBABILITIES = (0.3, 0.7)


class ModelDrafter(Drafter):
    """Draft by a small model whose cache is in `DecodeState.draft`."""

    name = "model"
    needs_model = True
    branches = True
    learns_from_texts = True

    def catch_up(self, execute: Execute, state: DecodeState, context: DraftContext) -> DecodeState:
        """Return the state whose draft cache lacks at most one token of each row."""
        return execute(catch_up, context.model, state, layout=context.layout)

    def propose(self, execute: Execute, state: DecodeState, context: DraftContext) -> Proposal:
        """Return the model's own draws, level by level of the strategy's tree."""
        return execute(
            propose,
            context.model,
            state,
            context.strategy,
            context.truncation,
            with_logits=context.with_logits,
            layout=context.layout,
        )

    def after_commit(
        self,
        execute: Execute,
        state: DecodeState,
        proposal: Proposal,
        emission: Emission,
        context: DraftContext,
    ) -> DecodeState:
        """Return the state with the accepted nodes in the draft cache."""
        return execute(
            commit,
            state,
            proposal.window,
            emission.path,
            emission.count,
            context.strategy,
            layout=context.layout,
        )


MODEL = ModelDrafter()


@functools.partial(jax.jit, static_argnames=("strategy", "truncation", "with_logits", "layout"))
def propose(
    drafter: Model,
    state: DecodeState,
    strategy: Strategy,
    truncation: Truncation,
    with_logits: bool = False,
    layout: Layout = ONE_DEVICE,
) -> Proposal:
    """Draft for the strategy's nodes, with the noise that the target will use.

    Level by level: the nodes of one depth that have children are one call; the children of a node
    are the best ranks of the drafter's own draw there. The first call also feeds the token before
    the root, which the cache lacks after a full acceptance; it must lack no more (see `catch_up`).
    The proposal's confidence is the class of the first draft.
    """
    tokens = {0: _token_at(state, state.length - 1)}
    node_logits = {}
    window = None
    fed = 0
    for level in _fed_nodes(strategy):
        hidden, window = _feed(
            drafter, state, strategy, level, tokens=tokens, window=window, fed=fed, layout=layout
        )
        scores = logits(drafter, hidden[:, -len(level) :])
        fed += hidden.shape[1]
        for place, node in enumerate(level):
            node_logits[node] = scores[:, place]
            below = trees.children(strategy, node)
            position = state.length + int(trees.depths(strategy)[node])
            ranked = rank(
                scores[:, place],
                state.key,
                position,
                state.temperature,
                truncation,
                len(below),
                layout,
            )
            tokens |= {child: ranked[:, i] for i, child in enumerate(below)}

    size = trees.bucket(strategy)
    drafts = jnp.stack([tokens[i + 1] for i in range(len(strategy.parents))], axis=1)
    spare = size - 1 - drafts.shape[1]
    drafts = jnp.pad(drafts, ((0, 0), (0, spare)), constant_values=-1)
    stacked = None
    if with_logits:
        unfed = jnp.zeros_like(node_logits[0])
        stacked = jnp.stack([node_logits.get(node, unfed) for node in range(size)], axis=1)
    first = confidence_of(node_logits[0], tokens[1], state.temperature)
    return pin_rows(Proposal(drafts, stacked, window, first), layout)


def confidence_of(scores: jax.Array, token: Array, temperature: Array) -> jax.Array:
    """Return the confidence class [...] int8, 1 to 3, of token [...] under logits [..., V].

    It depends on the token's probability at the temperature [...] (at 1 if that is 0).
    """
    chex.assert_rank(scores, token.ndim + 1)
    z = tempered(scores, temperature)
    chosen = jnp.take_along_axis(z, token[..., None], axis=-1)[..., 0]
    probability = jnp.exp(chosen - jax.nn.logsumexp(z, axis=-1))
    above = sum((probability >= edge).astype(jnp.int8) for edge in CONFIDENT_PROBABILITIES)
    return cast(jax.Array, 1 + above)


def _fed_nodes(strategy: Strategy) -> list[list[int]]:
    """List the nodes with children, by depth: those that the drafter is fed."""
    depth = trees.depths(strategy)
    inner = [node for node in range(len(depth)) if trees.children(strategy, node)]
    return [[node for node in inner if depth[node] == level] for level in range(int(depth.max()))]


def _window_index(strategy: Strategy) -> np.ndarray:
    """Return the window entry [bucket] int32 of each node; nodes that were not fed have the root's.

    Entry 0 is the token before the root, entry 1 the root.
    """
    index = np.ones(trees.bucket(strategy), np.int32)
    order = [node for level in _fed_nodes(strategy) for node in level]
    index[order] = np.arange(len(order)) + 1
    return index


def _feed(
    drafter: Model,
    state: DecodeState,
    strategy: Strategy,
    level: list[int],
    *,
    tokens: Mapping[int, Array],
    window: Window | None,
    fed: int,
    layout: Layout,
) -> tuple[jax.Array, Window]:
    """Feed one level's nodes, after the token before the root if the window is still empty.

    tokens[node] is [B] int32; window holds the `fed` tokens before them. Returns hidden [B, Q, M]
    of the Q tokens fed now, and the grown window.
    """
    queries = jnp.stack([tokens[node] for node in level], axis=1)
    positions = (state.length - 1)[:, None] + trees.depths(strategy)[level]
    if window is None:
        before = state.length - 2
        queries = jnp.concatenate([_token_at(state, before)[:, None], queries], axis=1)
        positions = jnp.concatenate([jnp.maximum(before, 0)[:, None], positions], axis=1)

    # [Q, W]: the token before the root and a node's ancestors.
    ancestors = trees.as_data(strategy, 1).ancestors[0]
    index = _window_index(strategy)
    width = fed + queries.shape[1]
    seen = np.zeros((len(level), width), bool)
    seen[:, 0] = True
    for row, node in enumerate(level):
        seen[row, index[ancestors[node]]] = True
    if level == [0]:
        seen = np.concatenate([np.eye(1, width, dtype=bool), seen])
    mask = jnp.broadcast_to(seen, (queries.shape[0], *seen.shape))
    # A text of one token has none before the root; but a query must see at least itself.
    first = mask[:, :, :1] & (state.length >= 2)[:, None, None]
    first = first.at[:, 0].set(True) if window is None else first
    mask = jnp.concatenate([first, mask[:, :, 1:]], axis=2)

    known = jnp.where(state.done, 0, state.length - 2)
    assert state.draft is not None
    cache = state.draft.cache
    attend = cache.attend(known, mask, layout)
    hidden, kept = forward(drafter, queries, positions, attend, cache.memory(window))
    return hidden, Window(kept)


def _token_at(state: DecodeState, place: Array) -> jax.Array:
    """Return the token [B] int32 at place [B] of each row, the first one if that is negative."""
    return jnp.take_along_axis(state.tokens, jnp.maximum(place, 0)[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("strategy", "layout"), donate_argnames=("state",))
def commit(
    state: DecodeState,
    window: Window,
    path: Array,
    count: Array,
    strategy: Strategy,
    layout: Layout = ONE_DEVICE,
) -> DecodeState:
    """Write a round's accepted nodes into the draft cache. `state` is donated.

    `state` is the state after the round, which emitted count [B] tokens along path [B, N+1]; the
    window began two tokens before the old length. A node that was never fed can only be the last
    one of a fully accepted path: the next call feeds it.
    """
    assert state.draft is not None
    before = state.length - count
    index = jnp.asarray(_window_index(strategy))[path]
    entries = jnp.concatenate([jnp.zeros_like(index[:, :1]), index], axis=1)
    start = jnp.maximum(before - 2, 0)
    entries = jnp.where((before >= 2)[:, None], entries, jnp.roll(entries, -1, axis=1))

    nodes = range(trees.bucket(strategy))
    inner = jnp.asarray(np.array([bool(trees.children(strategy, node)) for node in nodes]))
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    fed = (inner[path] & (steps < count[:, None])).sum(axis=1, dtype=jnp.int32)
    length = jnp.where(count > 0, before - 1 + fed, state.draft.length)

    cache = state.draft.cache.commit(window, entries, start, layout)
    return pin_rows(dataclasses.replace(state, draft=DraftState(cache, length)), layout)


@functools.partial(jax.jit, static_argnames=("layout"), donate_argnames=("state",))
def catch_up(drafter: Model, state: DecodeState, layout: Layout = ONE_DEVICE) -> DecodeState:
    """Feed the draft cache until it lacks at most one token.

    It is needed after rounds of other drafters; it feeds CATCH_UP_TOKENS tokens of every row per
    step. `state` is donated.
    """
    chunk = CATCH_UP_TOKENS

    def is_behind(state: DecodeState) -> jax.Array:
        assert state.draft is not None
        return jnp.any(~state.done & (state.draft.length < state.length - 2))

    def feed_chunk(state: DecodeState) -> DecodeState:
        draft = state.draft
        assert draft is not None
        at = draft.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        last = state.tokens.shape[1] - 1
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(at, last), axis=1)
        triangle = jnp.tril(jnp.ones((chunk, chunk), bool))
        mask = jnp.broadcast_to(triangle, (at.shape[0], chunk, chunk))
        known = jnp.where(state.done, 0, draft.length)
        attend = draft.cache.attend(known, mask, layout)
        _, kept = forward(drafter, tokens, at, attend, draft.cache.memory())

        order = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), at.shape)
        cache = draft.cache.commit(Window(kept), order, draft.length, layout)
        fed = jnp.minimum(draft.length + chunk, state.length - 1)
        length = jnp.maximum(fed, draft.length)
        return dataclasses.replace(state, draft=DraftState(cache, length))

    return pin_rows(jax.lax.while_loop(is_behind, feed_chunk, state), layout)
