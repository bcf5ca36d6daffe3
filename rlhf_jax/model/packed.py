"""Read packed samples: the hidden state before each token that is predicted."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.mesh import Layout, pin_rows
from rlhf_jax.model.attention import packed_on, take_tokens
from rlhf_jax.model.transformer import forward
from rlhf_jax.types import Model, PackedBatch


def read_packed(model: Model, batch: PackedBatch, layout: Layout, remat: bool) -> jax.Array:
    """Compute the hidden state before each predicted token: [S, W, M] in the weights' dtype.

    A token sees its own sample's alone, so the result is that of each sample by itself. `remat`
    is `forward`'s.
    """
    chex.assert_rank([batch.tokens, batch.samples, batch.before], [2, 3, 2])
    attend = packed_on(layout, jnp.asarray(batch.samples), jnp.asarray(batch.home))
    hidden, _ = forward(model, batch.tokens, batch.positions, attend=attend, remat=remat)
    return pin_rows(take_tokens(pin_rows(hidden, layout), jnp.asarray(batch.before)), layout)
