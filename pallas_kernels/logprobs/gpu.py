"""Log-probability and entropy of given tokens on Hopper (Mosaic GPU): the vocabulary streams by,
forward and backward.

Forward, as in `verify_head`, logits never leave registers (`pallas_kernels/hopper.py`). Backward,
the gradient of one slice's logits is made in bfloat16 by a kernel that computes them again; its two
products with head and hidden, which are plain, are XLA's. The slices follow each other, so that the
head's gradient is written once, where it belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import LOWEST, STRIP, TILE, Plan, across
from pallas_kernels.logprobs import streaming
from pallas_kernels.logprobs.streaming import Options, Streams, Sums
from pallas_kernels.shapes import BLOCK

SLICE_BYTES = 64 * 2**20  # of the gradient of one slice's logits
UNIT = 64  # columns that a copy's tile has: head and hidden are filled up to whole ones


def law(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    temperature: float,
    tied: bool,
    axis: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`streaming.law` for hidden in bfloat16; the head, of any floating type, is multiplied as
    bfloat16.

    Raises ValueError for hidden states of another type. `interpret` needs jax 0.12.
    """
    if hidden.dtype != jnp.bfloat16:
        raise ValueError(
            f"The kernel serves bfloat16, not {hidden.dtype}: Hopper's matrix units round float32."
        )
    options = Options(temperature, tied, interpret)
    streams = Streams(
        functools.partial(_sums, options), functools.partial(_gradients, options), tied, axis
    )
    return streaming.law(streams, hidden, head, targets)


def _plan(options: Options, hidden: Array, vocab: int) -> Plan:
    rows, width = hidden.shape
    return hopper.plan(rows, width, vocab, options.tied, options.temperature)


def _tiles(x: Array, rows: int = 0) -> Array:
    """x [R, C] in bfloat16, filled up with zeros to whole tiles of columns and to so many rows."""
    fill = (0, max(0, rows - x.shape[0])), (0, -x.shape[1] % UNIT)
    return jnp.pad(x.astype(jnp.bfloat16), fill)


def _head_tiles(options: Options, head: Array) -> Array:
    """The head as copies want it: the width, too, in whole tiles."""
    return _tiles(head) if options.tied else _tiles(head, -(-head.shape[0] // UNIT) * UNIT)


def _of_rows(plan: Plan, x: Array) -> Array:
    return jnp.pad(x, (0, plan.rows - x.shape[0]))


def _sums(options: Options, hidden: Array, head: Array, targets: Array) -> Sums:
    plan = _plan(options, hidden, head.shape[0 if options.tied else 1])
    run = plgpu.kernel(
        functools.partial(_sums_kernel, plan),
        out_type=(jax.ShapeDtypeStruct((plan.slices, plan.rows), jnp.float32),) * 3,
        scratch_types=hopper.ring(plan),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(options.interpret),
        **plan.grid,
    )
    parts = run(_of_rows(plan, targets), _tiles(hidden, plan.rows), _head_tiles(options, head))
    of_rows = Sums(*(part[:, : hidden.shape[0]] for part in parts))
    return jax.vmap(
        functools.partial(streaming.combine, axis_name="slice"), out_axes=None, axis_name="slice"
    )(of_rows)


class Running(NamedTuple):
    """What the blocks so far have come to, at each row: [TILE] each; z are tempered logits."""

    top: Array  # the largest z
    total: Array  # sum of exp(z - top)
    weighted: Array  # sum of exp(z - top) (z - top)
    chosen: Array  # the target's z


def _sums_kernel(plan: Plan, target, hidden, head, *refs) -> None:
    out = refs[:3]
    ring = hopper.Ring(*refs[3:])
    mine = hopper.work(plan)
    wanted = hopper.load(target.at[mine.rows])

    def visit(block: Array, logits: Callable[[], Array], running: Running) -> Running:
        z = _tempered(plan, logits(), block)
        ids = block * BLOCK + hopper.columns(z.shape)
        top = jnp.maximum(running.top, jnp.max(z, axis=1))
        below = z - across(top, z.shape)
        fall = running.top - top
        share = jnp.exp(below)
        return Running(
            top,
            running.total * jnp.exp(fall) + jnp.sum(share, axis=1),
            (running.weighted + running.total * fall) * jnp.exp(fall)
            + jnp.sum(share * below, axis=1),
            running.chosen + jnp.sum(jnp.where(ids == across(wanted, ids.shape), z, 0.0), axis=1),
        )

    nothing = Running(hopper.rowwise(LOWEST), *(hopper.rowwise(0.0) for _ in range(3)))
    running = hopper.stream(plan, ring, hidden, head, visit, nothing)
    log_total = jnp.log(running.total)
    results = Sums(
        running.chosen, running.top + log_total, log_total - running.weighted / running.total
    )
    for ref, result in zip(out, results, strict=True):
        ref[mine.part, mine.rows] = result


def _tempered(plan: Plan, logits: Array, block: Array) -> Array:
    """Tempered logits [TILE, 256]; past the vocabulary such that add nothing, yet whose multiples
    are finite.
    """
    ids = block * BLOCK + hopper.columns(logits.shape)
    return jnp.where(ids < plan.vocab, logits / plan.temperature, LOWEST)


def _gradients(options: Options, hidden: Array, head: Array, *rows: Array) -> tuple[Array, Array]:
    """The gradients of hidden and head, in float32, slice by slice of the vocabulary.

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
    options: Options, hidden: Array, head: Array, rows: tuple[Array, ...], size: int, first, sums
):
    """(d_hidden, d_head) with the part of `size` tokens from `first` on; d_head's is written where
    it belongs.
    """
    d_hidden, d_head = sums
    axis = 0 if options.tied else 1
    words = lax.dynamic_slice_in_dim(head, first, size, axis).astype(jnp.bfloat16)
    target, *others = rows
    d_scores = _d_scores(options, hidden, words, (target - first, *others))
    d_hidden += _product(d_scores, words, 1, axis)
    left, right = (d_scores, hidden) if options.tied else (hidden, d_scores)
    return d_hidden, lax.dynamic_update_slice_in_dim(
        d_head, _product(left, right, 0, 0), first, axis
    )


def _product(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """The sum of products over one axis of each, in float32."""
    dims = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _d_scores(options: Options, hidden: Array, words: Array, rows: tuple[Array, ...]) -> Array:
    """The gradient [R, C] bfloat16 of the logits of C tokens, from which targets count; the rest as
    `_gradients`.
    """
    count = hidden.shape[0]
    size = words.shape[0 if options.tied else 1]
    plan = _plan(options, hidden, size)
    run = plgpu.kernel(
        functools.partial(_d_scores_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.rows, -(-size // UNIT) * UNIT), jnp.bfloat16),
        scratch_types=Scratch(hopper.ring(plan), hopper.smem(plan.warpgroups, TILE, STRIP)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpretation(options.interpret),
        **plan.grid,
    )
    per_row = [_of_rows(plan, x) for x in rows]
    return run(*per_row, _tiles(hidden, plan.rows), _head_tiles(options, words))[:count, :size]


class Scratch(NamedTuple):
    """Shared memory of a thread block; A is its warpgroups."""

    ring: hopper.Ring
    strip: Any  # [A, TILE, STRIP] bfloat16: gradients on their way out


def _d_scores_kernel(
    plan: Plan, target, normaliser, entropy, g_logprob, g_entropy, hidden, head, out, *refs
) -> None:
    """d log p = onehot - p, dH = -p (log p + H), over the temperature."""
    scratch = Scratch(*refs)
    mine = hopper.work(plan)
    per_row = [
        hopper.load(ref.at[mine.rows])
        for ref in (target, normaliser, entropy, g_logprob, g_entropy)
    ]

    def visit(block: Array, logits: Callable[[], Array], carry: None) -> None:
        z = _tempered(plan, logits(), block)
        for start in range(0, BLOCK, STRIP):
            part = z[:, start : start + STRIP]
            wanted, norm, whole, g_log, g_ent = (across(x, part.shape) for x in per_row)
            log_p = part - norm
            p = jnp.exp(log_p)
            ids = block * BLOCK + start + hopper.columns(part.shape)
            onehot = jnp.where(ids == wanted, 1.0, 0.0)
            gradient = (g_log * (onehot - p) - g_ent * p * (log_p + whole)) / plan.temperature
            _write(
                scratch.strip.at[mine.me],
                out.at[mine.rows, pl.ds(block * BLOCK + start, STRIP)],
                gradient,
            )
        return carry

    hopper.stream(plan, scratch.ring, hidden, head, visit, None)
    plgpu.wait_smem_to_gmem(0)


def _write(strip, out, x: Array) -> None:
    """x [TILE, STRIP] to device memory by way of shared memory, whose copies leave out what lies
    past the end.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    strip[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(strip, out)
