"""Compute log-probability and entropy of given tokens on a TPU, streaming the vocabulary.

It streams forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import LOWEST
from pallas_kernels.logprobs import streaming
from pallas_kernels.logprobs.streaming import Options, Streams, Sums
from pallas_kernels.shapes import LANES, VMEM_BYTES

# Most bytes of float32 of one block of hidden's rows.
ROW_BLOCK_BYTES = 8 * 2**20
# Most tokens of one tile of the head, and most bytes of float32.
VOCAB_TILE = 512
VOCAB_TILE_BYTES = 4 * 2**20
# Most bytes of float32 of the logits of one block and tile.
LOGITS_BYTES = 2 * 2**20
PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
)


class Sizes(NamedTuple):
    """Hold the sizes of blocks of rows and tiles of the vocabulary."""

    block: int  # rows of a block
    blocks: int
    tile: int  # tokens of a tile
    tiles: int
    vocab: int


def token_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    temperature: float,
    tied: bool,
    axis: str | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Compute `streaming.token_logprobs` on a TPU.

    `interpret` (True, or the parameters of Pallas' TPU interpreter) runs it anywhere, slowly.
    """
    # XLA lays out a head of such rows with the vocabulary last.
    if tied and hidden.shape[1] % LANES:
        tied = False
        head = head.T
    options = Options(temperature, tied, interpret)
    streams = Streams(
        functools.partial(_sums, options), functools.partial(_gradients, options), tied, axis=axis
    )
    return streaming.token_logprobs(streams, hidden, head, targets)


def _sizes(options: Options, hidden: Array, head: Array, *, even: bool) -> Sizes:
    """Cut rows and vocabulary into blocks and tiles, as large as vector memory allows.

    Blocks are of equal size and of whole sublane tiles: the head is read for each. `even` takes the
    widest tile that leaves no remainder except lanes: the head's gradient is then whole tiles, and
    needs no copy.
    """
    rows, width = hidden.shape
    vocab = head.shape[0 if options.tied else 1]
    units = pl.cdiv(vocab, LANES)
    widest = max(LANES, VOCAB_TILE_BYTES // (4 * width) // LANES * LANES)
    tile = min(VOCAB_TILE, widest, units * LANES)
    if even:
        tile = LANES * max(n for n in range(1, tile // LANES + 1) if units % n == 0)

    fitting = min(ROW_BLOCK_BYTES // (4 * width), LOGITS_BYTES // (4 * tile))
    blocks = pl.cdiv(rows, max(16, fitting // 16 * 16))
    block = pl.cdiv(pl.cdiv(rows, blocks), 16) * 16
    return Sizes(block, blocks, tile, tiles=pl.cdiv(vocab, tile), vocab=vocab)


def _row_blocks(x: Array, sizes: Sizes) -> Array:
    """Return x [R, M] or [R] as [R', M] or [R', 1]: rows of zeros fill the last block."""
    x = x[:, None] if x.ndim == 1 else x
    return jnp.pad(x, ((0, sizes.block * sizes.blocks - x.shape[0]), (0, 0)))


def _head_spec(
    options: Options, sizes: Sizes, width: int, *, tile_of: Callable[..., Any]
) -> pl.BlockSpec:
    """Describe a tile of the head, whose number is tile_of(grid indices)."""
    if options.tied:
        return pl.BlockSpec((sizes.tile, width), lambda *at: (tile_of(*at), 0))
    return pl.BlockSpec((width, sizes.tile), lambda *at: (0, tile_of(*at)))


def _sums(options: Options, hidden: Array, head: Array, targets: Array) -> Sums:
    """Sum over the head's tokens, tile by tile for each block of rows."""
    (rows, width) = hidden.shape
    sizes = _sizes(options, hidden, head, even=False)
    per_row = pl.BlockSpec((sizes.block, 1), lambda row, _: (row, 0))
    column = jax.ShapeDtypeStruct((sizes.block * sizes.blocks, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_sums_kernel, options, sizes),
        grid=(sizes.blocks, sizes.tiles),
        in_specs=[
            pl.BlockSpec((sizes.block, width), lambda row, _: (row, 0)),
            _head_spec(options, sizes, width, tile_of=lambda _, tile: tile),
            per_row,
        ],
        out_specs=[per_row] * 3,
        out_shape=[column] * 3,
        scratch_shapes=[pltpu.VMEM((sizes.block, 1), jnp.float32)] * 3,
        compiler_params=PARAMETERS,
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * head.size,
            transcendentals=rows * sizes.vocab,
            bytes_accessed=sizes.blocks * head.size * head.dtype.itemsize
            + hidden.size * hidden.dtype.itemsize,
        ),
        interpret=options.interpret,
        name="logprobs",
    )(_row_blocks(hidden, sizes), head, _row_blocks(targets, sizes))
    return Sums(*(x[:rows, 0] for x in out))


def _sums_kernel(
    options: Options,
    sizes: Sizes,
    hidden: Ref,
    head: Ref,
    target: Ref,
    chosen: Ref,
    normaliser: Ref,
    entropy: Ref,
    top: Ref,
    total: Ref,
    weighted: Ref,
) -> None:
    """Add one tile of logits z to the running sums of a block of rows.

    They are the maximum m, the sum of exp(z - m) and the sum of exp(z - m) (z - m). The target's
    logit adds up in its output.
    """
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def begin() -> None:
        """Start the sums of a block of rows."""
        top[...] = jnp.full(top.shape, LOWEST, top.dtype)
        for total_so_far in (total, weighted, chosen):
            total_so_far[...] = jnp.zeros(total_so_far.shape, total_so_far.dtype)

    scores, ids = _scores(options, sizes, hidden[...], head[...].astype(hidden.dtype), tile=tile)
    largest = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
    fall = top[...] - largest
    below = scores - largest
    share = jnp.exp(below)
    weighted[...] = jnp.exp(fall) * (weighted[...] + total[...] * fall) + jnp.sum(
        share * below, axis=1, keepdims=True
    )
    total[...] = jnp.exp(fall) * total[...] + jnp.sum(share, axis=1, keepdims=True)
    chosen[...] += jnp.sum(jnp.where(ids == target[...], scores, 0.0), axis=1, keepdims=True)
    top[...] = largest

    @pl.when(tile == sizes.tiles - 1)
    def end() -> None:
        """Write the results of a block of rows."""
        log_total = jnp.log(total[...])
        normaliser[...] = top[...] + log_total
        entropy[...] = log_total - weighted[...] / total[...]


def _scores(
    options: Options, sizes: Sizes, hidden: Array, head: Array, *, tile: Array
) -> tuple[Array, Array]:
    """Return tempered logits [rows, tile] of a tile, LOWEST past the vocabulary, and token ids."""
    scores = _product(hidden, head, 1, right_axis=1 if options.tied else 0) / options.temperature
    ids = tile * sizes.tile + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    if sizes.vocab % sizes.tile:
        scores = jnp.where(ids < sizes.vocab, scores, LOWEST)
    return scores, ids


def _product(left: Array, right: Array, left_axis: int, *, right_axis: int) -> Array:
    """Sum the products over one axis of each, in float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _gradients(options: Options, hidden: Array, head: Array, *rows: Array) -> tuple[Array, Array]:
    """Return the gradients of hidden, in its dtype, and of head, in float32.

    Blocks of rows follow one another. `rows` are target, normaliser, entropy, and the cotangents of
    log-probability and entropy, each [R].
    """
    (count, width) = hidden.shape
    sizes = _sizes(options, hidden, head, even=True)
    blocks = [_row_blocks(x, sizes).reshape(sizes.blocks, sizes.block, -1) for x in (hidden, *rows)]

    def add(d_head: Array, block: list[Array]) -> tuple[Array, Array]:
        """Add one block to the head's gradient, and return its own."""
        d_head, parts = _gradients_of_block(options, sizes, head, d_head=d_head, block=block)
        return d_head, parts.sum(axis=0).astype(hidden.dtype)

    whole = sizes.tile * sizes.tiles
    zeros = jnp.zeros((whole, width) if options.tied else (width, whole), jnp.float32)
    d_head, d_hidden = lax.scan(add, zeros, blocks)
    return d_hidden.reshape(-1, width)[:count], d_head[: head.shape[0], : head.shape[1]]


def _gradients_of_block(
    options: Options, sizes: Sizes, head: Array, *, d_head: Array, block: list[Array]
) -> tuple[Array, Array]:
    """Add a block's part to d_head in place, and return the gradient of its hidden states.

    That is in parts [1 or 2, R, M]: each sums over half of the vocabulary, one per core of a chip
    with two.
    """
    width = block[0].shape[1]
    cores = min(2, sizes.tiles)
    share = pl.cdiv(sizes.tiles, cores)
    tile = _head_spec(
        options,
        sizes,
        width,
        tile_of=lambda core, at: jnp.minimum(core * share + at, sizes.tiles - 1),
    )
    per_row = [pl.BlockSpec(x.shape, lambda core, at: (0, 0)) for x in block]
    moved = head.size * (head.dtype.itemsize + 8) + block[0].size * (2 + 4 * cores)
    return pl.pallas_call(
        functools.partial(_gradients_kernel, options, sizes),
        grid=(cores, share),
        in_specs=[tile, tile, *per_row],
        out_specs=[
            tile,
            pl.BlockSpec(
                (1, sizes.block, width), lambda core, at: (core, 0, 0), pipeline_mode=pl.Buffered(1)
            ),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(d_head.shape, jnp.float32),
            jax.ShapeDtypeStruct((cores, sizes.block, width), jnp.float32),
        ],
        input_output_aliases={1: 0},
        compiler_params=PARAMETERS,
        cost_estimate=pl.CostEstimate(
            flops=6 * sizes.block * head.size,
            transcendentals=sizes.block * sizes.vocab,
            bytes_accessed=moved,
        ),
        interpret=options.interpret,
        name="logprobs_gradients",
    )(head, d_head, *block)


def _gradients_kernel(
    options: Options, sizes: Sizes, head: Ref, d_head_before: Ref, hidden: Ref, *refs: Ref
) -> None:
    """Add one tile to the gradients of one block of rows.

    The gradients of its logits are d log p = onehot - p, dH = -p (log p + H), over temperature.
    """
    *rows, d_head, d_hidden = refs
    tile = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    vocab_axis = 0 if options.tied else 1

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        """Start the sum over half of the vocabulary."""
        d_hidden[...] = jnp.zeros(d_hidden.shape, d_hidden.dtype)

    # The second half may be a tile shorter, and then sees its last tile twice.
    @pl.when(tile < sizes.tiles)
    def add() -> None:
        """Add one tile that has not been seen."""
        here = hidden[...]
        words = head[...].astype(hidden.dtype)
        if sizes.vocab % sizes.tile:
            # Memory past the vocabulary is undefined.
            ids = tile * sizes.tile + lax.broadcasted_iota(jnp.int32, words.shape, vocab_axis)
            words = jnp.where(ids < sizes.vocab, words, jnp.zeros_like(words))

        target, normaliser, entropy, g_logprob, g_entropy = (row[...] for row in rows)
        scores, ids = _scores(options, sizes, here, words, tile=tile)
        log_p = scores - normaliser
        p = jnp.exp(log_p)
        onehot = jnp.where(ids == target, 1.0, 0.0)
        d_scores = g_logprob * (onehot - p) - g_entropy * p * (log_p + entropy)
        d_scores = (d_scores / options.temperature).astype(here.dtype)

        d_hidden[0] += _product(d_scores, words, 1, right_axis=vocab_axis)
        left, right = (d_scores, here) if options.tied else (here, d_scores)
        d_head[...] = d_head_before[...] + _product(left, right, 0, right_axis=0)
