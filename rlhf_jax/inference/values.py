"""Values: what a critic expects of a text that is not finished yet."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.inference.logprobs import map_rows
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.model.attention import causal_on
from rlhf_jax.model.transformer import cast, forward, logits
from rlhf_jax.types import Array, Model, Rollout


def token_values(
    critic: Model, tokens: Array, *, mask: Array, layout: Layout = ONE_DEVICE, remat: bool = False
) -> jax.Array:
    """Compute V(tokens[b, :t]), the reward still to come before the token at t is known.

    tokens [B, T] int32, mask [B, T] bool -> [B, T] float32, 0 where masked out and at t = 0. The
    scalar head [M, 1] reads the hidden state at t - 1, in float32. `remat` is
    `forward`'s.
    """
    chex.assert_equal_shape([tokens, mask])
    chex.assert_shape(critic.head, (critic.config.width, 1))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(critic, tokens, positions, attend=causal_on(layout), remat=remat)
    head = cast(dataclasses.replace(critic, layers=()), jnp.float32)
    values = logits(head, hidden.astype(jnp.float32))[..., 0]
    return jnp.where(mask, jnp.pad(values[:, :-1], ((0, 0), (1, 0))), 0.0)


@functools.partial(jax.jit, static_argnames=("rows", "layout"))
def score_values(
    critic: Model, rollout: Rollout, *, rows: int, layout: Layout = ONE_DEVICE
) -> jax.Array:
    """Compute `token_values` of a rollout's response tokens: [B, T] float32.

    `rows` rows at a time, in the order of `score_rollout`; B is a multiple of `rows`.
    """

    def score(part: tuple[Array, Array]) -> jax.Array:
        tokens, mask = part
        return token_values(critic, tokens, mask=mask, layout=layout)

    return map_rows(score, (rollout.tokens, rollout.mask), rows)


def critic_of(policy: Model) -> Model:
    """Return a critic on a copy of the policy's layers; its head of zeros gives every value 0."""
    config = dataclasses.replace(policy.config, scalar_head=True, tied=False)
    head = jnp.zeros((config.width, 1), policy.norm.dtype)
    trunk = jax.tree.map(jnp.copy, dataclasses.replace(policy, head=None))
    return dataclasses.replace(trunk, head=head, config=config)
