"""Define the sizes that kernels are told of: a model's, and those of tiles and of memory."""

from __future__ import annotations

import dataclasses

# A TPU's tiles are so many numbers wide: a cache whose slots are a multiple is read where it lies.
LANES = 128
# A TPU kernel may fill so many bytes of vector memory: of the 64 MiB of a v5p core. v5e and v6e
# have 128 MiB.
VMEM_BYTES = 56 << 20
# A block of the two-level draw has so many tokens: a device's share of the vocabulary is whole
# blocks.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """Describe what one device holds of a model: its sizes, and whether its head is tied."""

    heads: int  # H
    groups: int  # G, the key-value heads
    dim: int  # D, of a head
    width: int  # M
    vocab: int  # V, of this device
    layers: int  # L
    tied: bool = False  # the head is [V, M], the embedding; else [M, V]
