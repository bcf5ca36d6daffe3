"""Hold the rows of running samples, row first: their caches and all other decoding state."""

from __future__ import annotations

import dataclasses

import jax
from flax import struct

from rlhf_jax.cache.cache import KVCache, is_cache, pick_rows, write_rows
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.runtime.extensions import Registry
from rlhf_jax.types import Array


def _no_kind(candidate: object) -> str:
    """Return why an object is not a cache kind, or ''."""
    return "" if isinstance(candidate, type) and issubclass(candidate, KVCache) else "is no KVCache"


# Cache kinds, by the name in a layout.
CACHE_KINDS: Registry[type[KVCache]] = Registry(
    "Layout.cache", _no_kind, {"contiguous": ContiguousCache}
)


@struct.dataclass
class DraftState:
    """Hold the state of a draft model, by row."""

    cache: KVCache
    length: jax.Array  # [B] int32, the number of committed cache slots.


@struct.dataclass
class DecodeState:
    """Hold running samples, one per row; axis 0 of every leaf except caches is the row.

    `length` counts known tokens. The cache holds the first `length - 1` of them: the last one is
    the root of the next round.
    """

    tokens: jax.Array  # [B, T] int32
    length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, the length at which the sample ends.
    done: jax.Array  # [B] bool, whether the sample has ended; also true for empty rows.
    key: jax.Array  # [B, 2] uint32, (seed, sample id): the key of the row's noise.
    temperature: jax.Array  # [B] float32, the sampling temperature of the row; 0: argmax.
    history: jax.Array  # [B, E] int32, earlier roll-outs for lookup; -1 between and after.
    # [B, T or 0] int32, the earlier text of the same noise, by position; -1 for none.
    earlier: jax.Array
    cache: KVCache
    draft: DraftState | None


def rows_out(state: DecodeState, rows: Array, cache_length: int) -> DecodeState:
    """Return rows [R] int32 of a state, cut to a length in tokens; row first, caches included.

    A row past the end gives zeros.
    """

    def give(part):
        return part.rows_out(rows, cache_length) if is_cache(part) else pick_rows(part, rows)

    cut = dataclasses.replace(state, tokens=state.tokens[:, :cache_length])
    return jax.tree.map(give, cut, is_leaf=is_cache)


def rows_in(state: DecodeState, rows: Array, new: DecodeState) -> DecodeState:
    """Write the output of `rows_out`, or new rows, to rows [R] int32 of a state.

    Rows past the end are dropped. new may be shorter.
    """

    def put(part, new):
        return part.rows_in(rows, new) if is_cache(part) else write_rows(part, rows, new)

    return jax.tree.map(put, state, new, is_leaf=is_cache)
