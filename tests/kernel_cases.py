"""The shapes that every kernel is tested at: two of them fast, all of them slow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pallas_kernels.shapes import SHAPES

FAST = ("llama3_8b", "smollm2_135m")


def by_name(names: Iterable[str] = SHAPES) -> list:
    """Parameters that are names of shapes."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]
