"""Run one round of speculative decoding: draft, verify, accept, commit, and look back.

Plain decoding is the round with no drafts. A round changes only rows that are not done.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.cache.cache import Window
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import rejection
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.budget import UNMEASURED, Packing, allocate_budget, pack
from rlhf_jax.generation.speculative.drafters.hindsight import look_back
from rlhf_jax.generation.speculative.drafters.search import SearchDrafter
from rlhf_jax.generation.speculative.protocol import DraftContext, Execute, drafter_of, drafters_of
from rlhf_jax.generation.speculative.results import Results, as_words
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.speculative.sampling import (
    UNTRUNCATED,
    Draw,
    Truncation,
    block_noise,
    draw,
    draw_inside,
)
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.models import kernels as laid
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.types import Array, Emission, Model, Strategy, Tree

ModelPair = tuple[Model, Model | None]  # The target, and the draft model if there is one.


def speculative_round(
    execute: Execute,
    state: DecodeState,
    models: ModelPair,
    strategy: Strategy,
    siblings: np.ndarray,
    decoding: GenerationConfig,
    layout: Layout = ONE_DEVICE,
    looks_back: bool = False,
    expected_gain: np.ndarray | None = None,
) -> tuple[DecodeState, Results, jax.Array]:
    """Draft by `strategy`, verify, accept, commit and optionally look back.

    Returns the state, the results, and these once more for the host (`as_words`).

    `execute` calls jitted programs, or only compiles them. siblings [B, S] int32 are rows that hold
    samples of the same prompt, -1 for none. expected_gain [CLASSES, N or more] float32 ranks the
    drafts of a round with a budget (see `allocate_budget`). `state` is donated.
    """
    target, draft_model = models
    drafter = drafter_of(strategy)
    context = DraftContext(
        strategy,
        siblings,
        draft_model,
        decoding.sampling.truncation,
        with_logits=decoding.rule.reads_logits,
        layout=layout,
    )
    if len(decoding.strategies) > 1:
        state = drafter.catch_up(execute, state, context)
    proposal = drafter.propose(execute, state, context)
    drafts = proposal.drafts
    share = None
    if strategy.packed:
        drafts, share = execute(
            allocate_budget,
            state,
            drafts,
            proposal.confidence,
            UNMEASURED if expected_gain is None else expected_gain,
            strategy.packed,
            layout=layout,
        )

    state, emission = execute(
        run_round,
        target,
        state,
        drafts,
        proposal.logits,
        trees.as_data(strategy, len(siblings)),
        truncation=decoding.sampling.truncation,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        verified=strategy.packed,
        layout=layout,
    )
    state = drafter.after_commit(execute, state, proposal, emission, context)

    used = drafters_of(decoding.strategies) if looks_back else ()
    searchers = tuple(one for one in used if isinstance(one, SearchDrafter))
    hindsight = execute(look_back, state, siblings, searchers, layout=layout) if searchers else {}
    confidence = None if isinstance(drafter, SearchDrafter) else proposal.confidence
    results = Results(emission, confidence, share, hindsight)
    return state, results, execute(as_words, results, layout=layout)


@functools.partial(
    jax.jit,
    static_argnames=("truncation", "stop_tokens", "rule", "verified", "layout"),
    donate_argnames=("state",),
)
def run_round(
    target: Model,
    state: DecodeState,
    drafts: Array,
    draft_logits: Array | None,
    tree: Tree,
    *,
    truncation: Truncation,
    stop_tokens: tuple[int, ...],
    rule: str = "replayable",
    verified: int = 0,
    layout: Layout = ONE_DEVICE,
) -> tuple[DecodeState, Emission]:
    """Verify, accept and commit drafts [B, N] (-1: none): return the state and the emitted tokens.

    One program per (row bucket, node bucket): the tree is data. `draft_logits` [B, N+1, V] are a
    draft model's at each node, read by rejection only (None: the drafts are points). `rule` is
    'replayable' or 'rejection'. `verified`: average nodes per row packed for the target, if a
    budget dropped drafts (`allocate_budget`); 0: all. `state` is donated.
    """
    root = jnp.take_along_axis(state.tokens, (state.length - 1)[:, None], axis=1)
    nodes = jnp.concatenate([root, drafts], axis=1)
    packing = pack((nodes >= 0) & ~state.done[:, None], verified, layout) if verified else None
    drawn, scores, window = verify(
        target, state, nodes, tree, truncation=truncation, rule=rule, layout=layout, packing=packing
    )
    if not RULES[rule].reads_logits:
        token = drawn.token
        logprob = drawn.logprob
        last = trees.accept_equal(nodes, token, tree)
    else:
        assert scores is not None, "Rejection reads the logits of every node."
        token, logprob, last = rejection.accept(
            nodes,
            tree,
            scores,
            draft_logits,
            key=state.key,
            position=state.length,
            temperature=state.temperature,
            truncation=truncation,
        )

    path = trees.path_to(tree, last)
    depth = jnp.take_along_axis(tree.depth, last[:, None], axis=1)[:, 0]
    emission = emit(state, path, Draw(token, logprob, drawn.top_k_ids), depth, stop_tokens)
    state = commit(state, window, path, emission, layout=layout)
    return pin_rows(state, layout), pin_rows(emission, layout)


def verify(
    target: Model,
    state: DecodeState,
    nodes: Array,
    tree: Tree,
    *,
    truncation: Truncation,
    rule: str,
    layout: Layout,
    packing: Packing | None = None,
) -> tuple[Draw, Array | None, Window]:
    """Call the target once, over nodes [B, N+1] of every row or the packed ones.

    Returns its own draw at every node, its logits [B, N+1, V] float32 (None if the rule does not
    read them), and the window to commit from.

    Node 0 is the root, the others are drafts. The draw at a node of depth d decides the token at
    position length + d, with that position's noise and the row's temperature.
    """
    # A row that is done reads nothing.
    known = jnp.where(state.done, 0, state.length - 1)
    attend = state.cache.attend(known, tree.ancestors, layout)
    key = state.key[:, None]
    temperature = jnp.broadcast_to(state.temperature[:, None], nodes.shape)
    positions = (state.length - 1)[:, None] + jnp.maximum(tree.depth, 0)
    if packing is not None:
        key = jnp.broadcast_to(key, (*nodes.shape, 2))
        nodes, positions, key, temperature = map(packing.pack, (nodes, positions, key, temperature))
        attend = packing.attention(attend)
    hidden, kept = forward(target, nodes, positions, attend, state.cache.memory())

    if streams_head(layout, truncation, rule):
        # Noise of the whole vocabulary, padding included.
        noise = block_noise(key, positions + 1, len(target.embed))
        parts = laid.verify_head(layout)(target, hidden, noise, temperature)
        drawn = draw_inside(parts, key, positions + 1, temperature)
        scores = None
    else:
        scores = logits(target, hidden)
        drawn = draw(scores, key, positions + 1, temperature, truncation)
    if packing is not None:
        drawn = jax.tree.map(packing.unpack, drawn)
        scores = jax.tree.map(packing.unpack, scores) if RULES[rule].reads_logits else None
    return drawn, scores, Window(kept)


def streams_head(layout: Layout, truncation: Truncation, rule: str) -> bool:
    """Return whether a round avoids logits: a kernel draws from the hidden states.

    Truncation and rejection need all logits of a node at once.
    """
    return (
        layout.kernels.verify_head != "reference"
        and not RULES[rule].reads_logits
        and truncation == UNTRUNCATED
    )


def emit(
    state: DecodeState, path: Array, draws: Draw, depth: Array, stop_tokens: tuple[int, ...]
) -> Emission:
    """Return a row's new tokens along path [B, N+1] of depth [B], cut at a stop token or the limit.

    draws are those after each node, [B, N+1].
    """
    tokens = jnp.take_along_axis(draws.token, path, axis=1)
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)
    stops = jnp.isin(tokens, jnp.asarray(stop_tokens, jnp.int32)) & (steps <= depth[:, None])
    first_stop = jnp.argmax(stops, axis=1).astype(jnp.int32) + 1
    to_stop = jnp.where(stops.any(1), first_stop, path.shape[1] + 1)
    count = jnp.minimum(jnp.minimum(depth + 1, to_stop), state.limit - state.length)
    count = jnp.where(state.done, 0, count)
    top_k_ids = draws.top_k_ids
    return Emission(
        tokens=tokens,
        logprobs=jnp.take_along_axis(draws.logprob, path, axis=1),
        top_k_ids=None
        if top_k_ids is None
        else jnp.take_along_axis(top_k_ids, path[..., None], axis=1),
        count=count,
        accepted=jnp.minimum(depth, count),
        path=path,
        done=state.done | (to_stop <= count) | (state.length + count >= state.limit),
    )


def commit(
    state: DecodeState, window: Window, path: jax.Array, emission: Emission, *, layout: Layout
) -> DecodeState:
    """Return the state after the round: tokens appended, the path's cache entries in place."""
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
        cache=state.cache.commit(window, path, start, layout),
    )
