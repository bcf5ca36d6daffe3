"""Define the sizes that kernels depend on: a model's, and those of tiles and of memory."""

from __future__ import annotations

import dataclasses

# The width of a TPU's tiles: a cache whose slots are a multiple is read in place.
LANES = 128
# The limit of vector memory of a TPU kernel, in bytes: of the 64 MiB of a v5p core. v5e and v6e
# have 128 MiB.
VMEM_BYTES = 56 << 20
# Tokens of a block of the two-level draw: a device's share of the vocabulary is whole blocks.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """Describe one device's part of a model: its sizes, and whether its head is tied."""

    heads: int  # H
    groups: int  # G, the key-value heads
    dim: int  # D, of a head
    width: int  # M
    vocab: int  # V, of this device
    layers: int  # L
    tied: bool = False  # the head is [V, M], the embedding; else [M, V]
