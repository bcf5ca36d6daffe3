"""Compute log-probability and entropy of given tokens in plain JAX, which the kernels must equal.

It defines the kernels, and is their baseline in timings. On other hardware a caller uses its own
path, which skips unneeded results and supports top-k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arrays import check_ranks

# Rows whose logits exist at a time.
CHUNK = 512


def token_logprobs(
    hidden: Array, head: Array, targets: Array, *, temperature: float, tied: bool
) -> tuple[Array, Array]:
    """Return log p of each row's target and -sum p log p, both [R] float32 in nats.

    p = softmax(logits / temperature); hidden [R, M], head [M, V] or, `tied`, [V, M], targets [R]
    int32 in [0, V). Logits are products of hidden's dtype, summed in float32; the head may have
    another. They exist for CHUNK rows at a time, forward and backward, and the head's gradient is
    summed over the chunks in float32.
    """
    check_ranks([hidden, head, targets], [2, 2, 1])
    rows = hidden.shape[0]
    chunk = min(CHUNK, rows)
    slack = -rows % chunk
    chunks = (jnp.pad(hidden, ((0, slack), (0, 0))), jnp.pad(targets, (0, slack)))
    chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), chunks)
    wide = head.astype(jnp.float32)

    @jax.checkpoint
    def project(head: Array, hidden: Array, targets: Array) -> tuple[Array, Array]:
        """Return both numbers of one chunk of rows; its logits are recomputed backward."""
        dims = (((1,), (1 if tied else 0,)), ((), ()))
        scores = lax.dot_general(
            hidden, head.astype(hidden.dtype), dims, preferred_element_type=jnp.float32
        )
        logprobs = jax.nn.log_softmax(scores / temperature, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    out = lax.map(lambda part: project(wide, *part), chunks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:rows], out)
