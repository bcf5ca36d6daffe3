"""Reduce logits to `Parts` on TPUs (Mosaic): the head streams through VMEM, logits never leave it.

Grid: spans of the vocabulary, divided between a chip's cores, x row tiles x vocabulary tiles. A
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
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import BLOCK, LANES, VMEM_BYTES
from pallas_kernels.verify_head.reference import Parts, check, combine

# A chip of v4 or v5p has two cores, and divides an axis that is "parallel" between them.
SPANS = 2
# 600 rows already are compute-bound, not bound by reading the head, on every chip.
MOST_ROWS = 1024
# Most rows whose logits exist at a time.
MOST_CHUNK = 256
# Most bytes of a tile of hidden states.
HIDDEN_BYTES = 16 << 20
# Most bytes of a tile of the head, in each of its two buffers.
HEAD_BYTES = 8 << 20


class Tiles(NamedTuple):
    """Hold the sizes of a cut of the work; static."""

    rows: int  # of a row tile, a multiple of `chunk`
    chunk: int  # rows whose logits exist at a time
    blocks: int  # of 256 tokens in a vocabulary tile; divides 128
    steps: int  # vocabulary tiles in a span


@functools.partial(jax.jit, static_argnames=("tied", "interpret"))
def verify_head(
    hidden: Array,
    head: Array,
    noise: Array,
    temperature: Array,
    vocab: Array | int | None = None,
    *,
    tied: bool,
    interpret: Any = False,
) -> Parts:
    """Compute `reference.verify_head` without [R, V] anywhere in device memory.

    hidden [R, M]; head [M, V], or [V, M] if `tied`; both bfloat16 or both float32. noise [R,
    ceil(V/256)] and temperature [R] are float32; `vocab` is the number of valid tokens of the head.
    A draw differs from the reference's only where rounding decides: logits are summed in another
    order. Logits may be -inf; NaN makes the normaliser NaN. `interpret` (True, or the parameters of
    Pallas' TPU interpreter) runs it on any hardware, slowly.
    """
    check(hidden, head, noise, temperature, tied=tied)
    (rows, width) = hidden.shape
    held = head.shape[0 if tied else 1]
    if tied and width % LANES:
        # XLA stores it so to save padding: a kernel for [V, M] would make it copy.
        head = head.T
        tied = False
    cut = _tiles(rows, width, held, itemsize=hidden.dtype.itemsize)
    count = jnp.asarray(held if vocab is None else vocab, jnp.int32).reshape(1)
    span = cut.steps * cut.blocks
    padded = jnp.pad(noise, ((0, 0), (0, SPANS * span - noise.shape[1])))
    noise_of_spans = padded.reshape(-1, SPANS, span).swapaxes(0, 1)

    in_specs, out_specs = _specs(cut, width, held, tied=tied)
    sizes = ((span, jnp.float32), (1, jnp.float32), (1, jnp.int32), (BLOCK, jnp.float32))
    reads = pl.cdiv(rows, cut.rows)
    log_sums, score, block, inside = pl.pallas_call(
        functools.partial(_kernel, cut=cut, tied=tied),
        grid=(SPANS, reads, cut.steps),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct((SPANS, rows, size), dtype) for size, dtype in sizes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * width * held,
            transcendentals=rows * held,
            bytes_accessed=(reads * head.size + SPANS * hidden.size) * hidden.dtype.itemsize,
        ),
        interpret=interpret,
        name="verify_head",
    )(count, temperature[:, None], hidden, head, noise_of_spans)
    normaliser = jax.nn.logsumexp(log_sums, -1)
    parts = Parts(normaliser, score[..., 0], block[..., 0], inside=inside)
    first = jnp.arange(SPANS, dtype=jnp.int32) * span
    together = functools.partial(combine, axis_name="span")
    return jax.vmap(together, out_axes=None, axis_name="span")(parts, offset=first)


def _tiles(rows: int, width: int, vocab: int, *, itemsize: int) -> Tiles:
    """Cut hidden [rows, width] and a head of `vocab` columns, `itemsize` bytes per entry."""
    row = width * itemsize
    block = BLOCK * width * itemsize
    blocks = max(
        k for k in (1, 2, 4, 8) if k == 1 or (k * block <= HEAD_BYTES and k * BLOCK < 2 * vocab)
    )
    count = pl.cdiv(rows, min(MOST_ROWS, HIDDEN_BYTES // row))
    chunks = pl.cdiv(pl.cdiv(rows, count), MOST_CHUNK)
    chunk = pl.cdiv(pl.cdiv(rows, count * chunks), 16) * 16
    steps = pl.cdiv(vocab, SPANS * blocks * BLOCK)
    return Tiles(rows=chunks * chunk, chunk=chunk, blocks=blocks, steps=steps)


def _specs(
    cut: Tiles, width: int, vocab: int, *, tied: bool
) -> tuple[list[pl.BlockSpec], list[pl.BlockSpec]]:
    """Describe a step's inputs and outputs, on the grid of spans, row tiles and vocabulary tiles.

    Temperatures and hidden states are read once per span and row tile, the head at every step,
    noise once in 128 blocks. Log-sum-exps leave 128 blocks at a time; score, block and its logits
    when a span and row tile is done.
    """
    tokens = cut.blocks * BLOCK
    last = pl.cdiv(vocab, tokens) - 1

    def tile(s: Array, r: Array, v: Array) -> Array:
        """Return the head's tile at a step; past the end it is the last one."""
        return lax.min(s * cut.steps + v, last)

    over_tokens = pl.BlockSpec((tokens, width), lambda *at: (tile(*at), 0))
    over_width = pl.BlockSpec((width, tokens), lambda *at: (0, tile(*at)))
    once = pl.Buffered(buffer_count=1)
    temperature, hidden = (
        pl.BlockSpec((cut.rows, columns), lambda s, r, v: (r, 0), pipeline_mode=once)
        for columns in (1, width)
    )
    lanes = pl.BlockSpec(
        (None, cut.rows, LANES), lambda s, r, v: (s, r, lax.div(v, LANES // cut.blocks))
    )
    when_done = [
        pl.BlockSpec((None, cut.rows, columns), lambda s, r, v: (s, r, 0))
        for columns in (1, 1, BLOCK)
    ]
    count = pl.BlockSpec(memory_space=pltpu.SMEM)
    head = over_tokens if tied else over_width
    return [count, temperature, hidden, head, lanes], [lanes, *when_done]


def _kernel(
    vocab: Ref,
    temperature: Ref,
    hidden: Ref,
    head: Ref,
    noise: Ref,
    log_sums: Ref,
    score: Ref,
    block: Ref,
    inside: Ref,
    *,
    cut: Tiles,
    tied: bool,
) -> None:
    """Process one vocabulary tile against one row tile, chunk by chunk.

    vocab [1] int32; temperature [rows, 1] float32; hidden [rows, M]; head [M, tokens] or [tokens,
    M]; noise [rows, 128] float32, of 128 blocks. Results, float32 but for `block`: log_sums [rows,
    128], the log-sum-exps of 128 blocks; of the best block score [rows, 1], its number in the span,
    block [rows, 1] int32, and its logits, inside [rows, 256].
    """
    step = pl.program_id(2)
    tile = pl.program_id(0) * cut.steps + step
    # The lane of this tile's first block.
    lane = lax.rem(step, LANES // cut.blocks) * cut.blocks
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None

    @pl.when(step == 0)
    def begin() -> None:
        """Start the search for the best block."""
        score[...] = jnp.full(score.shape, -jnp.inf, score.dtype)
        block[...] = jnp.zeros(block.shape, block.dtype)
        inside[...] = jnp.full(inside.shape, -jnp.inf, inside.dtype)

    @pl.when(lane == 0)
    def begin_lanes() -> None:
        """Start the next 128 log-sum-exps."""
        log_sums[...] = jnp.full(log_sums.shape, -jnp.inf, log_sums.dtype)

    @pl.loop(0, cut.rows // cut.chunk)
    def take_chunk(index: Array) -> None:
        """Make the logits of one chunk of the rows, and add their blocks."""
        rows = pl.ds(index * cut.chunk, cut.chunk)
        z = lax.dot_general(
            hidden[rows, :],
            head[...],
            dims,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        divisor = temperature[rows, :]
        greedy = divisor == 0
        # One division per row: the reference multiplies, too.
        z = z * (1 / jnp.where(greedy, 1.0, divisor))
        # Values past the vocabulary are meaningless.
        valid = vocab[0]
        token = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        z = jnp.where(token < valid - tile * z.shape[1], z, -jnp.inf)

        pieces = [(lane + j, z[:, j * BLOCK : (j + 1) * BLOCK]) for j in range(cut.blocks)]
        peaks, of_tile = _block_sums(pieces)
        # Both are -inf in the lanes of the other's blocks.
        log_sums[rows, :] = jnp.maximum(log_sums[rows, :], of_tile)
        scores = jnp.where(greedy, peaks, of_tile + noise[rows, :])
        # Noise past its end may be NaN.
        scores = jnp.where(of_tile > -jnp.inf, scores, -jnp.inf)
        first = step * cut.blocks - lane  # the block of lane 0
        _keep_better(scores, pieces, first, best=(score, block, inside), rows=rows)


def _block_sums(pieces: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the largest logit and log-sum-exp of each block, in its lane of [rows, 128].

    A piece is (lane, block [rows, 256]). Lanes without a block are -inf.
    """
    lanes = lax.broadcasted_iota(jnp.int32, (pieces[0][1].shape[0], LANES), 1)
    peaks = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
    sums = jnp.zeros(lanes.shape, jnp.float32)
    for lane, z in pieces:
        peak = jnp.max(z, axis=1, keepdims=True)
        # An empty block keeps its -inf: subtracting it from itself would give NaN.
        total = jnp.sum(jnp.exp(z - jnp.where(peak == -jnp.inf, 0.0, peak)), axis=1, keepdims=True)
        peaks = jnp.where(lanes == lane, peak, peaks)
        sums = jnp.where(lanes == lane, total, sums)
    return peaks, jnp.where(peaks == -jnp.inf, -jnp.inf, peaks + jnp.log(sums))


def _keep_better(
    scores: Array,
    pieces: list[tuple[Array, Array]],
    first: Array,
    *,
    best: tuple[Ref, Ref, Ref],
    rows: Any,
) -> None:
    """Let the tile's best block replace the best so far if its score is larger.

    Of equal ones the first stays. scores [rows, 128] of the blocks from `first` on, -inf except for
    the tile's own; best: score, block and its logits, at these rows (a pl.Slice).
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
