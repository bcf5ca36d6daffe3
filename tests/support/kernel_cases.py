"""What every kernel is tested at: shapes, two of them fast and all of them slow, and
implementations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.shapes import SHAPES
from pallas_kernels.shapes import BLOCK, Shape

FAST = ("llama3_8b", "smollm2_135m")


def by_name(names: Iterable[str] = SHAPES) -> list:
    """Parameters that are names of shapes."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


def few(cases: Iterable[tuple], name: int) -> list:
    """Parameters for a compiler that knows no small shapes: what is neither of the fast shapes, by
    the name at that place of a case, is for before a release.
    """
    return [
        pytest.param(*case, marks=() if case[name] in FAST else pytest.mark.long) for case in cases
    ]


def reduced(shape: Shape) -> Shape:
    """Return a small shape with the same remainders, for numerics where there is no accelerator."""
    ratio = shape.heads // shape.groups
    groups = min(shape.groups, 2 + shape.groups % 2)
    vocab = 16 * BLOCK + shape.vocab % BLOCK
    width = 256 + shape.width % 128
    return dataclasses.replace(
        shape, heads=ratio * groups, groups=groups, width=width, vocab=vocab, layers=2
    )


GPU = jax.default_backend() == "gpu"
MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not GPU and not hasattr(plgpu, "InterpretGPUParams"),
        reason=f"there is no GPU, and jax {jax.__version__} has no interpreter of Mosaic GPU; "
        "0.12 has",
    ),
)


def runs_on_gpu(test: Callable) -> Callable:
    """Mark a test that calls what `on_gpu` gives."""
    return functools.reduce(lambda marked, mark: mark(marked), MARKS, test)


def on_gpu(kernel: Callable) -> Callable:
    """A kernel for Hopper: on a GPU, where that is the platform, else interpreted."""
    return functools.partial(kernel, interpret=not GPU)


def each(implementations: dict[str, Any]) -> list:
    """Parameters that are implementations by name; "gpu" is the one for a GPU."""
    return [pytest.param(one, id=name, marks=_marks(name)) for name, one in implementations.items()]


def each_by_type(implementations: dict[str, Any], float32_marks=()) -> list:
    """Parameters that are implementations and dtypes: a GPU's matrix units round float32."""
    half = [
        pytest.param(one, jnp.bfloat16, id=f"{name}-bfloat16", marks=_marks(name))
        for name, one in implementations.items()
    ]
    others = {name: one for name, one in implementations.items() if name != "gpu"}
    return half + [
        pytest.param(one, jnp.float32, id=f"{name}-float32", marks=float32_marks)
        for name, one in others.items()
    ]


def _marks(name: str) -> tuple:
    return MARKS if name == "gpu" else ()


def exact(query, cache_k, cache_v, window_k, window_v, length, mask) -> np.ndarray:
    """The same in float64, one row and head at a time."""
    query, cache_k, cache_v, window_k, window_v = (
        np.asarray(part, np.float64) for part in (query, cache_k, cache_v, window_k, window_v)
    )
    out = np.zeros(query.shape)
    ratio = query.shape[2] // cache_k.shape[1]
    for row, head in np.ndindex(query.shape[0], query.shape[2]):
        group = head // ratio
        end = int(length[row])
        key = np.concatenate([cache_k[row, group, :, :end], window_k[row, group]], axis=1)
        value = np.concatenate([cache_v[row, group, :end], window_v[row, group]])
        seen = np.concatenate([np.ones((query.shape[1], end), bool), np.asarray(mask[row])], axis=1)
        scores = np.where(seen, query[row, :, head] @ key * query.shape[3] ** -0.5, -np.inf)
        weights = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), -1e300))
        out[row, :, head] = weights @ value / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    return out
