"""Log-probability and entropy of given tokens on a TPU: the vocabulary streams by, forward and
backward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.logprobs import streaming
from pallas_kernels.logprobs.streaming import Options, Streams, Sums
from pallas_kernels.shapes import LANES
from rlhf_jax.types import Array

BLOCK_BYTES = 8 * 2**20  # float32 of one block of hidden's rows, at most
TILE = 512  # vocabulary entries of one tile, at most
TILE_BYTES = 4 * 2**20  # float32 of one tile of the head, at most
SCORE_BYTES = 2 * 2**20  # float32 logits of one block and tile, at most
VECTOR_MEMORY = 56 * 2**20  # of the 64 MiB that the smallest of these chips has
PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VECTOR_MEMORY
)
ABSENT = -1e30  # a logit that adds nothing, yet whose multiples are finite


def law(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    temperature: float,
    tied: bool,
    axis: str | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`streaming.law`; `interpret` (True, or the parameters of Pallas' TPU interpreter) runs it
    anywhere, slowly.
    """
    if (
        tied and hidden.shape[1] % LANES
    ):  # XLA lays a head of such rows out with the vocabulary last
        tied = False
        head = head.T
    options = Options(temperature, tied, interpret)
    streams = Streams(
        functools.partial(_sums, options), functools.partial(_gradients, options), tied, axis
    )
    return streaming.law(streams, hidden, head, targets)


class Sizes(NamedTuple):
    """Blocks of rows and tiles of the vocabulary."""

    block: int
    blocks: int
    tile: int
    tiles: int
    vocab: int


def _sizes(hidden: Array, vocab: int, tile: int) -> Sizes:
    """Blocks of equal size, of whole sublane tiles, as large as vector memory allows: the head is
    read for each.
    """
    rows, width = hidden.shape
    most = max(16, min(BLOCK_BYTES // (4 * width), SCORE_BYTES // (4 * tile)) // 16 * 16)
    blocks = pl.cdiv(rows, most)
    return Sizes(pl.cdiv(pl.cdiv(rows, blocks), 16) * 16, blocks, tile, pl.cdiv(vocab, tile), vocab)


def _widest_tile(width: int, vocab: int) -> int:
    most = max(LANES, TILE_BYTES // (4 * width) // LANES * LANES)
    return min(TILE, most, pl.cdiv(vocab, LANES) * LANES)


def _even_tile(width: int, vocab: int) -> int:
    """The widest tile that leaves no rest but lanes: the head's gradient is then whole tiles, and
    needs no copy.
    """
    units = pl.cdiv(vocab, LANES)
    return LANES * max(
        n for n in range(1, _widest_tile(width, vocab) // LANES + 1) if units % n == 0
    )


def _vocab(options: Options, head: Array) -> int:
    return head.shape[0 if options.tied else 1]


def _blocks(x: Array, sizes: Sizes) -> Array:
    """x [R, M] or [R] as [R', M] or [R', 1]: rows of zeros fill the last block."""
    x = x[:, None] if x.ndim == 1 else x
    return jnp.pad(x, ((0, sizes.block * sizes.blocks - x.shape[0]), (0, 0)))


def _head_spec(options: Options, sizes: Sizes, width: int, tile_of) -> pl.BlockSpec:
    """A tile of the head, whose number is tile_of(grid indices)."""
    if options.tied:
        return pl.BlockSpec((sizes.tile, width), lambda *at: (tile_of(*at), 0))
    return pl.BlockSpec((width, sizes.tile), lambda *at: (0, tile_of(*at)))


def _sums(options: Options, hidden: Array, head: Array, targets: Array) -> Sums:
    (rows, width) = hidden.shape
    vocab = _vocab(options, head)
    sizes = _sizes(hidden, vocab, _widest_tile(width, vocab))
    per_row = pl.BlockSpec((sizes.block, 1), lambda row, _: (row, 0))
    column = jax.ShapeDtypeStruct((sizes.block * sizes.blocks, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_sums_kernel, options, sizes),
        grid=(sizes.blocks, sizes.tiles),
        in_specs=[
            pl.BlockSpec((sizes.block, width), lambda row, _: (row, 0)),
            _head_spec(options, sizes, width, lambda _, tile: tile),
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
    )(_blocks(hidden, sizes), head, _blocks(targets, sizes))
    return Sums(*(x[:rows, 0] for x in out))


def _sums_kernel(
    options: Options,
    sizes: Sizes,
    hidden,
    head,
    target,
    chosen,
    normaliser,
    entropy,
    top,
    total,
    weighted,
) -> None:
    """Running maximum m, sum of exp(z - m), sum of exp(z - m) (z - m); the target's logit adds up
    in its output.
    """
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def begin():
        top[...] = jnp.full_like(top, ABSENT)
        for total_so_far in (total, weighted, chosen):
            total_so_far[...] = jnp.zeros_like(total_so_far)

    scores, ids = _scores(options, sizes, hidden[...], head[...].astype(hidden.dtype), tile)
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
    def end():
        log_total = jnp.log(total[...])
        normaliser[...] = top[...] + log_total
        entropy[...] = log_total - weighted[...] / total[...]


def _scores(
    options: Options, sizes: Sizes, hidden: Array, head: Array, tile
) -> tuple[Array, Array]:
    """Tempered logits [rows, tile] of one tile, ABSENT past the vocabulary, and their token ids."""
    scores = _product(hidden, head, 1, 1 if options.tied else 0) / options.temperature
    ids = tile * sizes.tile + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return (
        jnp.where(ids < sizes.vocab, scores, ABSENT) if sizes.vocab % sizes.tile else scores
    ), ids


def _product(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """The sum of products over one axis of each, in float32."""
    precision = (
        jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    dims = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _gradients(options: Options, hidden: Array, head: Array, *rows: Array) -> tuple[Array, Array]:
    """The gradients of hidden, in its dtype, and of head, in float32: one block of rows after
    another.

    `rows` are target, normaliser, entropy, and the cotangents of log-probability and entropy, each
    [R].
    """
    (rows_count, width) = hidden.shape
    vocab = _vocab(options, head)
    sizes = _sizes(hidden, vocab, _even_tile(width, vocab))
    blocks = [_blocks(x, sizes).reshape(sizes.blocks, sizes.block, -1) for x in (hidden, *rows)]

    def add(d_head, block):
        d_head, parts = _gradients_of_block(options, sizes, head, d_head, block)
        return d_head, parts.sum(axis=0).astype(hidden.dtype)

    whole = sizes.tile * sizes.tiles
    zeros = jnp.zeros((whole, width) if options.tied else (width, whole), jnp.float32)
    d_head, d_hidden = jax.lax.scan(add, zeros, blocks)
    return d_hidden.reshape(-1, width)[:rows_count], d_head[: head.shape[0], : head.shape[1]]


def _gradients_of_block(
    options: Options, sizes: Sizes, head: Array, d_head: Array, block: list[Array]
):
    """d_head with the block's part added, in place, and the gradient of the block's hidden in parts
    [1 or 2, R, M].

    A part sums over half of the vocabulary, for each core of a chip that has two.
    """
    width = block[0].shape[1]
    cores = min(2, sizes.tiles)
    share = pl.cdiv(sizes.tiles, cores)
    tile = _head_spec(
        options, sizes, width, lambda core, at: jnp.minimum(core * share + at, sizes.tiles - 1)
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


def _gradients_kernel(options: Options, sizes: Sizes, head, d_head_before, hidden, *refs) -> None:
    *rows, d_head, d_hidden = refs
    tile = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def begin():
        d_hidden[...] = jnp.zeros_like(d_hidden)

    @pl.when(
        tile < sizes.tiles
    )  # the second half may be a tile shorter, and then sees its last tile twice
    def add():
        here = hidden[...]
        words = _words(options, sizes, head[...].astype(hidden.dtype), tile)
        d_scores = _d_scores(options, sizes, here, words, tile, *(row[...] for row in rows)).astype(
            here.dtype
        )
        d_hidden[0] += _product(d_scores, words, 1, 0 if options.tied else 1)
        left, right = (d_scores, here) if options.tied else (here, d_scores)
        d_head[...] = d_head_before[...] + _product(left, right, 0, 0)


def _words(options: Options, sizes: Sizes, head: Array, tile) -> Array:
    """A tile of the head, zero past the vocabulary, where memory holds anything."""
    if sizes.vocab % sizes.tile == 0:
        return head
    ids = tile * sizes.tile + jax.lax.broadcasted_iota(
        jnp.int32, head.shape, 0 if options.tied else 1
    )
    return jnp.where(ids < sizes.vocab, head, jnp.zeros_like(head))


def _d_scores(
    options, sizes, hidden, words, tile, target, normaliser, entropy, g_logprob, g_entropy
) -> Array:
    """The gradient of one tile's logits [rows, tile]: d log p = onehot - p, dH = -p (log p + H),
    over temperature.
    """
    scores, ids = _scores(options, sizes, hidden, words, tile)
    log_p = scores - normaliser
    p = jnp.exp(log_p)
    onehot = jnp.where(ids == target, 1.0, 0.0)
    return (g_logprob * (onehot - p) - g_entropy * p * (log_p + entropy)) / options.temperature
