"""Begin rows of a decoding state (`prefill`, `admit`), keep some (`resize`), end them (`retire`).

The row is the first axis of every leaf except in caches, which move their rows themselves.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rlhf_jax.cache.cache import KVCache, Window, is_cache, take_rows, to_cache_axes
from rlhf_jax.cache.state import CACHE_KINDS, DecodeState, DraftState, rows_in
from rlhf_jax.mesh import ONE_DEVICE, Layout, pin_rows
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.transformer import forward
from rlhf_jax.runtime.compilation import Execute, run_now
from rlhf_jax.types import Array, Model, ModelConfig


@struct.dataclass
class Prefix:
    """Hold prefilled prompts, one per row: the common beginning of a prompt's samples."""

    tokens: Array  # [B, P] int32
    length: Array  # [B] int32
    cache: KVCache  # from the kind's `prefill`: row first
    draft_cache: KVCache | None


@struct.dataclass
class Admission:
    """Define samples that begin: their prefixes and rows.

    A row past the end admits nothing.
    """

    source: Array  # [R] int32, row of the prefix
    row: Array  # [R] int32, row of the state
    limit: Array  # [R] int32
    key: Array  # [R, 2] uint32
    temperature: Array  # [R] float32
    history: Array  # [R, E] int32
    earlier: Array  # [R, T or 0] int32


def no_admission(state: DecodeState, size: int) -> dict[str, np.ndarray]:
    """Return the fields of an empty admission of `size` samples, to be filled in."""
    return {
        "source": np.zeros(size, np.int32),
        "row": np.full(size, len(state.done), np.int32),
        "limit": np.ones(size, np.int32),
        "key": np.zeros((size, 2), np.uint32),
        "temperature": np.ones(size, np.float32),
        "history": np.full((size, state.history.shape[1]), -1, np.int32),
        "earlier": np.full((size, state.earlier.shape[1]), -1, np.int32),
    }


@functools.partial(jax.jit, static_argnums=range(7))
def empty(
    target: ModelConfig,
    draft: ModelConfig | None,
    rows: int,
    cache_length: int,
    history: int,
    earlier: int,
    layout: Layout = ONE_DEVICE,
) -> DecodeState:
    """Make a state of rows that are all done, with room for `cache_length` tokens each.

    Each device makes its own part. `history` and `earlier` are the tokens kept of earlier
    roll-outs, for lookup and for replay.
    """
    kind = CACHE_KINDS[layout.cache]
    draft_cache = None if draft is None else kind.empty(draft, rows, cache_length, layout)
    state = DecodeState(
        tokens=jnp.zeros((rows, cache_length), jnp.int32),
        length=jnp.ones((rows,), jnp.int32),
        limit=jnp.ones((rows,), jnp.int32),
        done=jnp.ones((rows,), bool),
        key=jnp.zeros((rows, 2), jnp.uint32),
        temperature=jnp.ones((rows,), jnp.float32),
        history=jnp.full((rows, history), -1, jnp.int32),
        earlier=jnp.full((rows, earlier), -1, jnp.int32),
        cache=kind.empty(target, rows, cache_length, layout),
        draft=None
        if draft_cache is None
        else DraftState(draft_cache, jnp.zeros((rows,), jnp.int32)),
    )
    return pin_rows(state, layout)


def resize(
    state: DecodeState, rows: Array, layout: Layout = ONE_DEVICE, execute: Execute = run_now
) -> DecodeState:
    """Take the given rows [R] int32 leaf by leaf, and donate `state`.

    Each leaf is freed once it is copied, so the peak of memory is one leaf more. `state` may be
    shapes if `execute` runs nothing.
    """

    def move(part):
        take = part.take if is_cache(part) else functools.partial(take_rows, part)
        return take(rows, layout, execute)

    return jax.tree.map(move, state, is_leaf=is_cache)


def retire(state: DecodeState, rows: Array, layout: Layout = ONE_DEVICE) -> DecodeState:
    """Make rows [R] int32 idle; rows past the end are dropped. `state` is donated."""
    done = overwrite(state.done, rows, np.ones(len(rows), bool), layout=layout)
    return dataclasses.replace(state, done=done)


@functools.partial(jax.jit, static_argnames=("layout",))
def prefill(
    target: Model, drafter: Model | None, tokens: Array, length: Array, layout: Layout = ONE_DEVICE
) -> Prefix:
    """Compute the caches of prompts in the target and in the draft model.

    tokens [B, P] int32 are padded on the right, length [B] int32. On a mesh, B must be a multiple
    of its row shards.
    """
    chex.assert_rank([tokens, length], [2, 1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    causal = causal_on(layout)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, memory: None) -> tuple:
        """Attend causally, and keep keys and values in the layout of a window."""
        return causal(query, key, value, memory)[0], to_cache_axes(key, value)

    def cache(model: Model) -> KVCache:
        _, kept = forward(model, tokens, positions, attend)
        return CACHE_KINDS[layout.cache].prefill(Window(kept))

    return pin_rows(
        Prefix(tokens, length, cache(target), None if drafter is None else cache(drafter)), layout
    )


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("state",))
def admit(
    state: DecodeState, prefix: Prefix, admission: Admission, layout: Layout = ONE_DEVICE
) -> DecodeState:
    """Begin new samples in the admission's rows. `state` is donated."""
    begun = jax.tree.map(lambda leaf: jnp.take(leaf, admission.source, axis=0), prefix)
    own = ("limit", "key", "temperature", "history", "earlier")
    given = {name: getattr(admission, name) for name in own}
    draft = None if state.draft is None else DraftState(begun.draft_cache, begun.length - 1)
    new = DecodeState(
        tokens=begun.tokens,
        length=begun.length,
        done=jnp.zeros_like(admission.row, dtype=bool),
        cache=begun.cache,
        draft=draft,
        **given,
    )
    return pin_rows(rows_in(state, admission.row, new), layout)


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("leaf",))
def overwrite(leaf: Array, rows: Array, new: Array, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Replace rows [R] int32 of one leaf by `new` [R, ...]; rows past the end are dropped.

    A program of the whole state would take ten times as long to compile. `leaf` is donated.
    """
    return pin_rows(jnp.asarray(leaf).at[rows].set(new, mode="drop"), layout)
