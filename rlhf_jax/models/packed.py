"""Run a model over packed sequences, and compute the share of padding."""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.mesh import Layout, pin_rows
from rlhf_jax.models.attention import packed_block, packed_on
from rlhf_jax.models.columns import count_mapped
from rlhf_jax.models.flops import pair_flops, product_flops
from rlhf_jax.models.transformer import embed_tokens, final_norm, run_layers
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.sequences.packing import Packed
from rlhf_jax.types import Model, ModelConfig


def read_packed(
    model: Model, batch: PackedSequences, layout: Layout, remat: bool = False
) -> jax.Array:
    """Compute the hidden state before each predicted token: [S, W, M] in the weights' dtype.

    A token sees only its own sample, so the result is that of each sample by itself. `remat` is
    `forward`'s.
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


def padding_flops(
    packed: Sequence[Packed], model: ModelConfig, layout: Layout, chunk: int
) -> float:
    """Return the share of a forward pass's FLOPs for padding and copies of prompts.

    Computed are whole lines in the layers, pairs of blocks in attention and, in the head, blocks of
    `chunk` tokens.
    """
    of_layers, of_head = product_flops(model)
    of_pair = pair_flops(model)
    needed = computed = 0
    for one in packed:
        batch = one.batch
        mask = np.asarray(batch.mask)
        length = batch.tokens.shape[1]
        block = length // -(-length // packed_block(layout))
        pairs = int((np.asarray(batch.pairs)[..., 0] >= 0).sum()) * block**2
        predicted = count_mapped(mask, chunk, layout)
        needed += one.needed_tokens * of_layers + one.needed_pairs * of_pair
        needed += int(mask.sum()) * of_head
        computed += batch.tokens.size * of_layers + pairs * of_pair + predicted * of_head
    return 1.0 - needed / computed if computed else 0.0
