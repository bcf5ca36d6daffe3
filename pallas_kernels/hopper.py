"""What the kernels for Hopper (Mosaic GPU) share: layouts, loads and stores, and the product of
rows and the head.

The product streams through shared memory: a thread block takes up to 128 rows (nodes, tokens)
through one slice of the vocabulary, block by block of 256 tokens. A warpgroup's accumulators are 64
rows' logits of one block, and never leave its registers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import BLOCK

DEPTH = 64  # of the width, fetched at a time
STAGES = 4  # slots of the ring: with two warpgroups they take 192 of 227 KiB
TILE = 64  # rows of a warpgroup: the height of its matrix instruction
PLACES = 132  # multiprocessors of an H100
LOWEST = -1e30  # the running maximum before anything is seen: finite, so that differences are
STRIP = 64  # columns of a block that are read or written at a time: all would not fit the registers
TRANSFORMS = (
    plgpu.TilingTransform((8, 64)),
    plgpu.SwizzleTransform(128),
)  # 64 bfloat16 are 128 bytes
ROWWISE = plgpu.Layout.WGMMA.reduce(1)


def load(ref, layout: Any = ROWWISE) -> Array:
    """What lies at a ref of device memory, in registers."""
    # jax 0.10 wants an index, 0.12 none.
    everything = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *everything, layout=layout, optimized=False)


def store(ref, x: Array) -> None:
    """Write registers to a ref of device memory, however narrow the stores."""
    if hasattr(plgpu, "store"):  # from jax 0.12 on: there an assignment refuses narrow ones
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x


def interpretation(interpret: bool, off: Any = None) -> Any:
    """Pallas' GPU interpreter, which jax has from 0.12 on, or `off`."""
    return plgpu.InterpretGPUParams() if interpret else off  # pyright: ignore[reportAttributeAccessIssue]


class Plan(NamedTuple):
    """How one product is cut into thread blocks; static."""

    warpgroups: int  # of a thread block, `TILE` rows each
    tiles: int  # thread blocks that share a slice by rows
    slices: int  # of the vocabulary
    share: int  # blocks of a slice, the last one's excepted
    chunks: int  # of the width, `DEPTH` each
    vocab: int
    tied: bool
    temperature: float

    @property
    def rows(self) -> int:
        """Rows, with those that fill up the last tile."""
        return self.tiles * self.warpgroups * TILE

    @property
    def grid(self) -> dict[str, Any]:
        """Its thread blocks and threads: what shares a slice of the head runs side by side."""
        of_blocks = {"grid": (self.tiles, self.slices), "grid_names": ("tile", "slice")}
        return of_blocks | {"num_threads": self.warpgroups, "thread_name": "warpgroup"}


def plan(rows: int, width: int, vocab: int, tied: bool, temperature: float) -> Plan:
    """The plan for hidden [rows, width] and a head of `vocab` tokens: as many slices as fill the
    chip.
    """
    warpgroups = 1 if rows <= TILE else 2
    tiles = pl.cdiv(rows, warpgroups * TILE)
    blocks = pl.cdiv(vocab, BLOCK)
    share = pl.cdiv(blocks, max(1, PLACES // tiles))
    return Plan(
        warpgroups,
        tiles,
        pl.cdiv(blocks, share),
        share,
        pl.cdiv(width, DEPTH),
        vocab,
        tied,
        temperature,
    )


class Ring(NamedTuple):
    """Shared memory through which rows and head come, and its barriers; A is the warpgroups, S the
    stages.
    """

    hidden: Any  # [S, A * TILE, DEPTH]
    head: Any  # [S, DEPTH, 256], or [S, 256, DEPTH] where tied
    loaded: Any  # [S]: hidden and head are here
    consumed: Any  # [S]: every warpgroup has multiplied them


def smem(*shape: int) -> Any:
    """Shared memory for bfloat16 tiles as the matrix unit wants them; the last dimension is a
    multiple of 64.
    """
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TRANSFORMS)


def ring(plan: Plan) -> Ring:
    """What to allocate."""
    return Ring(
        hidden=smem(STAGES, plan.warpgroups * TILE, DEPTH),
        head=smem(STAGES, BLOCK, DEPTH) if plan.tied else smem(STAGES, DEPTH, BLOCK),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=STAGES),
    )


class Work(NamedTuple):
    """What one warpgroup does: its rows of all, through so many blocks of the vocabulary from block
    `first` on.
    """

    me: Array
    rows: Any  # pl.Slice
    part: Array  # the slice
    first: Array
    blocks: Array


def work(plan: Plan) -> Work:
    """That of the warpgroup that asks."""
    tile, part, me = (lax.axis_index(name) for name in ("tile", "slice", "warpgroup"))
    first = part * plan.share
    blocks = jnp.minimum(plan.share, pl.cdiv(plan.vocab, BLOCK) - first)
    return Work(me, pl.ds((tile * plan.warpgroups + me) * TILE, TILE), part, first, blocks)


def stream(
    plan: Plan,
    ring: Ring,
    hidden,
    head,
    visit: Callable[[Array, Callable[[], Array], Any], Any],
    carry: Any,
):
    """The carry after visit(block, logits, carry) at each block of this warpgroup's slice, one
    after another.

    hidden [plan.rows, M] and head ([M, V], or [V, M] where tied) are refs in bfloat16; block is its
    number in the vocabulary. A visit calls `logits` once: it waits for the block's logits [TILE,
    256], not tempered.
    """
    mine = work(plan)
    nodes = hidden.at[
        pl.ds(lax.axis_index("tile") * plan.warpgroups * TILE, plan.warpgroups * TILE)
    ]
    fetch = functools.partial(_fetch, plan, nodes, head, ring, mine.first)

    @pl.when(mine.me == 0)
    def _():
        lax.fori_loop(
            0, jnp.minimum(mine.blocks * plan.chunks, STAGES), lambda step, _: fetch(step), None
        )

    def step(count: Array, carry):
        return visit(
            mine.first + count, functools.partial(_logits, plan, ring, mine, fetch, count), carry
        )

    return lax.fori_loop(0, mine.blocks, step, carry)


def _fetch(plan: Plan, nodes, head, ring: Ring, first: Array, step: Array) -> None:
    """Start the copies of one step's rows and of its part of the head into its slot."""
    slot = lax.rem(step, STAGES)
    block = pl.ds((first + lax.div(step, plan.chunks)) * BLOCK, BLOCK)
    depth = pl.ds(lax.rem(step, plan.chunks) * DEPTH, DEPTH)
    source = head.at[block, depth] if plan.tied else head.at[depth, block]
    plgpu.copy_gmem_to_smem(nodes.at[:, depth], ring.hidden.at[slot], ring.loaded.at[slot])
    plgpu.copy_gmem_to_smem(source, ring.head.at[slot], ring.loaded.at[slot])


def _logits(plan: Plan, ring: Ring, mine: Work, fetch: Callable, count: Array) -> Array:
    """Logits [TILE, 256] of the `count`-th block of the slice."""

    def multiply(accumulator):
        def add(chunk, _):
            step = count * plan.chunks + chunk
            slot = lax.rem(step, STAGES)
            plgpu.barrier_wait(ring.loaded.at[slot])
            part = ring.head.at[slot]
            nodes = ring.hidden.at[slot, pl.ds(mine.me * TILE, TILE)]
            plgpu.wgmma(accumulator, nodes, part.transpose((1, 0)) if plan.tied else part)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(
                lambda: _refill(ring, mine.me, fetch, step, mine.blocks * plan.chunks)
            )

        lax.fori_loop(0, plan.chunks, add, None)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, BLOCK), jnp.float32))


def _refill(ring: Ring, me: Array, fetch: Callable, step: Array, steps: Array) -> None:
    """Give back the slot of the step before, and fill it with what comes after those in flight."""
    coming = step + STAGES - 1
    slot = lax.rem(coming, STAGES)
    plgpu.barrier_arrive(ring.consumed.at[slot])

    @pl.when((me == 0) & (coming < steps))
    def _():
        plgpu.barrier_wait(ring.consumed.at[slot])
        fetch(coming)


def rowwise(value: float, dtype: Any = jnp.float32) -> Array:
    """[TILE] of one value, as a sum over the columns of logits has it."""
    return plgpu.layout_cast(jnp.full((TILE,), value, dtype), ROWWISE)


def across(x: Array, shape: tuple[int, ...]) -> Array:
    """x [TILE] of rows, repeated over the columns of `shape` [TILE, C]."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns(shape: tuple[int, ...]) -> Array:
    """The number of each column of logits [TILE, C], int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
