"""The registry of model families: a new one is a file here and a line below."""

from typing import Any

from jax.tree_util import DictKey

from rlhf_jax.models.families.family import END_WEIGHTS, Family
from rlhf_jax.models.families.llama import LLAMA
from rlhf_jax.models.families.mistral import MISTRAL
from rlhf_jax.models.families.qwen2 import QWEN2
from rlhf_jax.models.families.qwen3 import QWEN3
from rlhf_jax.models.weight import Weight, WeightTable
from rlhf_jax.types import ModelConfig

# By name, in the order in which error messages list them.
FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def register(family: Family) -> None:
    """Register a family for model folders, under its name.

    Raises ValueError if another has that name, or a weight of its name with other axes.
    """
    if FAMILIES.get(family.name, family) != family:
        raise ValueError(f"There is a family {family.name!r} already; choose another name.")
    for name, weight in family.weights.items():
        known = _layer_weights().get(name, weight)
        if (known.axes, known.inputs) != (weight.axes, weight.inputs):
            raise ValueError(
                f"Weight {name!r} of family {family.name!r} has axes {weight.axes}, and"
                f" {known.axes} in another family; give it another name."
            )
    FAMILIES[family.name] = family


def weights_of(config: ModelConfig) -> WeightTable:
    """Return the table of a model's weights, in the order of random initialisation."""
    ends = dict(END_WEIGHTS)
    table = {"embed": ends.pop("embed"), **FAMILIES[config.family].weights, **ends}
    if config.tied:
        del table["head"]
    return table


def weight_at(path: tuple[Any, ...]) -> Weight | None:
    """Return the weight at or above a path in a tree of models or layers; None for other leaves.

    The path may be inside a weight of another kind, and the tree may hold gradients or moments.
    """
    inside = None  # the field that contains the path
    for key in path:
        if isinstance(key, DictKey) and inside in (None, "layers"):
            return _layer_weights().get(key.key)
        inside = getattr(key, "name", inside)
        if inside is not None and inside in END_WEIGHTS:
            return END_WEIGHTS[inside]
    return None


def _layer_weights() -> WeightTable:
    """Return the weights of layers of all families: one name has the same axes everywhere."""
    return {name: own for family in FAMILIES.values() for name, own in family.weights.items()}
