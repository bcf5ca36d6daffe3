"""Define what a kind of key-value cache does; nothing else knows how one lies in memory."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.arrays import Cache
from rlhf_jax.mesh import ROW_AXES, Layout, OwnSpecs, fitted, row_spec
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.types import Array, ModelConfig

# The mesh axes of [B, G, ...]: key-value heads lie over tensor as those of the weights do.
HEADS_SPEC = (ROW_AXES, "tensor", None, None)


@struct.dataclass
class Window(OwnSpecs):
    """Hold keys and values of W tokens that are in no cache: a round's nodes, or a prompt.

    All kinds of cache share it: per layer k [B, G, D, W] and v [B, G, W, D], in the dtype of the
    products.
    """

    layers: Cache

    def specs(self) -> Window:
        """Return the mesh axes of each leaf."""
        return jax.tree.map(lambda _: HEADS_SPEC, self)


class KVCache(OwnSpecs):
    """Hold the keys and values of a model's committed tokens, some slots for each of B rows.

    A kind is a subclass and a pytree (`flax.struct.dataclass`), by its name in
    `state.CACHE_KINDS`. The policy's cache and a draft model's are two of one kind. Inside a round
    a cache is only read: uncommitted tokens live in a `Window`. A kind that rounds what it stores
    rounds the window alike (`attend`), or drafts would see other keys than plain decoding does. The
    methods with a body do for kinds whose leaves all begin with the row; others override them.
    """

    @classmethod
    @abc.abstractmethod
    def empty(cls, config: ModelConfig, rows: int, slots: int, layout: Layout) -> Self:
        """Make a cache for a model, in the layout's dtype, inside a jitted function."""

    @classmethod
    @abc.abstractmethod
    def prefill(cls, window: Window) -> KVCache:
        """Return prompts' entries as rows that `rows_in` takes; every leaf begins with the row."""

    @abc.abstractmethod
    def attend(self, length: Array, mask: Array, layout: Layout) -> Callable:
        """Return the attention of a forward pass over the cache and a window of W tokens.

        It is the `attend` of `model.transformer.forward`, whose `memory` is that of this cache: Q
        new tokens, the last of the window, see the first length[B] int32 slots and the window's
        tokens by mask [B, Q, W] bool. What it keeps of all layers is the grown `Window`'s layers.
        """

    @abc.abstractmethod
    def memory(self, window: Window | None = None) -> tuple:
        """Return what `attend` reads, by layer; window: the tokens that came before, if any."""

    @abc.abstractmethod
    def commit(self, window: Window, path: Array, start: Array, layout: Layout) -> Self:
        """Write window entries path [B, J] int32 to slots start[B] int32 onwards, in place.

        All J entries are written, accepted or not: the next round writes the others again.
        """

    @abc.abstractmethod
    def specs(self) -> Self:
        """Return the mesh axes of each leaf, a tuple each in its place."""

    @abc.abstractmethod
    def rows_out(self, rows: Array, slots: int) -> KVCache:
        """Return rows [R] int32, cut to `slots`; every leaf begins with the row.

        A row past the end gives zeros, so that devices' parts add up.
        """

    def rows_in(self, rows: Array, new: KVCache) -> Self:
        """Write what `rows_out` or `prefill` gave to rows [R] int32; one past the end is dropped.

        new may have fewer slots.
        """
        return jax.tree.map(lambda old, leaf: write_rows(old, rows, leaf), self, new)

    def take(self, rows: Array, layout: Layout, execute: Execute) -> Self:
        """Return a cache of rows [R] int32, in that order, and use this one up."""
        return jax.tree.map(
            lambda leaf, spec: take_rows(leaf, rows, layout, execute, spec), self, self.specs()
        )

    @property
    def nbytes(self) -> int:
        """Count the bytes of all its leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def is_cache(part: Any) -> bool:
    """Say whether a part of a tree is a cache, which moves its rows itself."""
    return isinstance(part, KVCache)


def take_rows(
    leaf: Any, rows: Array, layout: Layout, execute: Execute, spec: tuple | None = None
) -> jax.Array:
    """Return rows [R] int32 of a row-first leaf, and give the leaf up.

    So the peak of memory is one leaf more than a tree that is taken leaf by leaf. spec: the mesh
    axes of its dimensions, where more than the rows is split. The leaf may be a shape, where
    `execute` runs nothing.
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
    """Return rows [R] int32 of a row-first leaf, zeros for those past its end."""
    found = jnp.concatenate([jax.lax.dynamic_slice_in_dim(leaf, row, 1) for row in rows])
    here = jnp.expand_dims(rows < len(leaf), range(1, leaf.ndim))
    return jnp.where(here, found, jnp.zeros((), leaf.dtype))


def write_rows(old: jax.Array, rows: Array, new: Array) -> jax.Array:
    """Write new [R, ...] to the front of rows [R] int32; a row past the end is dropped."""
    place = (rows, *(slice(0, size) for size in new.shape[1:]))
    return old.at[place].set(new, mode="drop")
