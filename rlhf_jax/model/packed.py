"""Read packed sequences: the hidden state before each token that is predicted."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.mesh import Layout, pin_rows
from rlhf_jax.model.attention import packed_on
from rlhf_jax.model.transformer import embed_tokens, final_norm, run_layers
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.types import Model


def read_packed(
    model: Model, batch: PackedSequences, layout: Layout, remat: bool = False
) -> jax.Array:
    """Compute the hidden state before each predicted token: [S, W, M] in the weights' dtype.

    A token sees its own sample's alone, so the result is that of each sample by itself. `remat`
    is `forward`'s.
    """
    hidden = embed_tokens(model, batch.tokens)
    return predicting_states(model, run_packed(model, hidden, batch, layout, remat), batch, layout)


def run_packed(
    model: Model, hidden: jax.Array, batch: PackedSequences, layout: Layout, remat: bool
) -> jax.Array:
    """Run the layers of a model, or of a part of one, over packed hidden states: [S, C, M]."""
    attend = packed_on(layout, jnp.asarray(batch.segments), jnp.asarray(batch.pairs))
    return run_layers(model, hidden, batch.positions, attend=attend, remat=remat)[0]


def predicting_states(
    model: Model, hidden: jax.Array, batch: PackedSequences, layout: Layout
) -> jax.Array:
    """Return the normalised state before each predicted token, [S, W, M], of all [S, C, M]."""
    chex.assert_rank([hidden, batch.predict_from], [3, 2])
    hidden = pin_rows(final_norm(model, hidden), layout)
    take = jax.vmap(lambda line, at: line.at[at].get(mode="promise_in_bounds"))
    return pin_rows(take(hidden, jnp.asarray(batch.predict_from)), layout)
