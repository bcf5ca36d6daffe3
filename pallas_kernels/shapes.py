"""List the real shapes that kernels meet, each one device's share of a model.

Tests and benchmarks share them.
"""

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


SHAPES = {
    "llama3_8b": Shape(32, 8, 128, 4096, 128256, 32),
    "llama3_8b_of_8": Shape(4, 1, 128, 4096, 16128, 32),
    "llama3_70b_of_8": Shape(8, 1, 128, 8192, 16128, 80),
    "qwen3_8b": Shape(32, 8, 128, 4096, 151936, 36),
    "qwen3_0.6b": Shape(16, 8, 128, 1024, 151936, 28, tied=True),
    "smollm2_135m": Shape(9, 3, 64, 576, 49152, 30, tied=True),
}
ROWS = (1, 8, 32, 64)  # B
NODES = (1, 5, 9, 33)  # N + 1
SLOTS = 2048  # T


def reduced(shape: Shape) -> Shape:
    """Return a small shape with the same remainders, for numerics where there is no accelerator."""
    ratio = shape.heads // shape.groups
    groups = min(shape.groups, 2 + shape.groups % 2)
    vocab = 16 * BLOCK + shape.vocab % BLOCK
    width = 256 + shape.width % 128
    return dataclasses.replace(
        shape, heads=ratio * groups, groups=groups, width=width, vocab=vocab, layers=2
    )
