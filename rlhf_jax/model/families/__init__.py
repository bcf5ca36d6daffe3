"""The registry of model families: one more is a file here and a line below."""

from rlhf_jax.model.families.family import Family
from rlhf_jax.model.families.llama import LLAMA
from rlhf_jax.model.families.mistral import MISTRAL
from rlhf_jax.model.families.qwen2 import QWEN2
from rlhf_jax.model.families.qwen3 import QWEN3

# By name, in the order in which error sentences list them.
FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def register(family: Family) -> None:
    """Let model folders be of a family, under its name; ValueError where another has that name."""
    if FAMILIES.get(family.name, family) != family:
        raise ValueError(f"There is a family {family.name!r} already; choose another name.")
    FAMILIES[family.name] = family
