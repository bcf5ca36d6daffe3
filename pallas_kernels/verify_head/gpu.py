"""`verify_head` on Hopper (Mosaic GPU): the head streams through shared memory, its logits never
leave registers.

A warpgroup sees 64 nodes' logits of one block of 256 tokens at a time (`pallas_kernels/hopper.py`),
so the block's log-sum-exp and score are had at once. The logits of the best block so far lie in the
output. Slices of the vocabulary, which thread blocks share out, are combined like its shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import LOWEST, ROWWISE, STRIP, TILE, Plan, across
from pallas_kernels.shapes import BLOCK
from pallas_kernels.verify_head.reference import Parts, check, combine


class Scratch(NamedTuple):
    """Shared memory of a thread block and its barriers; A is its warpgroups."""

    ring: hopper.Ring
    noise: Any  # [A, TILE] float32, of one block
    asked: Any  # [A]: a warpgroup's noise is here


class Running(NamedTuple):
    """What the blocks so far have come to, at each node: [TILE] each."""

    top: Array  # the largest logit
    total: Array  # sum of exp(logit - top)
    score: Array  # of the best block
    block: Array  # its id, int32


def unsupported(hidden: Array, head: Array) -> str | None:
    """Why this kernel cannot serve hidden [R, M] and the head, in one sentence; None where it
    can.
    """
    if hidden.dtype != jnp.bfloat16:
        return (
            f"The kernel serves bfloat16, not {hidden.dtype}: Hopper's matrix units round float32."
        )
    if hidden.shape[1] % 64 or head.shape[0] % 8 or head.shape[1] % 64:
        return (
            f"A width of {hidden.shape[1]} and a head of {head.shape} are no whole tiles of 8 x 64."
        )
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

    A draw differs from the reference's only where rounding decides: logits are summed in another
    order. Raises ValueError with the sentence of `unsupported`. `interpret` needs jax 0.12.
    """
    check(hidden, head, noise, temperature=temperature, tied=tied)
    if reason := unsupported(hidden, head):
        raise ValueError(reason)
    (rows, width) = hidden.shape
    held = head.shape[0 if tied else 1]
    plan = hopper.plan(rows, width, held, tied, temperature)
    count = jnp.asarray(held if vocab is None else vocab, jnp.int32).reshape(1)
    fill = (0, plan.rows - rows), (0, 0)
    inputs = [
        count,
        jnp.pad(hidden, fill),
        head,
        *([] if noise is None else [jnp.pad(noise, fill).T]),
    ]
    parts = Parts(*(part[:, :rows] for part in _kernel(plan, interpret)(*inputs)))
    one = functools.partial(combine, axis_name="slice", offset=0)
    return jax.vmap(one, out_axes=None, axis_name="slice")(parts)


def _kernel(plan: Plan, interpret: bool) -> Callable:
    """The kernel for token count [1], hidden [R, M], head and, unless greedy, noise [blocks, R]:
    `Parts` by slice.
    """
    a_row = jax.ShapeDtypeStruct((plan.slices, plan.rows), jnp.float32)
    inside = jax.ShapeDtypeStruct((*a_row.shape, BLOCK), jnp.float32)
    return plgpu.kernel(
        functools.partial(_stream, plan),
        out_type=(a_row, a_row, jax.ShapeDtypeStruct(a_row.shape, jnp.int32), inside),
        scratch_types=Scratch(
            ring=hopper.ring(plan),
            noise=plgpu.SMEM((plan.warpgroups, TILE), jnp.float32),
            asked=plgpu.Barrier(num_barriers=plan.warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(interpret),
        **plan.grid,
    )


def _stream(plan: Plan, vocab, hidden, head, *refs) -> None:
    """One warpgroup: its `TILE` nodes through all blocks of its slice."""
    noise = refs[0] if plan.temperature else None
    out = Parts(*refs[-7:-3])
    scratch = Scratch(*refs[-3:])
    mine = hopper.work(plan)
    known = vocab[0]

    def visit(block: Array, logits: Callable[[], Array], running: Running) -> Running:
        if noise is not None:
            plgpu.copy_gmem_to_smem(
                noise.at[block, mine.rows], scratch.noise.at[mine.me], scratch.asked.at[mine.me]
            )
        found = logits()
        found = jnp.where(hopper.columns(found.shape) < known - block * BLOCK, found, -jnp.inf)
        return _update(
            plan, scratch, mine.me, out.inside.at[mine.part, mine.rows], block, found, running
        )

    running = hopper.stream(plan, scratch.ring, hidden, head, visit, _nothing())
    results = running.top + jnp.log(running.total), running.score, running.block
    for ref, result in zip(out[:3], results, strict=True):
        ref[mine.part, mine.rows] = result


def _nothing() -> Running:
    rowwise = hopper.rowwise
    return Running(rowwise(LOWEST), rowwise(0.0), rowwise(-jnp.inf), rowwise(-1, jnp.int32))


def _update(
    plan: Plan, scratch: Scratch, me: Array, inside, block: Array, logits: Array, running: Running
) -> Running:
    """Take in one block's logits [TILE, 256]; they replace `inside` [TILE, 256] at nodes where they
    score best.
    """
    z = logits / plan.temperature if plan.temperature else logits
    peak = jnp.max(z, axis=1)
    top = jnp.maximum(running.top, peak)
    local = jnp.maximum(peak, LOWEST)
    mass = jnp.sum(jnp.exp(z - across(local, z.shape)), axis=1)
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
    """inside [TILE, 256] = z, but where `kept` [TILE]. Each thread reads only what it has written
    itself.
    """
    for start in range(0, BLOCK, STRIP):
        strip = inside.at[:, pl.ds(start, STRIP)]
        old = hopper.load(strip, plgpu.Layout.WGMMA)
        new = z[:, start : start + STRIP]
        strip[...] = jnp.where(across(kept, new.shape), old, new)
