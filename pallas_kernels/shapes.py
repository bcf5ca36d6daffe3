"""The real shapes that kernels meet, one device's share of a model: shared by tests and
benchmarks.
"""

from __future__ import annotations

import dataclasses

LANES = (
    128  # a TPU's tiles are so wide: a cache of so many slots, or a multiple, is read where it lies
)
# tokens of a block of the two-level draw: a device's share of the vocabulary is whole blocks
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one device holds of a model; letters as in `rlhf_jax/types.py`."""

    heads: int  # H
    groups: int  # G
    dim: int  # D
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
    """A small shape with the same remainders, for numerics where there is no accelerator."""
    ratio = shape.heads // shape.groups
    groups = min(shape.groups, 2 + shape.groups % 2)
    vocab = 16 * BLOCK + shape.vocab % BLOCK
    width = 256 + shape.width % 128
    return dataclasses.replace(
        shape, heads=ratio * groups, groups=groups, width=width, vocab=vocab, layers=2
    )
