"""Read and write weights in the form of their files, by their family's table.

PyTorch keeps a linear map as `[out, in]` with heads flattened; here it is `[M, H, D]` and the like.
Both are views of the same numbers, so reading a slice of ours touches only those bytes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.tree_util import DictKey

from rlhf_jax.models.families import FAMILIES, weights_of
from rlhf_jax.models.families.family import END_WEIGHTS
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.models.weight import Weight, plain
from rlhf_jax.types import Model, ModelConfig


class WeightKey(NamedTuple):
    """Identify one weight: a field of `Model`, or in a `Layer` with the layer's index."""

    name: str
    layer: int | None


ReadWeight = Callable[[WeightKey], np.ndarray]  # Returns one weight in its stored form.


def weight_keys(config: ModelConfig) -> Iterator[tuple[WeightKey, tuple[int, ...]]]:
    """Yield every weight of a model with its shape in memory, without L.

    The model's own weights come first, then those of one layer after another.
    """
    ends = abstract_weights(config)
    layers = ends.layers
    assert isinstance(layers, dict), "They are stacked."
    for name in END_WEIGHTS:
        if getattr(ends, name) is not None:
            yield WeightKey(name, None), getattr(ends, name).shape
    for index in range(config.num_layers):
        for name in FAMILIES[config.family].weights:
            yield WeightKey(name, index), layers[name].shape[1:]


def stored_names(config: ModelConfig, form: Literal["huggingface", "gguf"]) -> dict[WeightKey, str]:
    """Return the name of every weight of a model in a kind of file."""
    table = weights_of(config)
    return {
        key: getattr(table[key.name], form).format(layer=key.layer)
        for key, _ in weight_keys(config)
    }


def stored_shape(weight: Weight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a file of a weight whose shape in memory, without L, is `shape`."""
    size = dict(zip(weight.axes, shape, strict=True))
    return tuple(math.prod(size[letter] for letter in group) for group in weight.stored)


def from_stored(weight: Weight, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """View a file's array as the weight in memory, of shape `shape` without L."""
    size = dict(zip(weight.axes, shape, strict=True))
    letters = "".join(weight.stored)
    heads_apart = array.reshape([size[letter] for letter in letters])
    return heads_apart.transpose([letters.index(letter) for letter in weight.axes])


def assemble(read: ReadWeight, config: ModelConfig, dtype, shardings: Model | None = None) -> Model:
    """Make a `Model` with stacked layers from weights that `read` returns one at a time.

    Each device's part of each leaf is made alone, layer by layer, so the host never holds a whole
    sharded leaf. `shardings` is a `Model` of `jax.sharding.Sharding`; None puts all on the first
    local device.
    """
    table = weights_of(config)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def make_leaf(
        path, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding = first_device
    ) -> jax.Array:
        shape = leaf.shape
        stacked = isinstance(path[-1], DictKey)
        name = jax.tree_util.keystr(path[-1:], simple=True)
        weight = table[name]

        def read_part(index) -> np.ndarray:
            if not stacked:
                whole = from_stored(weight, read(WeightKey(name, None)), shape)
                return whole[index].astype(np.dtype(dtype))
            sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
            out = np.empty(sizes, np.dtype(dtype))
            for position, layer in enumerate(range(shape[0])[index[0]]):
                of_layer = from_stored(weight, read(WeightKey(name, layer)), shape[1:])
                out[position] = of_layer[index[1:]]
            return out

        return jax.make_array_from_callback(shape, sharding, read_part, dtype=np.dtype(dtype))

    rest = () if shardings is None else (shardings,)
    return jax.tree.map_with_path(make_leaf, abstract_weights(config), *rest)


def stored_weight(model: Model, key: WeightKey) -> np.ndarray:
    """Return one weight of a model, on the host, in its stored form: the inverse of `from_stored`.

    The model's layers may be stacked or unrolled.
    """
    weight = weights_of(model.config)[key.name]
    if key.layer is None:
        weight_in_memory = getattr(model, key.name)
    elif isinstance(model.layers, dict):
        weight_in_memory = jax.tree.map(lambda leaf: leaf[key.layer], model.layers[key.name])
    else:
        weight_in_memory = model.layers[key.layer][key.name]
    array = np.asarray(plain(weight_in_memory, len(weight.inputs)))
    letters = "".join(weight.stored)
    in_order = array.transpose([weight.axes.index(letter) for letter in letters])
    return in_order.reshape(stored_shape(weight, array.shape))


def check_weights(
    found: Mapping[str, tuple[Path, tuple[int, ...]]],
    names: Mapping[WeightKey, str],
    source: Path,
    config: ModelConfig,
) -> None:
    """Raise ValueError at the first tensor that is missing, of another shape, or unknown.

    `found` gives file and shape by name in the file, `names` the names of `config`'s weights.
    """
    model = f"a {config.family} model of {config.num_layers} layers"
    table = weights_of(config)
    expected = {
        names[key]: stored_shape(table[key.name], shape) for key, shape in weight_keys(config)
    }
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
