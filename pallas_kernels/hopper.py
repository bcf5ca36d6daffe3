"""Shared code of the kernels for Hopper (Mosaic GPU).

Layouts, loads and stores come first, then the product of rows and the head. It streams through
shared memory: a thread block takes up to 128 rows (nodes, tokens) through one slice of the
vocabulary, block by block of 256 tokens. A warpgroup's accumulators are 64 rows' logits of one
block, and never leave its registers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import BLOCK

# The multiprocessors of an H100.
MULTIPROCESSORS = 132
# Rows per warpgroup: the height of its matrix instruction.
WARPGROUP_ROWS = 64
# Columns of the width fetched at a time.
DEPTH = 64
# Slots of the head's ring: with two warpgroups they take 192 of 227 KiB.
HEAD_SLOTS = 4
# Columns of a block read or written at a time: all would not fit the registers.
STRIP = 64
# Matrix instructions require tiles of 8 rows of 64 bfloat16, which are 128 bytes.
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# One number per row, laid out like a sum over the columns of a product.
ROWWISE = plgpu.Layout.WGMMA.reduce(1)


class ProductPlan(NamedTuple):
    """Describe how one product is cut into thread blocks; static."""

    warpgroups: int  # of a thread block, WARPGROUP_ROWS rows each
    tiles: int  # thread blocks that share a slice by rows
    slices: int  # of the vocabulary
    share: int  # blocks of a slice, the last one's excepted
    chunks: int  # of the width, DEPTH each
    vocab: int
    tied: bool

    @property
    def rows(self) -> int:
        """Return the number of rows, padded to whole tiles."""
        return self.tiles * self.warpgroups * WARPGROUP_ROWS

    @property
    def grid(self) -> dict[str, Any]:
        """Return thread blocks and threads; blocks with one slice of the head run side by side."""
        of_blocks = {"grid": (self.tiles, self.slices), "grid_names": ("tile", "slice")}
        return of_blocks | {"num_threads": self.warpgroups, "thread_name": "warpgroup"}


class Ring(NamedTuple):
    """Hold the shared memory of incoming rows and head, and its barriers.

    The fields are references in a kernel, and specifications outside. A is the warpgroups, S the
    slots.
    """

    hidden: Any  # [S, A * WARPGROUP_ROWS, DEPTH]
    head: Any  # [S, DEPTH, 256], or [S, 256, DEPTH] if tied
    loaded: Any  # [S]: hidden and head have arrived
    consumed: Any  # [S]: every warpgroup has multiplied them


class WarpgroupWork(NamedTuple):
    """Describe the work of one warpgroup: its rows, and its blocks of the vocabulary."""

    me: Array  # the warpgroup's number in its thread block
    rows: Any  # a pl.Slice of all rows
    part: Array  # the slice of the vocabulary
    first: Array  # its first block
    blocks: Array  # the number of its blocks


def load(ref: Any, layout: Any = ROWWISE) -> Array:
    """Read a reference to device memory into registers of a layout."""
    # jax 0.10 requires an index, 0.12 none.
    everything = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *everything, layout=layout, optimized=False)


def store(ref: Ref, x: Array) -> None:
    """Store registers to a reference to device memory, however narrow the stores."""
    # jax 0.12 has this function, and there an assignment refuses narrow stores.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x


def interpretation(interpret: bool, off: Any = None) -> Any:
    """Return the parameters of Pallas' GPU interpreter (jax 0.12 and later), or `off`."""
    return plgpu.InterpretGPUParams() if interpret else off  # pyright: ignore[reportAttributeAccessIssue]


def smem(*shape: int) -> Any:
    """Describe shared memory for bfloat16 tiles as the matrix unit requires them.

    The last dimension is a multiple of 64.
    """
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TRANSFORMS)


def rowwise(value: float, dtype: Any = jnp.float32) -> Array:
    """Return [WARPGROUP_ROWS] of one value, laid out like a sum over the columns of logits."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, dtype), ROWWISE)


def across(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat numbers of rows, x [WARPGROUP_ROWS], over the columns of `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns(shape: tuple[int, ...]) -> Array:
    """Return the number of each column of logits [WARPGROUP_ROWS, C], int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def plan(rows: int, width: int, vocab: int, *, tied: bool) -> ProductPlan:
    """Plan the product of hidden [rows, width] and a head of `vocab` tokens.

    The vocabulary is cut into as many slices as fill the chip.
    """
    warpgroups = 1 if rows <= WARPGROUP_ROWS else 2
    tiles = pl.cdiv(rows, warpgroups * WARPGROUP_ROWS)
    blocks = pl.cdiv(vocab, BLOCK)
    share = pl.cdiv(blocks, max(1, MULTIPROCESSORS // tiles))
    return ProductPlan(
        warpgroups=warpgroups,
        tiles=tiles,
        slices=pl.cdiv(blocks, share),
        share=share,
        chunks=pl.cdiv(width, DEPTH),
        vocab=vocab,
        tied=tied,
    )


def ring(plan: ProductPlan) -> Ring:
    """Describe the ring to allocate for a product."""
    return Ring(
        hidden=smem(HEAD_SLOTS, plan.warpgroups * WARPGROUP_ROWS, DEPTH),
        head=smem(HEAD_SLOTS, BLOCK, DEPTH) if plan.tied else smem(HEAD_SLOTS, DEPTH, BLOCK),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=HEAD_SLOTS),
        consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=HEAD_SLOTS),
    )


def work(plan: ProductPlan) -> WarpgroupWork:
    """Return the work of the warpgroup that calls it, inside a kernel."""
    tile, part, me = (lax.axis_index(name) for name in ("tile", "slice", "warpgroup"))
    first = part * plan.share
    blocks = jnp.minimum(plan.share, pl.cdiv(plan.vocab, BLOCK) - first)
    rows = pl.ds((tile * plan.warpgroups + me) * WARPGROUP_ROWS, WARPGROUP_ROWS)
    return WarpgroupWork(me, rows, part, first=first, blocks=blocks)


def stream(
    plan: ProductPlan,
    ring: Ring,
    hidden: Ref,
    *,
    head: Ref,
    visit: Callable[[Array, Callable[[], Array], Any], Any],
    carry: Any,
) -> Any:
    """Return the carry after visit(block, logits, carry) at each block of a warpgroup's slice.

    Blocks are visited in order. hidden [plan.rows, M] and head ([M, V], or [V, M] if tied) are
    references in bfloat16; block is its number in the vocabulary. A visit calls `logits` once: it
    waits for the block's logits [WARPGROUP_ROWS, 256], not tempered.
    """
    mine = work(plan)
    first = lax.axis_index("tile") * plan.warpgroups * WARPGROUP_ROWS
    nodes = hidden.at[pl.ds(first, plan.warpgroups * WARPGROUP_ROWS)]
    fetch = functools.partial(_fetch, plan, nodes, head, ring, mine.first)

    @pl.when(mine.me == 0)
    def fill_ring() -> None:
        """Start the first copies, one for each slot of the ring."""
        steps = jnp.minimum(mine.blocks * plan.chunks, HEAD_SLOTS)
        lax.fori_loop(0, steps, lambda step, _: fetch(step), None)

    def step(count: Array, carry: Any) -> Any:
        """Visit the `count`-th block of the slice."""
        logits = functools.partial(_logits, plan, ring, mine, fetch, count)
        return visit(mine.first + count, logits, carry)

    return lax.fori_loop(0, mine.blocks, step, carry)


def _fetch(plan: ProductPlan, nodes: Ref, head: Ref, ring: Ring, first: Array, step: Array) -> None:
    """Start the copies of one step's rows and of its part of the head into its slot."""
    slot = lax.rem(step, HEAD_SLOTS)
    block = pl.ds((first + lax.div(step, plan.chunks)) * BLOCK, BLOCK)
    depth = pl.ds(lax.rem(step, plan.chunks) * DEPTH, DEPTH)
    source = head.at[block, depth] if plan.tied else head.at[depth, block]
    plgpu.copy_gmem_to_smem(nodes.at[:, depth], ring.hidden.at[slot], ring.loaded.at[slot])
    plgpu.copy_gmem_to_smem(source, ring.head.at[slot], ring.loaded.at[slot])


def _logits(
    plan: ProductPlan, ring: Ring, mine: WarpgroupWork, fetch: Callable, count: Array
) -> Array:
    """Compute logits [WARPGROUP_ROWS, 256] of the `count`-th block of the slice."""

    def multiply(accumulator: Any) -> Array:
        """Sum the products of all chunks of the width."""

        def add(chunk: Array, _: None) -> None:
            """Add the product of one chunk, and refill the slot of the one before."""
            step = count * plan.chunks + chunk
            slot = lax.rem(step, HEAD_SLOTS)
            plgpu.barrier_wait(ring.loaded.at[slot])
            part = ring.head.at[slot]
            nodes = ring.hidden.at[slot, pl.ds(mine.me * WARPGROUP_ROWS, WARPGROUP_ROWS)]
            plgpu.wgmma(accumulator, nodes, part.transpose((1, 0)) if plan.tied else part)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(
                lambda: _refill(ring, mine.me, fetch, step=step, steps=mine.blocks * plan.chunks)
            )

        lax.fori_loop(0, plan.chunks, add, None)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, BLOCK), jnp.float32))


def _refill(ring: Ring, me: Array, fetch: Callable, *, step: Array, steps: Array) -> None:
    """Free the previous step's slot, and fill it with the next fetch after those in flight."""
    coming = step + HEAD_SLOTS - 1
    slot = lax.rem(coming, HEAD_SLOTS)
    plgpu.barrier_arrive(ring.consumed.at[slot])

    @pl.when((me == 0) & (coming < steps))
    def fill() -> None:
        """Wait until every warpgroup has freed the slot, and fetch into it."""
        plgpu.barrier_wait(ring.consumed.at[slot])
        fetch(coming)
