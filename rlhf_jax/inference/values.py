"""Values: a critic's expectation for an unfinished text."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.models.transformer import cast, logits
from rlhf_jax.types import Array, Model


def head_values(critic: Model, hidden: jax.Array, mask: Array) -> jax.Array:
    """Compute V, the expected reward to come before each predicted token: [S, W] float32.

    hidden [S, W, M] are the states before the tokens, which the scalar head [M, 1] reads in
    float32; 0 where `mask` [S, W] bool is false.
    """
    chex.assert_equal(critic.config.scalar_head, True)
    head = cast(dataclasses.replace(critic, layers=()), jnp.float32)
    values = logits(head, hidden.astype(jnp.float32))[..., 0]
    return jnp.where(mask, values, 0.0)


def critic_of(policy: Model) -> Model:
    """Return a critic on a copy of the policy's layers; its zero head gives every value 0."""
    config = dataclasses.replace(policy.config, scalar_head=True, tied=False)
    head = jnp.zeros((config.width, 1), policy.norm.dtype)
    trunk = jax.tree.map(jnp.copy, dataclasses.replace(policy, head=None))
    return dataclasses.replace(trunk, head=head, config=config)
