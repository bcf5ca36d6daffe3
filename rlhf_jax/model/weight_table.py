"""How each weight lies in a file, as one table that loading and saving both read.

PyTorch keeps a linear map as `[out, in]` with heads flattened; here it is `[M, H, D]` and the like.
Both are views of the same numbers, so reading a slice of ours touches only those bytes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax.model.transformer import weight_shapes
from rlhf_jax.types import Layer, Model, ModelConfig


class Layout(NamedTuple):
    """Axes of a weight here, and in a file, where the letters of one group are flattened
    together.
    """

    axes: str
    stored: tuple[str, ...]


LAYOUTS = {
    "embed": Layout("VM", ("V", "M")),
    "norm": Layout("M", ("M",)),
    "head": Layout("MV", ("V", "M")),
    "attention_norm": Layout("M", ("M",)),
    "query": Layout("MHD", ("HD", "M")),
    "key": Layout("MGD", ("GD", "M")),
    "value": Layout("MGD", ("GD", "M")),
    "output": Layout("HDM", ("M", "HD")),
    "mlp_norm": Layout("M", ("M",)),
    "gate": Layout("MF", ("F", "M")),
    "up": Layout("MF", ("F", "M")),
    "down": Layout("FM", ("M", "F")),
    "query_bias": Layout("HD", ("HD",)),
    "key_bias": Layout("GD", ("GD",)),
    "value_bias": Layout("GD", ("GD",)),
    "query_norm": Layout("D", ("D",)),
    "key_norm": Layout("D", ("D",)),
}

Place = tuple[str, int | None]  # a field of Model, or of Layer with the index of the layer
Read = Callable[[Place], np.ndarray]  # the weight at a place, in the file's layout


def places(config: ModelConfig) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """Every weight of a model, with its shape here (without L): the model's own, then layer by
    layer.
    """
    shapes = weight_shapes(config)
    for field in ("embed", "norm", "head"):
        if getattr(shapes, field) is not None:
            yield (field, None), getattr(shapes, field)
    layer = {name: shape[1:] for name, shape in vars(shapes.layers).items() if shape is not None}
    for index in range(config.num_layers):
        for field, shape in layer.items():
            yield (field, index), shape


def stored_shape(field: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a file of a weight whose shape here, without L, is `shape`."""
    layout = LAYOUTS[field]
    size = dict(zip(layout.axes, shape, strict=True))
    return tuple(math.prod(size[letter] for letter in group) for group in layout.stored)


def from_stored(field: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A file's array, viewed in the layout of this project."""
    layout = LAYOUTS[field]
    size = dict(zip(layout.axes, shape, strict=True))
    letters = "".join(layout.stored)
    heads_apart = array.reshape([size[letter] for letter in letters])
    return heads_apart.transpose([letters.index(letter) for letter in layout.axes])


def to_stored(field: str, array: np.ndarray) -> np.ndarray:
    """The inverse of `from_stored`."""
    layout = LAYOUTS[field]
    letters = "".join(layout.stored)
    in_order = array.transpose([layout.axes.index(letter) for letter in letters])
    return in_order.reshape(stored_shape(field, array.shape))


def assemble(read: Read, config: ModelConfig, dtype, shardings: Model | None = None) -> Model:
    """A `Model` with stacked layers, of weights that `read` gives one at a time.

    Each device's part of each leaf is made alone, layer by layer, so the host never holds a whole
    sharded leaf. `shardings` is a `Model` of `jax.sharding.Sharding`; None puts all on the first
    local device.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf(path, shape: tuple[int, ...], sharding: jax.sharding.Sharding = here) -> jax.Array:
        part = _stacked_part if len(path) > 1 else _single_part
        return jax.make_array_from_callback(
            shape, sharding, lambda index: part(read, path[-1].name, shape, index, np.dtype(dtype))
        )

    rest = () if shardings is None else (shardings,)
    return jax.tree.map_with_path(
        leaf, weight_shapes(config), *rest, is_leaf=lambda x: isinstance(x, tuple)
    )


def _single_part(read: Read, field: str, shape, index, dtype: np.dtype) -> np.ndarray:
    return from_stored(field, read((field, None)), shape)[index].astype(dtype)


def _stacked_part(read: Read, field: str, shape, index, dtype: np.dtype) -> np.ndarray:
    layers = range(shape[0])[index[0]]
    sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
    out = np.empty(sizes, dtype)
    for position, layer in enumerate(layers):
        out[position] = from_stored(field, read((field, layer)), shape[1:])[index[1:]]
    return out


def weight_at(model: Model, place: Place) -> np.ndarray:
    """One weight of a model with stacked or unrolled layers, on the host, in the layout of this
    project.
    """
    field, index = place
    if index is None:
        return np.asarray(getattr(model, field))
    if isinstance(model.layers, Layer):
        return np.asarray(getattr(model.layers, field)[index])
    return np.asarray(getattr(model.layers[index], field))


def check(
    found: Mapping[str, tuple[Path, tuple[int, ...]]],
    expected: Mapping[str, tuple[int, ...]],
    source: Path,
    config: ModelConfig,
) -> None:
    """Raise ValueError at the first tensor that is missing, of another shape, or has no place.

    `found` gives file and shape by name, `expected` the shape.
    """
    model = f"a {config.family} model of {config.num_layers} layers"
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(
                f"{source}: tensor {name!r} {list(shape)} of {model} is missing:"
                " the weights are incomplete or belong to another architecture."
            )
        file, actual = found[name]
        if actual != shape:
            raise ValueError(
                f"{file}: tensor {name!r} has shape {list(actual)}, {model} needs {list(shape)}."
            )
    for name in found.keys() - expected.keys():
        raise ValueError(
            f"{found[name][0]}: tensor {name!r} {list(found[name][1])} has no place in {model} as"
            " configured."
        )
