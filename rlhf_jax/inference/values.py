"""Values: what a critic expects of a text that is not finished yet."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.inference.packing import pack, unpack
from rlhf_jax.mesh import ONE_DEVICE, Layout, place_rows
from rlhf_jax.model.packed import read_packed
from rlhf_jax.model.transformer import cast, logits
from rlhf_jax.runtime import to_host
from rlhf_jax.types import Model, PackedBatch, Rollout


@functools.partial(jax.jit, static_argnames="layout")
def value_packed(critic: Model, batch: PackedBatch, *, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Compute V, the reward still to come before each predicted token is known: [S, W] float32.

    0 where masked out. The scalar head [M, 1] reads the hidden state before the token, in float32.
    """
    return head_values(critic, read_packed(critic, batch, layout), batch)


def head_values(critic: Model, hidden: jax.Array, batch: PackedBatch) -> jax.Array:
    """Compute `value_packed` [S, W] from the hidden states [S, W, M] before the tokens."""
    chex.assert_equal(critic.config.scalar_head, True)
    head = cast(dataclasses.replace(critic, layers=()), jnp.float32)
    values = logits(head, hidden.astype(jnp.float32))[..., 0]
    return jnp.where(batch.mask, values, 0.0)


def score_values(
    critic: Model,
    rollout: Rollout,
    *,
    rows: int,
    length_bucket: int = 64,
    layout: Layout = ONE_DEVICE,
) -> np.ndarray:
    """Compute the values of a rollout's response tokens: a host array [B, T] float32.

    0 where masked out; in the batches of `score_rollout`.
    """
    host = jax.tree.map(np.asarray, rollout)
    parts = pack(host, host.mask, rows, length_bucket, layout.row_shards)
    found = [value_packed(critic, place_rows(part.batch, layout), layout=layout) for part in parts]
    return unpack(list(zip(parts, to_host.fetch(found), strict=True)), host.mask.shape)


def critic_of(policy: Model) -> Model:
    """Return a critic on a copy of the policy's layers; its head of zeros gives every value 0."""
    config = dataclasses.replace(policy.config, scalar_head=True, tied=False)
    head = jnp.zeros((config.width, 1), policy.norm.dtype)
    trunk = jax.tree.map(jnp.copy, dataclasses.replace(policy, head=None))
    return dataclasses.replace(trunk, head=head, config=config)
