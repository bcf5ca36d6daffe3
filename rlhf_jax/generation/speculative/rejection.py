"""Accept drafts by rejection: the text follows the target's distribution for any drafts.

Acceptance is higher than by the replayable draw of `sampling`, but the text depends on the drafts.
Siblings are tried in rank order, drawn without replacement from the drafter's distribution (as
`sampling.rank` draws them), each against the remainder of the two distributions after the earlier
ones.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rlhf_jax.generation.speculative.sampling import (
    Truncation,
    draw,
    log_probabilities,
    noise_bits,
    uniform,
)
from rlhf_jax.types import Array, Tree

UNIFORM_LEVEL = 4  # The noise level of the uniform number that decides on a node.
RESIDUAL_LEVELS = (2, 3)  # The noise levels of the draw that ends the path.


class _Walk(NamedTuple):
    """Hold the walk down the tree: the last accepted node, what remains there, the output."""

    node: Array  # [B] int32
    target: Array  # [B, V] log-probabilities of the target at `node`
    residual: Array  # [B, V] probabilities of the target after the rejected children
    proposal: Array | None  # [B, V] log-probabilities of the drafter after them; None: point masses
    draws: Array  # [B, N+1] int32
    logprobs: Array  # [B, N+1] float32


def accept(
    tokens: Array,
    tree: Tree,
    target_logits: Array,
    draft_logits: Array | None,
    key: Array,
    position: Array,
    temperature: Array,
    truncation: Truncation,
) -> tuple[Array, Array, Array]:
    """Accept a path of `tokens[B, N+1]` (node 0, the root, is ignored; -1: no token) and end it.

    Multi-round rejection with maximal coupling (Leviathan et al. 2023, "Fast inference from
    transformers via speculative decoding", algorithm 1; Miao et al. 2024, "SpecInfer", algorithm 2;
    siblings without replacement as in Chen et al. 2024, "Sequoia", algorithm 2): a child x of the
    last accepted node is accepted with min(1, p(x) / q(x)); else p becomes norm((p - q)+) and q
    loses x. `draft_logits[b, u]` is where u's children were drawn from, under the same
    `temperature[B]` and truncation; None says that each draft is a point mass (a lookup).
    `position[B]` is the place of the token after the root; a node at depth d decides position + d.
    Parents stand before their children.

    Returns draws `[B, N+1]` int32 (the token after each node of the accepted path, -1 off the
    path), their log-probabilities under the target's distribution (0 off the path) and the path's
    last node `[B]`.
    """
    chex.assert_rank([tokens, target_logits, key, position], [2, 3, 2, 1])
    logits = (target_logits, draft_logits)

    def distributions_at(node: Array | int) -> tuple[jax.Array, jax.Array | None]:
        return jax.tree.map(
            lambda x: log_probabilities(x[:, node], temperature, truncation), logits
        )

    def visit(walk: _Walk, node: Array) -> tuple[_Walk, None]:
        """Try one node in every row in which it is a child of the last accepted node."""
        token = tokens[:, node]
        parent = tree.parents[:, node]
        tried = (parent == walk.node) & (tree.depth[:, node] > 0) & (token >= 0)
        token = jnp.maximum(token, 0)
        place = position + jnp.maximum(tree.depth[:, node], 1) - 1
        chance = uniform(noise_bits(key, place, UNIFORM_LEVEL, node))
        proposed = 1.0 if walk.proposal is None else jnp.exp(_column(walk.proposal, token))
        accepted = tried & (chance * proposed < _column(walk.residual, token))
        walk = _emit(walk, parent, token, accepted)
        walk = _reject(walk, token, tried & ~accepted)

        target, proposal = distributions_at(node)
        fresh = walk._replace(
            node=jnp.full_like(walk.node, node),
            target=target,
            residual=jnp.exp(target),
            proposal=proposal,
        )
        return _choose(accepted, fresh, walk), None

    target, proposal = distributions_at(0)
    walk = _Walk(
        node=jnp.zeros_like(tokens[:, 0]),
        target=target,
        residual=jnp.exp(target),
        proposal=proposal,
        draws=jnp.full_like(tokens, -1),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
    )
    walk, _ = lax.scan(visit, walk, jnp.arange(1, tokens.shape[1], dtype=jnp.int32))

    end = position + jnp.maximum(_column(tree.depth, walk.node), 0)
    final = draw(jnp.log(walk.residual), key, end, 1.0, levels=RESIDUAL_LEVELS).token
    walk = _emit(walk, walk.node, final, jnp.ones_like(final, bool))
    return walk.draws, walk.logprobs, walk.node


def _emit(walk: _Walk, node: Array, token: Array, where: Array) -> _Walk:
    """Write `token[B]` as the draw after `node[B]`, in the rows `where`."""
    here = where[:, None] & (jnp.arange(walk.draws.shape[1]) == node[:, None])
    logprob = _column(walk.target, token)
    return walk._replace(
        draws=jnp.where(here, token[:, None], walk.draws),
        logprobs=jnp.where(here, logprob[:, None], walk.logprobs),
    )


def _reject(walk: _Walk, token: Array, where: Array) -> _Walk:
    """Turn p into norm((p - q)+) and take `token[B]` from q, renormalised, in the rows `where`."""
    drawn = jnp.arange(walk.residual.shape[1]) == token[:, None]
    proposal = walk.proposal
    if proposal is None:
        left = jnp.where(drawn, 0.0, walk.residual)
    else:
        left = jnp.maximum(walk.residual - jnp.exp(proposal), 0.0)
        proposal = jnp.where(drawn, -jnp.inf, proposal)
        # In logs, because the rest of a sharp distribution underflows; an empty one stays empty.
        mass = jax.nn.logsumexp(proposal, -1, keepdims=True)
        proposal = proposal - jnp.where(mass > -jnp.inf, mass, 0.0)
    total = jnp.sum(left, -1, keepdims=True)
    # Nothing is left only by rounding, if p and q agree: then p stays.
    residual = jnp.where(total > 0, left / total, walk.residual)
    return _choose(where, walk._replace(residual=residual, proposal=proposal), walk)


def _choose(where: Array, new: _Walk, old: _Walk) -> _Walk:
    """Return `new` in the rows where[B], else `old`."""

    def by_row(x: Array, y: Array) -> jax.Array:
        return jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(by_row, new, old)


def _column(x: Array, index: Array) -> jax.Array:
    """Return `x[b, index[b]]` of `x[B, ...]`."""
    return jnp.take_along_axis(x, index[:, None], 1)[:, 0]
