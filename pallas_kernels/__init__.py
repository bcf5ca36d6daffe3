"""The Pallas kernels of decoding and scoring, and the choice of their implementations.

A folder is a kernel: `reference.py` defines it in plain JAX, `tpu.py` runs on TPUs (Mosaic) and
`gpu.py` on Hopper GPUs (Mosaic GPU). The package imports jax and the standard library only.
"""

from __future__ import annotations

from pallas_kernels.dispatch import INTERPRETED, REFERENCE, Kernels, choose, implementation
from pallas_kernels.shapes import BLOCK, LANES, Shape

__all__ = [
    "BLOCK",
    "INTERPRETED",
    "LANES",
    "REFERENCE",
    "Kernels",
    "Shape",
    "choose",
    "implementation",
]
