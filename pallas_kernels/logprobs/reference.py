"""Log-probability and entropy of given tokens, in plain JAX: what the kernels mean, and what they
are timed beside.

Elsewhere training and inference take their own path, `rlhf_jax/inference/logprobs.py`: the same,
but it leaves out what nobody wants, and knows restricted supports.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.types import Array

CHUNK = 512  # rows whose logits exist at one time


def law(
    hidden: Array, head: Array, targets: Array, *, temperature: float, tied: bool
) -> tuple[Array, Array]:
    """log p of each row's target and -sum p log p, both [R] float32 in nats, with p =
    softmax(logits / temperature).

    hidden [R, M], head [M, V] or, `tied`, [V, M], targets [R] int32 in [0, V). Logits are products
    of hidden's dtype, summed in float32; the head may have another. They exist for CHUNK rows at a
    time, forward and backward, and the head's gradient is summed over the chunks in float32.
    """
    chex.assert_rank([hidden, head, targets], [2, 2, 1])
    rows = hidden.shape[0]
    chunk = min(CHUNK, rows)
    slack = -rows % chunk
    chunks = (jnp.pad(hidden, ((0, slack), (0, 0))), jnp.pad(targets, (0, slack)))
    chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), chunks)
    project = jax.checkpoint(functools.partial(_chunk_law, temperature=temperature, tied=tied))
    wide = head.astype(jnp.float32)
    out = jax.lax.map(lambda part: project(wide, *part), chunks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:rows], out)


def _chunk_law(
    head: Array, hidden: Array, targets: Array, *, temperature: float, tied: bool
) -> tuple[Array, Array]:
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    scores = jax.lax.dot_general(
        hidden, head.astype(hidden.dtype), dims, preferred_element_type=jnp.float32
    )
    logprobs = jax.nn.log_softmax(scores / temperature, axis=-1)
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
