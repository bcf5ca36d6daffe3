"""Fingerprint an array on its devices: equal bits give equal fingerprints, however split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.runtime import to_host

GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio: scatters the indices
# (shift, factor) of MurmurHash3's 32-bit finalizer; a last shift by 16 follows.
MURMUR = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


@jax.jit
def fingerprint(leaf: jax.Array) -> jax.Array:
    """Return the fingerprint, [] uint32, of an array of any shape, dtype and sharding.

    Every bit and its position count. It is the sum, modulo 2^32, of a mix of each word and its
    index: a change of one word always changes it, any other change except one in 2^32. A sum of
    integers does not depend on its order, and so not on the mesh.
    """
    # The bits of each element as uint32; an element of 8 bytes gives two, by a last axis.
    if leaf.dtype == jnp.bool_:
        words = leaf.astype(jnp.uint32)
    else:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)

    # The row-major index of each element, modulo 2^32: a sum of iotas by axis, which split as the
    # array does.
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        places = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index += places * np.uint32(stride % 2**32)
        stride *= words.shape[axis]

    mixed = words ^ (index * GOLDEN)
    for shift, factor in MURMUR:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


def fingerprints(leaves: dict[str, jax.Array]) -> dict[str, int]:
    """Return the fingerprint of each array, on all ranks."""
    marks = to_host.fetch([fingerprint(leaf) for leaf in leaves.values()])
    return dict(zip(leaves, map(int, marks), strict=True))
