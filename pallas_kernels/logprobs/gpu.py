"""Compute log-probability and entropy of given tokens on Hopper (Mosaic GPU).

The vocabulary is streamed. Forward, as in `verify_head`, logits never leave registers
(`pallas_kernels/hopper.py`). Backward, a kernel recomputes the logits of one slice and makes their
gradient in bfloat16; its two plain products with head and hidden are XLA's. The slices follow each
other, so that the head's gradient is written once, in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.arrays import LOWEST
from pallas_kernels.hopper import STRIP, WARPGROUP_ROWS, ProductPlan, across
from pallas_kernels.logprobs import streaming
from pallas_kernels.logprobs.streaming import Options, Streams, Sums
from pallas_kernels.shapes import BLOCK

# Most bytes of the gradient of one slice's logits.
SLICE_BYTES = 64 * 2**20
# Columns of a copy's tile: head and hidden are padded to whole ones.
UNIT = 64


class RunningSums(NamedTuple):
    """Hold the running sums at each row: [WARPGROUP_ROWS] each.

    z are the tempered logits.
    """

    top: Array  # the largest z
    total: Array  # sum of exp(z - top)
    weighted: Array  # sum of exp(z - top) (z - top)
    chosen: Array  # the target's z


class GradientScratch(NamedTuple):
    """Hold the shared memory of a thread block: references, or what to allocate.

    A is its warpgroups.
    """

    ring: hopper.Ring
    strip: Any  # [A, WARPGROUP_ROWS, STRIP] bfloat16: outgoing gradients


def token_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    temperature: float,
    tied: bool,
    axis: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute `streaming.token_logprobs` for hidden in bfloat16.

    The head, of any floating type, is multiplied as bfloat16. Raises ValueError for hidden states
    of another type. `interpret` needs jax 0.12.
    """
    if hidden.dtype != jnp.bfloat16:
        raise ValueError(
            f"The kernel serves bfloat16, not {hidden.dtype}: Hopper's matrix units round float32."
        )
    options = Options(temperature, tied, interpret)
    streams = Streams(
        functools.partial(_sums, options), functools.partial(_gradients, options), tied, axis=axis
    )
    return streaming.token_logprobs(streams, hidden, head, targets)


def _sums(options: Options, hidden: Array, head: Array, targets: Array) -> Sums:
    """Sum over the head's tokens in slices, and combine those."""
    rows, width = hidden.shape
    vocab = head.shape[0 if options.tied else 1]
    plan = hopper.plan(rows, width, vocab, tied=options.tied)
    run = plgpu.kernel(
        functools.partial(_sums_kernel, plan, options.temperature),
        out_type=(jax.ShapeDtypeStruct((plan.slices, plan.rows), jnp.float32),) * 3,
        scratch_types=hopper.ring(plan),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(options.interpret),
        **plan.grid,
    )
    parts = Sums(*(part[:, :rows] for part in run(*_whole_tiles(plan, [targets], hidden, head))))
    combine = functools.partial(streaming.combine, axis_name="slice")
    return jax.vmap(combine, out_axes=None, axis_name="slice")(parts)


def _whole_tiles(plan: ProductPlan, rows: list[Array], hidden: Array, head: Array) -> list[Array]:
    """Pad numbers of rows [R], hidden and the head with zeros to whole tiles of bfloat16.

    Hidden gets the plan's rows. The width, along which both are multiplied, gets whole tiles, too.
    """
    fill = plan.rows - hidden.shape[0]
    of_rows = [jnp.pad(x, (0, fill)) for x in rows]
    hidden_fill = ((0, fill), (0, -hidden.shape[1] % UNIT))
    head_fill = ((0, 0 if plan.tied else -head.shape[0] % UNIT), (0, -head.shape[1] % UNIT))
    return [
        *of_rows,
        jnp.pad(hidden.astype(jnp.bfloat16), hidden_fill),
        jnp.pad(head.astype(jnp.bfloat16), head_fill),
    ]


def _sums_kernel(
    plan: ProductPlan, temperature: float, target: Ref, hidden: Ref, head: Ref, *refs: Any
) -> None:
    """Sum over one slice of the vocabulary for the rows of one warpgroup."""
    out = refs[:3]
    ring = hopper.Ring(*refs[3:])
    mine = hopper.work(plan)
    wanted = hopper.load(target.at[mine.rows])

    def visit(block: Array, logits: Callable[[], Array], running: RunningSums) -> RunningSums:
        """Add one block, by the online softmax."""
        z = _known(plan, logits() / temperature, block)
        ids = block * BLOCK + hopper.columns(z.shape)
        top = jnp.maximum(running.top, jnp.max(z, axis=1))
        below = z - across(top, z.shape)
        fall = running.top - top
        share = jnp.exp(below)
        total = running.total * jnp.exp(fall) + jnp.sum(share, axis=1)
        weighted = (running.weighted + running.total * fall) * jnp.exp(fall)
        weighted = weighted + jnp.sum(share * below, axis=1)
        targets_z = jnp.where(ids == across(wanted, ids.shape), z, 0.0)
        return RunningSums(top, total, weighted, chosen=running.chosen + jnp.sum(targets_z, axis=1))

    nothing = RunningSums(hopper.rowwise(LOWEST), *(hopper.rowwise(0.0) for _ in range(3)))
    running = hopper.stream(plan, ring, hidden, head=head, visit=visit, carry=nothing)
    log_total = jnp.log(running.total)
    results = Sums(
        running.chosen, running.top + log_total, log_total - running.weighted / running.total
    )
    for ref, result in zip(out, results, strict=True):
        ref[mine.part, mine.rows] = result


def _known(plan: ProductPlan, z: Array, block: Array) -> Array:
    """Return tempered logits z [WARPGROUP_ROWS, 256] of a block, LOWEST past the vocabulary."""
    ids = block * BLOCK + hopper.columns(z.shape)
    return jnp.where(ids < plan.vocab, z, LOWEST)


def _gradients(options: Options, hidden: Array, head: Array, *rows: Array) -> tuple[Array, Array]:
    """Return the gradients of hidden and head, in float32, slice by slice of the vocabulary.

    `rows` are target, normaliser, entropy, and the cotangents of log-probability and entropy, each
    [R].
    """
    (count, width) = hidden.shape
    vocab = head.shape[0 if options.tied else 1]
    size = min(vocab, max(BLOCK, SLICE_BYTES // (2 * count) // BLOCK * BLOCK))
    add = functools.partial(_add_slice, options, hidden, head, rows)
    sums = jnp.zeros((count, width), jnp.float32), jnp.zeros(head.shape, jnp.float32)
    sums = lax.fori_loop(0, vocab // size, lambda at, sums: add(size, at * size, sums), sums)
    rest = vocab % size
    return add(rest, vocab - rest, sums) if rest else sums


def _add_slice(
    options: Options,
    hidden: Array,
    head: Array,
    rows: tuple[Array, ...],
    size: int,
    first: Array | int,
    sums: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Add to the gradients (d_hidden, d_head) the part of `size` tokens from `first` on.

    A kernel makes the gradient of their logits, in bfloat16. d_head's part is written in place.
    """
    d_hidden, d_head = sums
    axis = 0 if options.tied else 1
    words = lax.dynamic_slice_in_dim(head, first, size, axis).astype(jnp.bfloat16)
    target, *others = rows
    count, width = hidden.shape
    plan = hopper.plan(count, width, size, tied=options.tied)
    run = plgpu.kernel(
        functools.partial(_d_scores_kernel, plan, options.temperature),
        out_type=jax.ShapeDtypeStruct((plan.rows, -(-size // UNIT) * UNIT), jnp.bfloat16),
        scratch_types=GradientScratch(
            hopper.ring(plan), hopper.smem(plan.warpgroups, WARPGROUP_ROWS, STRIP)
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(options.interpret),
        **plan.grid,
    )
    # Targets count from the slice's first token.
    inputs = _whole_tiles(plan, [target - first, *others], hidden, words)
    d_scores = run(*inputs)[:count, :size]

    product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
    d_hidden += product(d_scores, words, (((1,), (axis,)), ((), ())))
    left, right = (d_scores, hidden) if options.tied else (hidden, d_scores)
    part = product(left, right, (((0,), (0,)), ((), ())))
    return d_hidden, lax.dynamic_update_slice_in_dim(d_head, part, first, axis)


def _d_scores_kernel(
    plan: ProductPlan,
    temperature: float,
    target: Ref,
    normaliser: Ref,
    entropy: Ref,
    g_logprob: Ref,
    g_entropy: Ref,
    hidden: Ref,
    head: Ref,
    out: Ref,
    *refs: Any,
) -> None:
    """Write the gradients of the logits of one slice, for the rows of one warpgroup.

    They are d log p = onehot - p and dH = -p (log p + H), over the temperature.
    """
    scratch = GradientScratch(*refs)
    mine = hopper.work(plan)
    per_row = [
        hopper.load(ref.at[mine.rows])
        for ref in (target, normaliser, entropy, g_logprob, g_entropy)
    ]
    strip = scratch.strip.at[mine.me]

    def visit(block: Array, logits: Callable[[], Array], _: None) -> None:
        """Write the gradients of one block, strip by strip."""
        z = _known(plan, logits() / temperature, block)
        for start in range(0, BLOCK, STRIP):
            part = z[:, start : start + STRIP]
            wanted, norm, whole, g_log, g_ent = (across(x, part.shape) for x in per_row)
            log_p = part - norm
            p = jnp.exp(log_p)
            ids = block * BLOCK + start + hopper.columns(part.shape)
            onehot = jnp.where(ids == wanted, 1.0, 0.0)
            gradient = (g_log * (onehot - p) - g_ent * p * (log_p + whole)) / temperature
            to = out.at[mine.rows, pl.ds(block * BLOCK + start, STRIP)]
            # Through shared memory, whose copies skip everything past the end.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            strip[...] = gradient.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(strip, to)

    hopper.stream(plan, scratch.ring, hidden, head=head, visit=visit, carry=None)
    plgpu.wait_smem_to_gmem(0)
