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


class StoredForm(NamedTuple):
    """Name the axes of a weight, one letter each, in memory and in a file.

    The letters are those of `types.py`. In a file, the axes of one group are flattened together.
    """

    axes: str
    stored: tuple[str, ...]


# The two forms of each weight, without the leading L of stacked layers, by its field.
STORED_FORMS = {
    "embed": StoredForm("VM", ("V", "M")),
    "norm": StoredForm("M", ("M",)),
    "head": StoredForm("MV", ("V", "M")),
    "attention_norm": StoredForm("M", ("M",)),
    "query": StoredForm("MHD", ("HD", "M")),
    "key": StoredForm("MGD", ("GD", "M")),
    "value": StoredForm("MGD", ("GD", "M")),
    "output": StoredForm("HDM", ("M", "HD")),
    "mlp_norm": StoredForm("M", ("M",)),
    "gate": StoredForm("MF", ("F", "M")),
    "up": StoredForm("MF", ("F", "M")),
    "down": StoredForm("FM", ("M", "F")),
    "query_bias": StoredForm("HD", ("HD",)),
    "key_bias": StoredForm("GD", ("GD",)),
    "value_bias": StoredForm("GD", ("GD",)),
    "query_norm": StoredForm("D", ("D",)),
    "key_norm": StoredForm("D", ("D",)),
}


class WeightKey(NamedTuple):
    """Name one weight: a field of `Model`, or of `Layer` with the layer's index."""

    field: str
    layer: int | None


ReadWeight = Callable[[WeightKey], np.ndarray]  # Gives one weight in its stored form.


def weight_keys(config: ModelConfig) -> Iterator[tuple[WeightKey, tuple[int, ...]]]:
    """Yield every weight of a model with its shape in memory, without L.

    The model's own weights come first, then those of one layer after another.
    """
    shapes = weight_shapes(config)
    for field in ("embed", "norm", "head"):
        if getattr(shapes, field) is not None:
            yield WeightKey(field, None), getattr(shapes, field)

    layer = {name: shape[1:] for name, shape in vars(shapes.layers).items() if shape is not None}
    for index in range(config.num_layers):
        for field, shape in layer.items():
            yield WeightKey(field, index), shape


def stored_names(config: ModelConfig, names: Mapping[str, str]) -> dict[WeightKey, str]:
    """Return the name in a file of every weight of a model.

    `names` gives it by field, with `{layer}` for the layer's index, as a `Family` does.
    """
    return {key: names[key.field].format(layer=key.layer) for key, _ in weight_keys(config)}


def stored_shape(field: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a file of a weight whose shape in memory, without L, is `shape`."""
    form = STORED_FORMS[field]
    size = dict(zip(form.axes, shape, strict=True))
    return tuple(math.prod(size[letter] for letter in group) for group in form.stored)


def from_stored(field: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """View a file's array as the weight in memory, of shape `shape` without L."""
    form = STORED_FORMS[field]
    size = dict(zip(form.axes, shape, strict=True))
    letters = "".join(form.stored)
    heads_apart = array.reshape([size[letter] for letter in letters])
    return heads_apart.transpose([letters.index(letter) for letter in form.axes])


def assemble(read: ReadWeight, config: ModelConfig, dtype, shardings: Model | None = None) -> Model:
    """Make a `Model` with stacked layers of weights that `read` gives one at a time.

    Each device's part of each leaf is made alone, layer by layer, so the host never holds a whole
    sharded leaf. `shardings` is a `Model` of `jax.sharding.Sharding`; None puts all on the first
    local device.
    """
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def make_leaf(
        path, shape: tuple[int, ...], sharding: jax.sharding.Sharding = first_device
    ) -> jax.Array:
        field = path[-1].name
        stacked = len(path) > 1

        def read_part(index) -> np.ndarray:
            if not stacked:
                whole = from_stored(field, read(WeightKey(field, None)), shape)
                return whole[index].astype(np.dtype(dtype))
            sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
            out = np.empty(sizes, np.dtype(dtype))
            for position, layer in enumerate(range(shape[0])[index[0]]):
                weight = from_stored(field, read(WeightKey(field, layer)), shape[1:])
                out[position] = weight[index[1:]]
            return out

        return jax.make_array_from_callback(shape, sharding, read_part, dtype=np.dtype(dtype))

    rest = () if shardings is None else (shardings,)
    return jax.tree.map_with_path(
        make_leaf, weight_shapes(config), *rest, is_leaf=lambda x: isinstance(x, tuple)
    )


def stored_weight(model: Model, key: WeightKey) -> np.ndarray:
    """Return one weight of a model, on the host, in its stored form: the inverse of `from_stored`.

    The model's layers may be stacked or unrolled.
    """
    if key.layer is None:
        array = np.asarray(getattr(model, key.field))
    elif isinstance(model.layers, Layer):
        array = np.asarray(getattr(model.layers, key.field)[key.layer])
    else:
        array = np.asarray(getattr(model.layers[key.layer], key.field))
    form = STORED_FORMS[key.field]
    letters = "".join(form.stored)
    in_order = array.transpose([form.axes.index(letter) for letter in letters])
    return in_order.reshape(stored_shape(key.field, array.shape))


def check_weights(
    found: Mapping[str, tuple[Path, tuple[int, ...]]],
    names: Mapping[WeightKey, str],
    source: Path,
    config: ModelConfig,
) -> None:
    """Raise ValueError at the first tensor that is missing, of another shape, or has no place.

    `found` gives file and shape by name in the file, `names` the names of `config`'s weights.
    """
    model = f"a {config.family} model of {config.num_layers} layers"
    expected = {names[key]: stored_shape(key.field, shape) for key, shape in weight_keys(config)}
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
        file, actual = found[name]
        raise ValueError(
            f"{file}: tensor {name!r} {list(actual)} has no place in {model} as configured."
        )
