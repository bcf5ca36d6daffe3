"""One round of speculative decoding: verify, accept, commit. Drafting is the drafters' part.

Plain decoding is the round with no drafts. A round changes only rows that are not done.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax.generation.speculative import rejection
from rlhf_jax.generation.speculative.budget import Packing, pack
from rlhf_jax.generation.speculative.sampling import Draw, Sampling, block_noise, draw, draw_inside
from rlhf_jax.generation.speculative.tree import accept_equal, path_to
from rlhf_jax.mesh import pin_rows
from rlhf_jax.model import kernels as laid
from rlhf_jax.model.attention import cached
from rlhf_jax.model.transformer import forward, logits
from rlhf_jax.types import Array, Cache, DecodeState, Emission, Model, Tree


class Verified(NamedTuple):
    """What the target says of every node: its own draw, that draw's log-prob, and the window to
    commit from.
    """

    draw: Draw
    logits: Array | None  # [B, N+1, V] float32; None where they never existed, or are packed
    window: Cache


def verify(
    target: Model,
    state: DecodeState,
    nodes: Array,
    tree: Tree,
    sampling: Sampling,
    rule: str,
    kernels: Kernels,
    mesh,
    packing: Packing | None = None,
) -> Verified:
    """One call of the target over nodes [B, N+1] (the root and the drafts) of every row, or those
    that are packed.

    The draw at a node of depth d decides the token at position length + d, with that position's
    noise.
    """
    depth = jnp.maximum(tree.depth, 0)
    known = jnp.where(state.done, 0, state.length - 1)  # a row that is done reads nothing
    attention = laid.tree_attention(kernels, mesh)
    attend = functools.partial(cached, length=known, mask=tree.ancestors, attend=attention)
    key = state.key[:, None]
    positions = (state.length - 1)[:, None] + depth
    if packing is not None:
        key = jnp.broadcast_to(key, (*nodes.shape, 2))
        nodes, positions, key = map(packing.pack, (nodes, positions, key))
        attend = packing.attention(attend)
    hidden, window = forward(
        target, nodes, positions, attend, tuple((layer, None) for layer in state.cache)
    )
    drawn, scores = _drawn(target, hidden, key, positions + 1, sampling, rule, kernels, mesh)
    if packing is not None:
        drawn = jax.tree.map(packing.unpack, drawn)
        scores = None
    return Verified(drawn, scores, window)


def _drawn(
    target: Model, hidden: Array, key, position, sampling, rule, kernels, mesh
) -> tuple[Draw, Array | None]:
    """The draw at each hidden state, and the logits where they were made."""
    if streams_head(kernels, sampling, rule):
        # filled up, too
        noise = block_noise(key, position, len(target.embed)) if sampling.temperature else None
        parts = laid.verify_head(kernels, mesh)(target, hidden, noise, sampling.temperature)
        return draw_inside(parts, key, position, sampling), None
    scores = logits(target, hidden)
    return draw(scores, key, position, sampling), scores


def streams_head(kernels: Kernels, sampling: Sampling, rule: str) -> bool:
    """Whether a round does without logits: truncation and rejection need all of a node's at
    once.
    """
    return (
        kernels.verify_head != "reference"
        and rule == "replayable"
        and not sampling.top_k
        and sampling.top_p == 1
    )


def accept(
    verified: Verified, nodes: Array, tree: Tree, laws: Array | None, state, sampling, rule: str
):
    """(draws [B, N+1], log-probs [B, N+1], last [B]) under the rule 'replayable' or 'rejection'."""
    if rule == "replayable":
        token = verified.draw.token
        logprob = verified.draw.logprob
        return token, logprob, accept_equal(nodes, token, tree)
    return rejection.accept(nodes, tree, verified.logits, laws, state.key, state.length, sampling)


def emit(
    state: DecodeState, path: Array, draws: Draw, depth: Array, stop_tokens: tuple[int, ...]
) -> Emission:
    """The tokens a row gains along path [B, N+1], cut at the first stop token and at the row's
    limit.
    """
    tokens = jnp.take_along_axis(draws.token, path, axis=1)
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)
    stops = jnp.isin(tokens, jnp.asarray(stop_tokens, jnp.int32)) & (steps <= depth[:, None])
    to_stop = jnp.where(
        stops.any(1), jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, path.shape[1] + 1
    )
    count = jnp.minimum(jnp.minimum(depth + 1, to_stop), state.limit - state.length)
    count = jnp.where(state.done, 0, count)
    support = draws.support
    return Emission(
        tokens=tokens,
        logprobs=jnp.take_along_axis(draws.logprob, path, axis=1),
        support=None if support is None else jnp.take_along_axis(support, path[..., None], axis=1),
        count=count,
        accepted=jnp.minimum(depth, count),
        path=path,
        done=state.done | (to_stop <= count) | (state.length + count >= state.limit),
    )


def commit(
    state: DecodeState, window: Cache, path: Array, emission: Emission, kernels, mesh
) -> DecodeState:
    """The state after the round: tokens appended, the path's cache entries in place."""
    slots = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None] - state.length[:, None]
    fresh = (slots >= 0) & (slots < emission.count[:, None])
    taken = jnp.take_along_axis(emission.tokens, jnp.clip(slots, 0, path.shape[1] - 1), axis=1)
    # No token is negative: adding zero makes the write wait for the last read, so that XLA writes
    # in place.
    start = state.length - 1 + jnp.minimum(emission.tokens[:, 0], 0)
    return dataclasses.replace(
        state,
        tokens=jnp.where(fresh, taken, state.tokens),
        length=state.length + emission.count,
        done=emission.done,
        cache=laid.commit(kernels, mesh)(state.cache, window, path, start),
    )


@functools.partial(
    jax.jit,
    static_argnames=("sampling", "stop_tokens", "rule", "verified", "kernels", "mesh"),
    donate_argnames=("state",),
)
def run_round(
    target: Model,
    state: DecodeState,
    drafts: Array,
    laws: Array | None,
    tree: Tree,
    *,
    sampling: Sampling,
    stop_tokens: tuple[int, ...],
    rule: str = "replayable",
    verified: int = 0,
    kernels: Kernels = REFERENCE,
    mesh=None,
) -> tuple[DecodeState, Emission]:
    """Verify, accept and commit drafts [B, N] (-1: none): the state and what it emitted.

    One program per (row bucket, node bucket): the tree is data. `laws` [B, N+1, V] are a draft
    model's logits at each node, wanted by rejection only (None: the drafts are points). `verified`:
    nodes a row, on average, that are packed for the target, where drafts were left out for that
    (`packed.allocate_budget`); 0: all. `state` is donated.
    """
    root = jnp.take_along_axis(state.tokens, (state.length - 1)[:, None], axis=1)
    nodes = jnp.concatenate([root, drafts], axis=1)
    packing = pack((nodes >= 0) & ~state.done[:, None], verified, mesh) if verified else None
    seen = verify(target, state, nodes, tree, sampling, rule, kernels, mesh, packing)
    token, logprob, last = accept(seen, nodes, tree, laws, state, sampling, rule)
    path = path_to(tree, last)
    depth = jnp.take_along_axis(tree.depth, last[:, None], axis=1)[:, 0]
    emission = emit(state, path, Draw(token, logprob, seen.draw.support), depth, stop_tokens)
    state = commit(state, seen.window, path, emission, kernels, mesh)
    return pin_rows(state, mesh), pin_rows(emission, mesh)
