"""Define the interface of a key-value cache; only a cache kind knows its memory layout."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.arrays import Cache, LayerCache
from rlhf_jax.mesh import ROW_AXES, Layout, OwnSpecs, fitted, row_spec
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.types import Array, ModelConfig

# The mesh axes of [B, G, ...]: key-value heads are split over tensor, as in the weights.
HEADS_SPEC = (ROW_AXES, "tensor", None, None)


@struct.dataclass
class Window(OwnSpecs):
    """Hold keys and values of W uncommitted tokens: the nodes of a round, or a prompt.

    All cache kinds share it: per layer k [B, G, D, W] and v [B, G, W, D], in the dtype of matrix
    products.
    """

    layers: Cache

    def specs(self) -> Window:
        """Return the mesh axes of each leaf."""
        return jax.tree.map(lambda _: HEADS_SPEC, self)


def to_cache_axes(key: jax.Array, value: jax.Array) -> LayerCache:
    """Transpose keys and values [B, W, G, D] to (k [B, G, D, W], v [B, G, W, D]).

    Both products of attention then read contiguous rows.
    """
    return key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)


class KVCache(OwnSpecs):
    """Hold the keys and values of a model's committed tokens, a fixed number of slots per row.

    A kind is a subclass and a pytree (`flax.struct.dataclass`), by its name in `state.CACHE_KINDS`.
    The policy's cache and a draft model's are two of one kind. Inside a round a cache is only read:
    uncommitted tokens live in a `Window`. A kind that rounds stored entries must round the window
    alike (`attend`), or drafts would see other keys than plain decoding does. The methods with a
    body suit kinds whose leaves all begin with the row; others override them.
    """

    @classmethod
    @abc.abstractmethod
    def empty(cls, config: ModelConfig, rows: int, cache_length: int, layout: Layout) -> Self:
        """Make a cache for a model, in the layout's dtype, inside a jitted function."""

    @classmethod
    @abc.abstractmethod
    def prefill(cls, window: Window) -> KVCache:
        """Return prompts' entries as rows that `rows_in` takes; every leaf begins with the row."""

    @abc.abstractmethod
    def attend(self, length: Array, mask: Array, layout: Layout) -> Callable:
        """Return the attention function of a forward pass over the cache and a window of W tokens.

        It is the `attend` of `model.transformer.forward`, whose `memory` is that of this cache: Q
        new tokens, the last of the window, see the first length[B] int32 slots and the window's
        tokens by mask [B, Q, W] bool. The state it returns for all layers is the grown `Window`'s
        layers.
        """

    @abc.abstractmethod
    def memory(self, window: Window | None = None) -> tuple:
        """Return the inputs of `attend` by layer; window: earlier uncommitted tokens, if any."""

    @abc.abstractmethod
    def commit(self, window: Window, path: Array, start: Array, layout: Layout) -> Self:
        """Write window entries path [B, J] int32 to slots start[B] int32 onwards, in place.

        All J entries are written, accepted or not: the next round overwrites the rejected ones.
        """

    @abc.abstractmethod
    def specs(self) -> Self:
        """Return the mesh axes of each leaf, a tuple each in its place."""

    @abc.abstractmethod
    def rows_out(self, rows: Array, cache_length: int) -> KVCache:
        """Return rows [R] int32, cut to this length; every leaf begins with the row.

        A row past the end gives zeros, so that the parts of several devices can be summed.
        """

    def rows_in(self, rows: Array, new: KVCache) -> Self:
        """Write the output of `rows_out` or `prefill` to rows [R] int32; drop rows past the end.

        new may have a shorter cache.
        """
        return jax.tree.map(lambda old, leaf: write_rows(old, rows, leaf), self, new)

    def take(self, rows: Array, layout: Layout, execute: Execute) -> Self:
        """Return a cache of rows [R] int32, in that order, and donate this one."""
        return jax.tree.map(
            lambda leaf, spec: take_rows(leaf, rows, layout, execute, spec), self, self.specs()
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of all leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def is_cache(part: Any) -> bool:
    """Return whether a part of a tree is a cache, which moves its rows itself."""
    return isinstance(part, KVCache)


def take_rows(
    leaf: Any, rows: Array, layout: Layout, execute: Execute, spec: tuple | None = None
) -> jax.Array:
    """Return rows [R] int32 of a row-first leaf, and donate the leaf.

    Taking a tree leaf by leaf needs the memory of one leaf more at its peak. spec: the mesh axes of
    its dimensions, if more than the rows is split. The leaf may be a shape if `execute` runs
    nothing.
    """
    taken = execute(_take, leaf, rows, spec=spec or row_spec(leaf.ndim), layout=layout)
    if isinstance(leaf, jax.Array):
        leaf.delete()
    return taken


@functools.partial(jax.jit, static_argnames=("spec", "layout"))
def _take(leaf: Array, rows: Array, *, spec: tuple, layout: Layout) -> jax.Array:
    taken = jnp.take(jnp.asarray(leaf), rows, axis=0)
    if layout.mesh is None:
        return taken
    return jax.lax.with_sharding_constraint(taken, fitted(layout, spec, taken.shape))


def pick_rows(leaf: Array, rows: Array) -> jax.Array:
    """Return rows [R] int32 of a row-first leaf, with zeros for rows past its end."""
    picked = jnp.concatenate([jax.lax.dynamic_slice_in_dim(leaf, row, 1) for row in rows])
    here = jnp.expand_dims(rows < len(leaf), range(1, leaf.ndim))
    return jnp.where(here, picked, jnp.zeros((), leaf.dtype))


def write_rows(old: jax.Array, rows: Array, new: Array) -> jax.Array:
    """Write new [R, ...] to the front of rows [R] int32; drop rows past the end."""
    place = (rows, *(slice(0, size) for size in new.shape[1:]))
    return old.at[place].set(new, mode="drop")
