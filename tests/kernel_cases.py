"""What every kernel is tested at: shapes, two of them fast and all of them slow, and implementations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import SHAPES

FAST = ("llama3_8b", "smollm2_135m")


def by_name(names: Iterable[str] = SHAPES) -> list:
    """Parameters that are names of shapes."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason=f"jax {jax.__version__} has no Mosaic GPU interpreter; 0.12 has"
)


def each(implementations: dict[str, Any]) -> list:
    """Parameters that are implementations; those for a GPU are interpreted, where jax can."""
    marks = {"gpu": needs_interpreter}
    return [pytest.param(one, id=name, marks=marks.get(name, ())) for name, one in implementations.items()]


def each_by_type(implementations: dict[str, Any], float32_marks=()) -> list:
    """Parameters that are implementations and dtypes: a GPU's matrix units round float32."""
    half = [
        pytest.param(*one.values, jnp.bfloat16, id=f"{one.id}-bfloat16", marks=one.marks)
        for one in each(implementations)
    ]
    others = {name: one for name, one in implementations.items() if name != "gpu"}
    return half + [
        pytest.param(one, jnp.float32, id=f"{name}-float32", marks=float32_marks) for name, one in others.items()
    ]
