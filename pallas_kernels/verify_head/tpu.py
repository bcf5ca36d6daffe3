"""`verify_head` for TPUs (Mosaic): the head streams through VMEM, its logits never leave it.

Grid: spans of the vocabulary, which a chip's cores share out, x row tiles x vocabulary tiles. A
tile of hidden states stays while all tiles of the head pass: as long as the rows fit, the head is
read once. Its logits are made for a chunk of the rows at a time. Each block of 256 tokens becomes
one lane of a vector of 128 blocks: peak, log-sum-exp and score; the logits of the best block so far
are kept. Spans are combined like shards of the vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import BLOCK, LANES
from pallas_kernels.verify_head.reference import Parts, check, combine

SPANS = 2  # a chip of v4 or v5p has two cores, and divides an axis that is "parallel" between them
# 600 rows already are bound by arithmetic, not by reading the head, on every chip
MOST_ROWS = 1024
MOST_CHUNK = 256
# of one buffer; the head has two
HIDDEN_BYTES = 16 << 20
HEAD_BYTES = 8 << 20
VMEM_BYTES = 56 << 20  # of the 64 MiB of a v5p core; v5e and v6e have 128


class Tiles(NamedTuple):
    """How the work is cut: static."""

    rows: int  # of a row tile, a multiple of `chunk`
    chunk: int  # rows whose logits exist at one time
    blocks: int  # of 256 tokens in a vocabulary tile; divides 128
    steps: int  # vocabulary tiles in a span


def tiles(rows: int, width: int, vocab: int, itemsize: int) -> Tiles:
    """Tiles for hidden [rows, width] and a head of `vocab` columns, `itemsize` bytes an entry."""
    row = width * itemsize
    block = BLOCK * width * itemsize
    blocks = max(
        k for k in (1, 2, 4, 8) if k == 1 or (k * block <= HEAD_BYTES and k * BLOCK < 2 * vocab)
    )
    count = pl.cdiv(rows, min(MOST_ROWS, HIDDEN_BYTES // row))
    chunks = pl.cdiv(pl.cdiv(rows, count), MOST_CHUNK)
    chunk = pl.cdiv(pl.cdiv(rows, count * chunks), 16) * 16
    return Tiles(chunks * chunk, chunk, blocks, pl.cdiv(vocab, SPANS * blocks * BLOCK))


@functools.partial(jax.jit, static_argnames=("temperature", "tied", "interpret"))
def verify_head(
    hidden: Array,
    head: Array,
    noise: Array | None,
    vocab: Array | int | None = None,
    *,
    temperature: float,
    tied: bool,
    interpret: Any = False,
) -> Parts:
    """`reference.verify_head` without [R, V] anywhere in device memory.

    A draw differs from the reference's only where rounding decides: logits are summed in another
    order. Logits may be -inf; NaN makes the normaliser NaN. `interpret` (True, or the parameters of
    Pallas' TPU interpreter) runs it on any hardware, slowly.
    """
    check(hidden, head, noise, temperature=temperature, tied=tied)
    (rows, width) = hidden.shape
    held = head.shape[0 if tied else 1]
    if tied and width % LANES:
        # so XLA stores it, to save padding: a kernel that wants [V, M] makes it copy
        head = head.T
        tied = False
    cut = tiles(rows, width, held, hidden.dtype.itemsize)
    count = jnp.asarray(held if vocab is None else vocab, jnp.int32).reshape(1)
    inputs = [count, hidden, head, *([] if noise is None else [_by_span(noise, cut)])]
    mass, score, block, inside = pl.pallas_call(
        functools.partial(_kernel, cut=cut, temperature=temperature, tied=tied),
        grid=(SPANS, pl.cdiv(rows, cut.rows), cut.steps),
        in_specs=_in_specs(cut, width, held, tied)[: len(inputs)],
        out_specs=_out_specs(cut),
        out_shape=_out_shapes(rows, cut),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(hidden, head, held, cut),
        interpret=interpret,
        name="verify_head",
    )(*inputs)
    parts = Parts(jax.nn.logsumexp(mass, -1), score[..., 0], block[..., 0], inside)
    first = jnp.arange(SPANS, dtype=jnp.int32) * (cut.steps * cut.blocks)
    return jax.vmap(functools.partial(combine, axis_name="span"), out_axes=None, axis_name="span")(
        parts, offset=first
    )


def _by_span(noise: Array, cut: Tiles) -> Array:
    """noise [R, blocks] -> [spans, R, blocks of a span]."""
    span = cut.steps * cut.blocks
    padded = jnp.pad(noise, ((0, 0), (0, SPANS * span - noise.shape[1])))
    return padded.reshape(-1, SPANS, span).swapaxes(0, 1)


def _in_specs(cut: Tiles, width: int, vocab: int, tied: bool) -> list[pl.BlockSpec]:
    """Hidden states are read once a span and row tile, the head at every step, noise once in 128
    blocks.
    """
    tokens = cut.blocks * BLOCK
    last = pl.cdiv(vocab, tokens) - 1

    def tile(s, r, v):
        return lax.min(s * cut.steps + v, last)

    over_tokens = pl.BlockSpec((tokens, width), lambda *at: (tile(*at), 0))
    over_width = pl.BlockSpec((width, tokens), lambda *at: (0, tile(*at)))
    once = pl.Buffered(buffer_count=1)
    rows = pl.BlockSpec((cut.rows, width), lambda s, r, v: (r, 0), pipeline_mode=once)
    return [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        rows,
        over_tokens if tied else over_width,
        _lanes(cut),
    ]


def _lanes(cut: Tiles) -> pl.BlockSpec:
    """128 blocks of a span and row tile."""
    return pl.BlockSpec(
        (None, cut.rows, LANES), lambda s, r, v: (s, r, lax.div(v, LANES // cut.blocks))
    )


def _out_specs(cut: Tiles) -> list[pl.BlockSpec]:
    """Log-sum-exps leave 128 blocks at a time; score, block and its logits when a span and row tile
    is done.
    """
    last = [
        pl.BlockSpec((None, cut.rows, columns), lambda s, r, v: (s, r, 0))
        for columns in (1, 1, BLOCK)
    ]
    return [_lanes(cut), *last]


def _out_shapes(rows: int, cut: Tiles) -> list[jax.ShapeDtypeStruct]:
    columns = (
        (cut.steps * cut.blocks, jnp.float32),
        (1, jnp.float32),
        (1, jnp.int32),
        (BLOCK, jnp.float32),
    )
    return [jax.ShapeDtypeStruct((SPANS, rows, count), dtype) for count, dtype in columns]


def _cost(hidden: Array, head: Array, vocab: int, cut: Tiles) -> pl.CostEstimate:
    (rows, width) = hidden.shape
    itemsize = hidden.dtype.itemsize
    reads = pl.cdiv(rows, cut.rows)
    return pl.CostEstimate(
        flops=2 * rows * width * vocab,
        transcendentals=rows * vocab,
        bytes_accessed=(reads * head.size + SPANS * hidden.size) * itemsize,
    )


def _kernel(vocab, hidden, head, *refs, cut: Tiles, temperature: float, tied: bool):
    """One vocabulary tile against one row tile, chunk by chunk."""
    *noise, mass, score, block, inside = refs
    step = pl.program_id(2)
    tile = pl.program_id(0) * cut.steps + step
    lane = lax.rem(step, LANES // cut.blocks) * cut.blocks  # of this tile's first block

    @pl.when(step == 0)
    def _():
        score[...] = jnp.full_like(score, -jnp.inf)
        block[...] = jnp.zeros_like(block)
        inside[...] = jnp.full_like(inside, -jnp.inf)

    @pl.when(lane == 0)
    def _():
        mass[...] = jnp.full_like(mass, -jnp.inf)

    @pl.loop(0, cut.rows // cut.chunk)
    def _(index):
        rows = pl.ds(index * cut.chunk, cut.chunk)
        z = _tempered(hidden[rows, :], head[...], temperature, tied)
        z = _known(z, tile, vocab[0])
        pieces = [(lane + j, z[:, j * BLOCK : (j + 1) * BLOCK]) for j in range(cut.blocks)]
        peaks, masses = _block_sums(pieces)
        mass[rows, :] = jnp.maximum(mass[rows, :], masses)
        scores = masses + noise[0][rows, :] if noise else peaks
        scores = jnp.where(masses > -jnp.inf, scores, -jnp.inf)
        _keep_better(scores, pieces, step * cut.blocks - lane, (score, block, inside), rows)


def _tempered(hidden: Array, head: Array, temperature: float, tied: bool) -> Array:
    """Tempered logits [rows, tokens] float32 of a tile; a division by a constant is a product for
    XLA, too.
    """
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    z = lax.dot_general(hidden, head, dims, precision=precision, preferred_element_type=jnp.float32)
    return z if temperature in (0, 1) else z * (1 / temperature)


def _known(z: Array, tile: Array, vocab: Array) -> Array:
    """-inf for the tokens past V of the last tiles: what is read there means nothing."""
    return jnp.where(
        lax.broadcasted_iota(jnp.int32, z.shape, 1) < vocab - tile * z.shape[1], z, -jnp.inf
    )


def _block_sums(pieces: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Largest logit and log-sum-exp of each block (lane, [rows, 256]), in its lane of [rows, 128];
    -inf elsewhere.
    """
    lanes = lax.broadcasted_iota(jnp.int32, (pieces[0][1].shape[0], LANES), 1)
    peaks = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
    sums = jnp.zeros(lanes.shape, jnp.float32)
    for lane, z in pieces:
        peak = jnp.max(z, axis=1, keepdims=True)
        # An empty block keeps its -inf: minus infinity less itself would be no number.
        total = jnp.sum(jnp.exp(z - jnp.where(peak == -jnp.inf, 0.0, peak)), axis=1, keepdims=True)
        peaks = jnp.where(lanes == lane, peak, peaks)
        sums = jnp.where(lanes == lane, total, sums)
    return peaks, jnp.where(peaks == -jnp.inf, -jnp.inf, peaks + jnp.log(sums))


def _keep_better(
    scores: Array, pieces: list[tuple[Array, Array]], first: Array, best, rows
) -> None:
    """Let the tile's best block replace the best so far where its score is larger: of equal ones
    the first stays.

    scores [rows, 128] of the blocks from `first` on, -inf but for the tile's own.
    """
    score, block, inside = best
    top = jnp.max(scores, axis=1, keepdims=True)
    lanes = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    winner = jnp.min(jnp.where(scores == top, lanes, LANES), axis=1, keepdims=True)
    better = top > score[rows, :]
    chosen = inside[rows, :]
    for lane, z in pieces:
        chosen = jnp.where(better & (winner == lane), z, chosen)
    inside[rows, :] = chosen
    block[rows, :] = jnp.where(better, first + winner, block[rows, :])
    score[rows, :] = jnp.where(better, top, score[rows, :])
