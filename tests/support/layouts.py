"""Layouts of any shape over devices in order, and models that are to be equal on them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.mesh import AXES, AXIS_TYPES, Layout
from rlhf_jax.types import Model, ModelConfig

# sizes are divisible by 2, 3, 4 and 6
SIXTHS = ModelConfig("llama", 768, 96, 192, 2, 12, 12, 24, 128)


def lay_out(shape: Sequence[int], role: str, chosen: Sequence | None = None) -> Layout:
    """A layout of a shape over devices in their order; all if None."""
    places = np.array(jax.devices() if chosen is None else chosen).reshape(shape)
    return Layout(Mesh(places, AXES, axis_types=AXIS_TYPES), role)


def assert_equal(found: Model, wanted: Model) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
