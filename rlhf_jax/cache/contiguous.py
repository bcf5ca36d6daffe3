"""Keep keys and values in the order of their slots, as the decoding kernels read them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from pallas_kernels import implementation
from pallas_kernels.arrays import Cache, LayerCache
from rlhf_jax.cache.cache import HEADS_SPEC, KVCache, Window, pick_rows, to_cache_axes
from rlhf_jax.mesh import Layout, on_each
from rlhf_jax.types import Array, ModelConfig


@struct.dataclass
class ContiguousCache(KVCache):
    """Hold per layer k [B, G, D, T] and v [B, G, T, D], in the dtype of matrix products."""

    layers: Cache

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, cache_length: int, layout: Layout
    ) -> ContiguousCache:
        """Make a cache of zeros."""
        heads = config.num_kv_heads
        dim = config.head_dim
        return cls(
            tuple(
                (
                    jnp.zeros((rows, heads, dim, cache_length), layout.dtype),
                    jnp.zeros((rows, heads, cache_length, dim), layout.dtype),
                )
                for _ in range(config.num_layers)
            )
        )

    @classmethod
    def prefill(cls, window: Window) -> ContiguousCache:
        """Return prompts' entries as they are."""
        return cls(window.layers)

    def attend(self, length: Array, mask: Array, layout: Layout) -> Callable:
        """Return the attention by the layout's kernel; see `_attend_cached`."""
        return functools.partial(
            _attend_cached, length=length, mask=mask, attend=_tree_attention(layout)
        )

    def memory(self, window: Window | None = None) -> tuple:
        """Return each layer's keys and values, and those of the window."""
        past = window.layers if window else (None,) * len(self.layers)
        return tuple(zip(self.layers, past, strict=True))

    def commit(self, window: Window, path: Array, start: Array, layout: Layout) -> ContiguousCache:
        """Write a path's entries by the layout's kernel."""
        return ContiguousCache(_commit(layout)(self.layers, window.layers, path, start))

    def specs(self) -> ContiguousCache:
        """Return the mesh axes of each leaf: rows and key-value heads are split."""
        return jax.tree.map(lambda _: HEADS_SPEC, self)

    def rows_out(self, rows: Array, cache_length: int) -> ContiguousCache:
        """Return rows [R] int32, cut to this length."""
        cut = tuple(
            (key[..., :cache_length], value[:, :, :cache_length]) for key, value in self.layers
        )
        return ContiguousCache(jax.tree.map(lambda leaf: pick_rows(leaf, rows), cut))


def _attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    memory: tuple[LayerCache, LayerCache | None],
    *,
    length: Array,
    mask: Array,
    attend: Callable,
) -> tuple[jax.Array, LayerCache]:
    """Attend from Q new tokens to a row's cache and to the window of uncommitted tokens.

    query [B, Q, H, D], key and value [B, Q, G, D] are the last Q of the window's W tokens; `memory`
    is the layer's cache (T slots, of which the first `length` [B] int32 are valid) and the window
    before them, k [B, G, D, W - Q] and v [B, G, W - Q, D] (`None` if empty); mask [B, Q, W] bool
    marks the tokens of the window that a query sees. `attend` is `tree_attention`. Returns out [B,
    Q, H, D] and the grown window. The cache is only read: accepted entries are committed later.
    """
    chex.assert_rank([query, key, value, length, mask], [4, 4, 4, 1, 3])
    cache, window = memory
    keys, values = to_cache_axes(key, value)
    if window is not None:
        keys = jnp.concatenate([window[0], keys], axis=3)
        values = jnp.concatenate([window[1], values], axis=2)
    return attend(query, *cache, keys, values, length, mask), (keys, values)


def _tree_attention(layout: Layout) -> Callable[..., jax.Array]:
    """Return `pallas_kernels.tree_attention.tree_attention` by the chosen implementation.

    Over a mesh, each device runs it on its own rows and heads.
    """
    attend = implementation("tree_attention", layout.kernels)
    if layout.kernels.tree_attention == "reference" or layout.mesh is None:
        return attend

    def attend_parts(query: Array, cache_k: Array, *others: Array) -> jax.Array:
        """Attend over each device's own rows and heads."""
        cache = layout.fit(HEADS_SPEC, cache_k.shape)
        rows, heads = cache[:2]
        new = PartitionSpec(rows, None, heads)
        of_rows = PartitionSpec(rows)
        # of the query, keys and values of the cache and of the window, the lengths and the mask
        specs = (new, cache, cache, cache, cache, of_rows, of_rows)
        return on_each(attend, layout, specs, new)(query, cache_k, *others)

    return attend_parts


def _commit(layout: Layout) -> Callable[[Cache, Cache, Array, Array], Cache]:
    """Return `pallas_kernels.commit.commit` by the chosen implementation."""
    write = implementation("commit", layout.kernels)
    if layout.kernels.commit == "reference" or layout.mesh is None:
        return write

    def write_parts(cache: Cache, window: Cache, path: Array, start: Array) -> Cache:
        """Commit on each device its own rows and heads."""
        spec = layout.fit(HEADS_SPEC, cache[0][0].shape)
        specs = (spec, spec, PartitionSpec(spec[0]), PartitionSpec(spec[0]))
        return on_each(write, layout, specs, spec)(cache, window, path, start)

    return write_parts
