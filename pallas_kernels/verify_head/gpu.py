"""`verify_head` on Hopper (Mosaic GPU): the head streams through shared memory, its logits never leave registers.

A thread block takes up to 128 nodes through one slice of the vocabulary, block by block of 256 tokens: a warpgroup's
accumulators are 64 nodes' logits of one block, so its log-sum-exp and score are had at once. The logits of the best
block so far lie in the output. Slices are combined like shards of the vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import BLOCK
from pallas_kernels.verify_head.reference import Parts, check, combine

DEPTH = 64  # of the width, fetched at a time
STAGES = 4  # slots of the ring: with two warpgroups they take 192 of 227 KiB
TILE = 64  # nodes of a warpgroup: the height of its matrix instruction
PLACES = 132  # thread blocks that an H100 runs at a time
LOWEST = -1e30  # the running maximum before anything is seen: finite, so that differences are
STRIP = 64  # columns of a block that are read and written at a time: all would not fit the registers
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 64 bfloat16 are 128 bytes
ROWWISE = plgpu.Layout.WGMMA.reduce(1)
EVERYTHING = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax 0.10 wants an index, 0.12 none


class Plan(NamedTuple):
    """How one call is cut into thread blocks; static."""

    warpgroups: int  # of a thread block, `TILE` nodes each
    tiles: int  # thread blocks that share a slice by nodes
    slices: int  # of the vocabulary
    share: int  # blocks of a slice, the last one's excepted
    chunks: int  # of the width, `DEPTH` each
    vocab: int
    tied: bool
    temperature: float

    @property
    def rows(self) -> int:
        """Nodes, with those that fill up the last tile."""
        return self.tiles * self.warpgroups * TILE


class Scratch(NamedTuple):
    """Shared memory of a thread block and its barriers; A is its warpgroups, S the stages."""

    hidden: Any  # [S, A * TILE, DEPTH]
    head: Any  # [S, DEPTH, 256], or [S, 256, DEPTH] where tied
    noise: Any  # [A, TILE] float32, of one block
    asked: Any  # [A]: a warpgroup's noise is here
    loaded: Any  # [S]: hidden and head are here
    consumed: Any  # [S]: every warpgroup has multiplied them


class Running(NamedTuple):
    """What the blocks so far have come to, at each node: [TILE] each."""

    top: Array  # the largest logit
    total: Array  # sum of exp(logit - top)
    score: Array  # of the best block
    block: Array  # its id, int32


def unsupported(hidden: Array, head: Array) -> str | None:
    """Why this kernel cannot serve hidden [R, M] and the head, in one sentence; None where it can."""
    if hidden.dtype != jnp.bfloat16:
        return f"The kernel serves bfloat16, not {hidden.dtype}: Hopper's matrix units round float32."
    if hidden.shape[1] % 64 or head.shape[0] % 8 or head.shape[1] % 64:
        return f"A width of {hidden.shape[1]} and a head of {head.shape} are no whole tiles of 8 x 64."
    return None


@functools.partial(jax.jit, static_argnames=("temperature", "tied", "interpret"))
def verify_head(
    hidden: Array,
    head: Array,
    noise: Array | None,
    vocab: Array | int | None = None,
    *,
    temperature: float,
    tied: bool,
    interpret: bool = False,
) -> Parts:
    """`reference.verify_head` in bfloat16 without [R, V] anywhere in device memory; same shapes.

    A draw differs from the reference's only where rounding decides: logits are summed in another order. Raises
    ValueError with the sentence of `unsupported`. `interpret` needs jax 0.12.
    """
    check(hidden, head, noise, temperature=temperature, tied=tied)
    if reason := unsupported(hidden, head):
        raise ValueError(reason)
    (rows, width), held = hidden.shape, head.shape[0 if tied else 1]
    plan = _plan(rows, width, held, tied, temperature)
    count = jnp.asarray(held if vocab is None else vocab, jnp.int32).reshape(1)
    fill = (0, plan.rows - rows), (0, 0)
    inputs = [count, jnp.pad(hidden, fill), head, *([] if noise is None else [jnp.pad(noise, fill).T])]
    parts = Parts(*(part[:, :rows] for part in _kernel(plan, interpret)(*inputs)))
    one = functools.partial(combine, axis_name="slice", offset=0)
    return jax.vmap(one, out_axes=None, axis_name="slice")(parts)


def _plan(rows: int, width: int, vocab: int, tied: bool, temperature: float) -> Plan:
    warpgroups = 1 if rows <= TILE else 2
    tiles, blocks = pl.cdiv(rows, warpgroups * TILE), pl.cdiv(vocab, BLOCK)
    share = pl.cdiv(blocks, max(1, PLACES // tiles))
    return Plan(warpgroups, tiles, pl.cdiv(blocks, share), share, pl.cdiv(width, DEPTH), vocab, tied, temperature)


def _kernel(plan: Plan, interpret: bool) -> Callable:
    """The kernel for token count [1], hidden [R, M], head and, unless greedy, noise [blocks, R]: `Parts` by slice."""
    tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TRANSFORMS)
    a_row = jax.ShapeDtypeStruct((plan.slices, plan.rows), jnp.float32)
    inside = jax.ShapeDtypeStruct((*a_row.shape, BLOCK), jnp.float32)
    return plgpu.kernel(
        functools.partial(_stream, plan),
        out_type=(a_row, a_row, jax.ShapeDtypeStruct(a_row.shape, jnp.int32), inside),
        grid=(plan.tiles, plan.slices),  # what shares a slice of the head runs side by side
        grid_names=("tile", "slice"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=Scratch(
            hidden=tile((STAGES, plan.warpgroups * TILE, DEPTH)),
            head=tile((STAGES, BLOCK, DEPTH) if plan.tied else (STAGES, DEPTH, BLOCK)),
            noise=plgpu.SMEM((plan.warpgroups, TILE), jnp.float32),
            asked=plgpu.Barrier(num_barriers=plan.warpgroups),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            consumed=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyright: ignore[reportAttributeAccessIssue]
    )


def _stream(plan: Plan, vocab, hidden, head, *refs) -> None:
    """One warpgroup: its `TILE` nodes through all blocks of its slice."""
    noise, out, scratch = (refs[0] if plan.temperature else None), Parts(*refs[-10:-6]), Scratch(*refs[-6:])
    tile, part, me = (lax.axis_index(name) for name in ("tile", "slice", "warpgroup"))
    first = part * plan.share
    blocks = jnp.minimum(plan.share, pl.cdiv(plan.vocab, BLOCK) - first)
    rows, known = pl.ds((tile * plan.warpgroups + me) * TILE, TILE), vocab[0]
    nodes = hidden.at[pl.ds(tile * plan.warpgroups * TILE, plan.warpgroups * TILE)]
    fetch = functools.partial(_fetch, plan, nodes, head, scratch, first)

    @pl.when(me == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(blocks * plan.chunks, STAGES), lambda step, _: fetch(step), None)

    def visit(count: Array, running: Running) -> Running:
        if noise is not None:
            plgpu.copy_gmem_to_smem(noise.at[first + count, rows], scratch.noise.at[me], scratch.asked.at[me])
        logits = _logits(plan, scratch, me, fetch, count, blocks)
        logits = _known(logits, known - (first + count) * BLOCK)
        return _update(plan, scratch, me, out.inside.at[part, rows], first + count, logits, running)

    running = lax.fori_loop(0, blocks, visit, _nothing())
    results = running.top + jnp.log(running.total), running.score, running.block
    for ref, result in zip(out[:3], results, strict=True):
        ref[part, rows] = result


def _fetch(plan: Plan, nodes, head, scratch: Scratch, first: Array, step: Array) -> None:
    """Start the copies of one step's nodes and of its part of the head into its slot."""
    slot = lax.rem(step, STAGES)
    block = pl.ds((first + lax.div(step, plan.chunks)) * BLOCK, BLOCK)
    depth = pl.ds(lax.rem(step, plan.chunks) * DEPTH, DEPTH)
    source = head.at[block, depth] if plan.tied else head.at[depth, block]
    plgpu.copy_gmem_to_smem(nodes.at[:, depth], scratch.hidden.at[slot], scratch.loaded.at[slot])
    plgpu.copy_gmem_to_smem(source, scratch.head.at[slot], scratch.loaded.at[slot])


def _logits(plan: Plan, scratch: Scratch, me: Array, fetch: Callable, count: Array, blocks: Array) -> Array:
    """Logits [TILE, 256] of the `count`-th block of the slice."""

    def multiply(accumulator):
        def add(chunk, _):
            step = count * plan.chunks + chunk
            slot = lax.rem(step, STAGES)
            plgpu.barrier_wait(scratch.loaded.at[slot])
            part = scratch.head.at[slot]
            nodes = scratch.hidden.at[slot, pl.ds(me * TILE, TILE)]
            plgpu.wgmma(accumulator, nodes, part.transpose((1, 0)) if plan.tied else part)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: _refill(scratch, me, fetch, step, blocks * plan.chunks))

        lax.fori_loop(0, plan.chunks, add, None)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, BLOCK), jnp.float32))


def _refill(scratch: Scratch, me: Array, fetch: Callable, step: Array, steps: Array) -> None:
    """Give back the slot of the step before, and fill it with what comes after those in flight."""
    coming = step + STAGES - 1
    slot = lax.rem(coming, STAGES)
    plgpu.barrier_arrive(scratch.consumed.at[slot])

    @pl.when((me == 0) & (coming < steps))
    def _():
        plgpu.barrier_wait(scratch.consumed.at[slot])
        fetch(coming)


def _nothing() -> Running:
    def rowwise(value: float, dtype=jnp.float32) -> Array:
        return plgpu.layout_cast(jnp.full((TILE,), value, dtype), ROWWISE)

    return Running(rowwise(LOWEST), rowwise(0.0), rowwise(-jnp.inf), rowwise(-1, jnp.int32))


def _known(logits: Array, count: Array) -> Array:
    """The first `count` of a block's logits [TILE, 256]; -inf for the others."""
    ids = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(ids < count, logits, -jnp.inf)


def _update(plan: Plan, scratch: Scratch, me: Array, inside, block: Array, logits: Array, running: Running) -> Running:
    """Take in one block's logits [TILE, 256]; they replace `inside` [TILE, 256] at nodes where they score best."""
    z = logits / plan.temperature if plan.temperature else logits
    peak = jnp.max(z, axis=1)
    top = jnp.maximum(running.top, peak)
    local = jnp.maximum(peak, LOWEST)
    mass = jnp.sum(jnp.exp(z - lax.broadcast_in_dim(local, z.shape, [0])), axis=1)
    score = peak
    if plan.temperature:
        plgpu.barrier_wait(scratch.asked.at[me])
        score = local + jnp.log(mass) + plgpu.layout_cast(scratch.noise[me], ROWWISE)
    kept = (running.score >= score) & (running.block >= 0)
    _replace(inside, z, kept)
    return Running(
        top,
        running.total * jnp.exp(running.top - top) + mass * jnp.exp(local - top),
        jnp.where(kept, running.score, score),
        jnp.where(kept, running.block, block),
    )


def _replace(inside, z: Array, kept: Array) -> None:
    """inside [TILE, 256] = z, but where `kept` [TILE]. Each thread reads only what it has written itself."""
    for start in range(0, BLOCK, STRIP):
        strip = inside.at[:, pl.ds(start, STRIP)]
        old = plgpu.load(strip, *EVERYTHING, layout=plgpu.Layout.WGMMA, optimized=False)
        new = z[:, start : start + STRIP]
        strip[...] = jnp.where(lax.broadcast_in_dim(kept, new.shape, [0]), old, new)
