"""Define a weight: its axes, initialisation, storage, and the kinds of array that represent it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.types import Array


class Weight(NamedTuple):
    """Describe one weight of a family, without the leading L of stacked layers.

    Axes are the letters of `types.py`, one each. In a file the axes of one group of `stored` are
    flattened together, and `{layer}` in a name stands for the layer's index.
    """

    axes: str
    stored: tuple[str, ...]
    # The axes that a product sums over, drawn N(0, 1/inputs); or the number that fills it.
    init: str | float
    huggingface: str  # Its name in a Hugging Face folder.
    gguf: str  # Its name in a GGUF file.

    @property
    def is_matrix(self) -> bool:
        """Return whether it is a matrix: it is then decayed, split by its width, and transposed."""
        return isinstance(self.init, str)

    @property
    def inputs(self) -> str:
        """Return the axes that a product sums over; '' for norms and biases."""
        return self.init if isinstance(self.init, str) else ""


WeightTable = Mapping[str, Weight]  # By the name in `Model.layers`, or of a field of `Model`.


class WeightKind(abc.ABC):
    """Represent a matrix in a layer as a pytree of arrays of another form.

    A subclass is a `flax.struct.dataclass`. `inputs` counts the axes that a product sums over: they
    come first in memory.
    """

    @abc.abstractmethod
    def product(self, rows: jax.Array, inputs: int) -> jax.Array:
        """Return the product [R, outputs] of rows [R, inputs flattened]."""

    @abc.abstractmethod
    def plain(self, inputs: int) -> Array:
        """Return the matrix itself, an array of the weight's axes."""

    @abc.abstractmethod
    def axes(self, weight: Weight) -> Self:
        """Return the same tree whose leaves are the letters of their axes, '' if never split."""


@struct.dataclass
class OutputFirst(WeightKind):
    """Hold a weight with its inputs last: [F, M] instead of [M, F]."""

    weight: Array

    @classmethod
    def of(cls, array: Array, inputs: int) -> OutputFirst:
        """Transpose a matrix in memory."""
        return cls(jnp.moveaxis(array, range(inputs), range(-inputs, 0)))

    def product(self, rows: jax.Array, inputs: int) -> jax.Array:
        """Multiply without transposing the matrix back."""
        turned = self.weight.reshape(-1, rows.shape[-1]) @ rows.T
        # Without the barrier XLA transposes the product: up to twice as slow on a CPU.
        out = jax.lax.optimization_barrier(turned).T
        return out.reshape(len(rows), *self.weight.shape[:-inputs])

    def plain(self, inputs: int) -> Array:
        """Transpose the matrix back."""
        return jnp.moveaxis(self.weight, range(-inputs, 0), range(inputs))

    def axes(self, weight: Weight) -> Self:
        """Return the axes, inputs last."""
        count = len(weight.inputs)
        return dataclasses.replace(self, weight=weight.axes[count:] + weight.axes[:count])


def plain(weight: Any, inputs: int = 1) -> Array:
    """Return the array that a weight of any kind represents."""
    return weight.plain(inputs) if isinstance(weight, WeightKind) else weight


def product(x: jax.Array, weight: Any, inputs: int = 1) -> jax.Array:
    """Multiply x [..., K] by a weight of any kind, whose first `inputs` dimensions are K.

    Both are flattened to matrices: XLA on a CPU would transpose anything else at every step.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, WeightKind):
        out = weight.product(rows, inputs)
    else:
        out = (rows @ weight.reshape(x.shape[-1], -1)).reshape(len(rows), *weight.shape[inputs:])
    return out.reshape(*x.shape[:-1], *out.shape[1:])
