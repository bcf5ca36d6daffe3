"""Reduce logits to `Parts` on Hopper (Mosaic GPU): they never leave registers.

The head streams through shared memory. A warpgroup sees 64 nodes' logits of one block of 256 tokens
at a time (`pallas_kernels/hopper.py`), so the block's log-sum-exp and score are computed at once.
The logits of the best block so far are in the output. Slices of the vocabulary, which thread blocks
share, are combined like its shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.arrays import LOWEST
from pallas_kernels.hopper import ROWWISE, STRIP, WARPGROUP_ROWS, ProductPlan, across, rowwise
from pallas_kernels.shapes import BLOCK
from pallas_kernels.verify_head.reference import Parts, check, combine


class VerifyScratch(NamedTuple):
    """Hold the shared memory of a thread block and its barriers: references, or what to allocate.

    A is its warpgroups.
    """

    ring: hopper.Ring
    noise: Any  # [A, WARPGROUP_ROWS] float32, of one block
    ready: Any  # [A]: a warpgroup's noise has arrived


class RunningBest(NamedTuple):
    """Hold the running results at each node: [WARPGROUP_ROWS] each."""

    top: Array  # the largest logit
    total: Array  # sum of exp(logit - top)
    score: Array  # of the best block
    block: Array  # its id, int32


@functools.partial(jax.jit, static_argnames=("tied", "interpret"))
def verify_head(
    hidden: Array,
    head: Array,
    noise: Array,
    temperature: Array,
    vocab: Array | int | None = None,
    *,
    tied: bool,
    interpret: bool = False,
) -> Parts:
    """Compute `reference.verify_head` in bfloat16, without [R, V] in device memory; same shapes.

    A draw differs from the reference's only where rounding decides: logits are summed in another
    order. Raises ValueError for another dtype, and for a width or a head that is not whole tiles of
    8 x 64. `interpret` needs jax 0.12.
    """
    check(hidden, head, noise, temperature, tied=tied)
    if hidden.dtype != jnp.bfloat16:
        raise ValueError(
            f"The kernel serves bfloat16, not {hidden.dtype}: Hopper's matrix units round float32."
        )
    (rows, width) = hidden.shape
    if width % 64 or head.shape[0] % 8 or head.shape[1] % 64:
        raise ValueError(
            f"A width of {width} and a head of {head.shape} are no whole tiles of 8 x 64."
        )

    held = head.shape[0 if tied else 1]
    plan = hopper.plan(rows, width, held, tied=tied)
    count = jnp.asarray(held if vocab is None else vocab, jnp.int32).reshape(1)
    fill = 0, plan.rows - rows
    inputs = [
        count,
        jnp.pad(temperature, fill),
        jnp.pad(hidden, (fill, (0, 0))),
        head,
        jnp.pad(noise, (fill, (0, 0))).T,
    ]
    parts = Parts(*(part[:, :rows] for part in _kernel(plan, interpret)(*inputs)))
    one = functools.partial(combine, axis_name="slice", offset=0)
    return jax.vmap(one, out_axes=None, axis_name="slice")(parts)


def _kernel(plan: ProductPlan, interpret: bool) -> Callable:
    """Return the kernel, which gives `Parts` by slice.

    It takes the token count [1], temperature [R], hidden [R, M], the head and noise [blocks, R].
    """
    a_row = jax.ShapeDtypeStruct((plan.slices, plan.rows), jnp.float32)
    inside = jax.ShapeDtypeStruct((*a_row.shape, BLOCK), jnp.float32)
    return plgpu.kernel(
        functools.partial(_stream, plan),
        out_type=(a_row, a_row, jax.ShapeDtypeStruct(a_row.shape, jnp.int32), inside),
        scratch_types=VerifyScratch(
            ring=hopper.ring(plan),
            noise=plgpu.SMEM((plan.warpgroups, WARPGROUP_ROWS), jnp.float32),
            ready=plgpu.Barrier(num_barriers=plan.warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(interpret),
        **plan.grid,
    )


def _stream(
    plan: ProductPlan, vocab: Ref, temperature: Ref, hidden: Ref, head: Ref, noise: Ref, *refs: Any
) -> None:
    """Take one warpgroup's nodes through all blocks of its slice."""
    *out, inside = refs[:4]
    scratch = VerifyScratch(*refs[4:])
    mine = hopper.work(plan)
    known = vocab[0]
    divisor = hopper.load(temperature.at[mine.rows])
    greedy = divisor == 0
    # One division per row: the reference multiplies, too.
    scale = 1 / jnp.where(greedy, 1.0, divisor)

    def visit(block: Array, logits: Callable[[], Array], running: RunningBest) -> RunningBest:
        """Add one block, with its valid tokens."""
        plgpu.copy_gmem_to_smem(
            noise.at[block, mine.rows], scratch.noise.at[mine.me], scratch.ready.at[mine.me]
        )
        z = logits()
        z = z * across(scale, z.shape)
        z = jnp.where(hopper.columns(z.shape) < known - block * BLOCK, z, -jnp.inf)
        kept = inside.at[mine.part, mine.rows]
        return _update(
            scratch, mine.me, inside=kept, block=block, z=z, greedy=greedy, running=running
        )

    nothing = RunningBest(
        top=rowwise(LOWEST),
        total=rowwise(0.0),
        score=rowwise(-jnp.inf),
        block=rowwise(-1, jnp.int32),
    )
    running = hopper.stream(plan, scratch.ring, hidden, head=head, visit=visit, carry=nothing)
    results = running.top + jnp.log(running.total), running.score, running.block
    for ref, result in zip(out, results, strict=True):
        ref[mine.part, mine.rows] = result


def _update(
    scratch: VerifyScratch,
    me: Array,
    *,
    inside: Ref,
    block: Array,
    z: Array,
    greedy: Array,
    running: RunningBest,
) -> RunningBest:
    """Add one block's tempered logits z [WARPGROUP_ROWS, 256].

    They replace `inside`, of the same shape, at nodes where they score best: by their peak at those
    that are greedy [WARPGROUP_ROWS].
    """
    peak = jnp.max(z, axis=1)
    top = jnp.maximum(running.top, peak)
    local = jnp.maximum(peak, LOWEST)
    mass = jnp.sum(jnp.exp(z - across(local, z.shape)), axis=1)
    plgpu.barrier_wait(scratch.ready.at[me])
    noisy = local + jnp.log(mass) + plgpu.layout_cast(scratch.noise[me], ROWWISE)
    score = jnp.where(greedy, peak, noisy)
    kept = (running.score >= score) & (running.block >= 0)

    # Each thread reads only its own writes.
    for start in range(0, BLOCK, STRIP):
        strip = inside.at[:, pl.ds(start, STRIP)]
        old = hopper.load(strip, plgpu.Layout.WGMMA)
        new = z[:, start : start + STRIP]
        strip[...] = jnp.where(across(kept, new.shape), old, new)
    return RunningBest(
        top=top,
        total=running.total * jnp.exp(running.top - top) + mass * jnp.exp(local - top),
        score=jnp.where(kept, running.score, score),
        block=jnp.where(kept, running.block, block),
    )
