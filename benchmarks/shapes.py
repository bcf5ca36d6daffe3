"""The real shapes that kernels meet, each one device's share of a model."""

from __future__ import annotations

from pallas_kernels.shapes import Shape

# Tests of the kernels take them too.
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
