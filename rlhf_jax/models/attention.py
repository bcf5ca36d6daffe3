"""Causal attention over whole rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike

from rlhf_jax.mesh import ONE_DEVICE, ROW_AXES, Layout, on_each
from rlhf_jax.models.packed_attention import attend_packed
from rlhf_jax.runtime.jax_internals import cudnn_version

# Queries per block of plain attention, and tokens per block of splash attention.
QUERY_BLOCK = 512
# Tokens per block of packed lines; small ones skip more of a line.
BLOCKS = {"cpu": 128}


def causal_on(layout: Layout) -> Callable:
    """Return causal attention in right-padded rows, by the layout's kernel if it has one.

    query [B, Q, H, D], key and value [B, Q, G, D]; returns [B, Q, H, D] in the query's dtype.
    Padding comes after a row's tokens, so causality alone excludes it. Softmax in float32. Rows are
    split over the mesh, and heads over tensor where that divides them. Each device runs the kernel
    on its own part, without communication. B must be a multiple of the layout's row shards.
    """

    def attend(query: Array, key: Array, value: Array, memory: None = None) -> tuple[Array, None]:
        """Attend over each device's own rows and heads."""
        del memory
        chex.assert_rank([query, key, value], 4)
        kernel = KERNELS[kernel_of(layout, query.dtype, query.shape[-1])]
        return _on_parts(kernel, layout, (query, key, value)), None

    return attend


causal = causal_on(ONE_DEVICE)


def kernel_of(layout: Layout, dtype: DTypeLike, dim: int) -> str:
    """Return which of `KERNELS` attends causally on a layout's devices; '' is plain jax.

    The devices may be absent; of an unknown platform, they count as TPUs. A planned GPU has cuDNN,
    and one compiled for has it if it is installed here.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return ""
    if layout.platform in ("tpu", ""):
        return "splash"
    takes = layout.platform == "gpu" and dim <= 128 and dim % 8 == 0
    planned = isinstance(layout.mesh, AbstractMesh)
    return "cudnn" if takes and (planned or cudnn_version()) else ""


def packed_on(layout: Layout, segments: Array, pairs: Array) -> Callable:
    """Return attention within the samples of packed lines, with the layout of `causal_on`.

    query [S, C, H, D], key and value [S, C, G, D]; `segments` and `pairs` are those of a
    `PackedSequences`.
    """

    def attend(query: Array, key: Array, value: Array, memory: None = None) -> tuple[Array, None]:
        """Attend over each device's own lines and heads."""
        del memory
        return _on_parts(attend_packed, layout, (query, key, value), segments, pairs), None

    return attend


def packed_block(layout: Layout) -> int:
    """Return the tokens per block of attention within packed lines on a layout's devices."""
    return BLOCKS.get(layout.platform, QUERY_BLOCK)


def _on_parts(
    attend: Callable, layout: Layout, heads: tuple[Array, Array, Array], *lines: Array
) -> Array:
    """Run `attend` on each device's own part of [B, Q, heads, D] arrays and of row-first ones."""
    if layout.mesh is None or layout.mesh.size == 1:
        return attend(*heads, *lines)
    split = heads[1].shape[2] % layout.extent("tensor") == 0
    of_heads = PartitionSpec(ROW_AXES, None, "tensor" if split else None, None)
    specs = (of_heads,) * len(heads) + (PartitionSpec(ROW_AXES),) * len(lines)
    return on_each(attend, layout, specs, of_heads)(*heads, *lines)


def blockwise(query: Array, key: Array, value: Array) -> Array:
    """Attend causally, a block of queries at a time over the keys up to them.

    Shapes as in `causal`. For Q > QUERY_BLOCK [B, H, Q, Q] never exists: each block's weights are
    recomputed in the backward pass (Rabe and Staats 2021).
    """
    block = QUERY_BLOCK
    if query.shape[1] <= block:
        return _attend_block(query, key, value)
    attend = jax.checkpoint(_attend_block)
    stops = range(block, query.shape[1] + block, block)
    parts = [
        attend(query[:, stop - block : stop], key[:, :stop], value[:, :stop]) for stop in stops
    ]
    return jnp.concatenate(parts, axis=1)


def _attend_block(query: Array, key: Array, value: Array) -> Array:
    """Attend from the last queries of a row [B, Q, H, D] to all its keys [B, E, G, D]."""
    batch, count, heads, dim = query.shape
    end, groups = key.shape[1:3]
    grouped = query.reshape(batch, count, groups, heads // groups, dim)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32)
    seen = jnp.arange(end)[None, :] <= jnp.arange(end - count, end)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(
        value.dtype
    )
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype).reshape(batch, count, heads, dim)


def _splash(query: Array, key: Array, value: Array) -> Array:
    """Attend causally by splash attention, a kernel for TPUs."""
    # Imported here: no other platform should pay for loading Pallas.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    count, heads, dim = query.shape[1:]
    # The kernel requires whole lanes and whole blocks.
    unit = 128 if count < QUERY_BLOCK else QUERY_BLOCK
    padded = -(-count // unit) * unit
    block = min(padded, QUERY_BLOCK)
    sizes = splash.BlockSizes(
        *(block, block), block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    mask = splash.MultiHeadMask([splash.CausalMask((padded, padded))] * heads)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    lanes = [(0, 0), (0, padded - count), (0, 0), (0, 0)]
    parts = [jnp.pad(part, lanes).swapaxes(1, 2) for part in (query * dim**-0.5, key, value)]
    out: Array = jax.vmap(kernel)(*parts)  # pyright: ignore[reportAssignmentType]
    return out.swapaxes(1, 2)[:, :count]


KERNELS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "": blockwise,
    "splash": _splash,
    "cudnn": functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    ),
}
