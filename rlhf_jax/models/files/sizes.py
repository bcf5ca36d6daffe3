"""Bounds of a model's sizes and token ids, for all kinds of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.types import ModelConfig, RopeScaling

# The largest value of each size: far beyond any model, so that a damaged file builds nothing.
LARGEST_SIZES = {
    "vocab_size": 1 << 24,
    "width": 1 << 20,
    "ffn_width": 1 << 22,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_context": 1 << 31,
}
# The largest base of a rotary embedding, and the largest factor that scales one.
LARGEST_FACTOR = 1e12


def checked(config: ModelConfig, file: Path) -> ModelConfig:
    """Return a config that was read from a file; ValueError if a size is out of bounds."""
    for name, largest in LARGEST_SIZES.items():
        value = getattr(config, name)
        if not _is_int(value) or not 0 < value <= largest:
            raise ValueError(
                f"{file}: {name} is {value!r:.60}; it must be a whole number in 1 .. {largest}."
            )
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim is {config.head_dim}; it must be even.")

    def number(name: str, value: Any, largest: float = LARGEST_FACTOR) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= largest:
            raise ValueError(
                f"{file}: {name} is {value!r:.60}; it must be above 0, {largest:g} at most."
            )
        return float(value)

    scaling = config.rope_scaling
    if scaling is not None:
        named = dataclasses.asdict(scaling)
        kind = named.pop("kind")
        context = int(number("original_max_position_embeddings", named.pop("original_context")))
        numbers = {name: number(f"rope scaling's {name}", value) for name, value in named.items()}
        scaling = RopeScaling(kind, **numbers, original_context=context)
    return dataclasses.replace(
        config,
        norm_eps=number("norm_eps", config.norm_eps, largest=1.0),
        rope_theta=number("rope_theta", config.rope_theta),
        rope_scaling=scaling,
    )


def checked_ids(ids: Sequence[Any], file: Path, key: str) -> tuple[int, ...]:
    """Return token ids that were read from a file; ValueError if one is out of bounds."""
    for token in ids:
        if not _is_int(token) or not 0 <= token < LARGEST_SIZES["vocab_size"]:
            raise ValueError(f"{file}: {key} is {token!r:.60}; it must be a token id.")
    return tuple(ids)


def token_id(content: Mapping[str, Any], key: str, file: Path) -> int | None:
    """Return the token id under a key of a file's content; None if there is none.

    -1, as in older folders, means none. ValueError if it is invalid.
    """
    value = content.get(key)
    return None if value in (None, -1) else checked_ids([value], file, key)[0]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
