"""Kernels for Hopper (Mosaic GPU): they lower for CUDA at every real shape, and compute what they
should.

Lowering needs no GPU: it makes the whole kernel, with layouts, barriers and copies, short of
machine code. The numbers come from a GPU (`JAX_PLATFORMS=cuda,cpu pytest -m gpu`), or from Pallas'
GPU interpreter, which jax has from 0.12 on.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import by_name, exact, on_gpu, reduced, runs_on_gpu

from benchmarks.shapes import SHAPES, SLOTS
from pallas_kernels import hopper
from pallas_kernels.commit import gpu as commit
from pallas_kernels.logprobs import gpu as logprobs
from pallas_kernels.shapes import BLOCK
from pallas_kernels.tree_attention import gpu as attention
from pallas_kernels.verify_head import gpu as head

pytestmark = pytest.mark.usefixtures("compiled_well")

SIZES = (
    (64, 33),
    *(
        pytest.param(*size, marks=pytest.mark.slow)
        for size in ((1, 1), (1, 9), (1, 33), (8, 5), (32, 9))
    ),
)
every_size = pytest.mark.parametrize(("rows", "nodes"), SIZES)
every_shape = pytest.mark.parametrize("name", by_name())


# Lowering for CUDA


@every_shape
@every_size
def test_tree_attention_lowers_for_hopper(name, rows, nodes):
    """The program for CUDA is one Mosaic GPU kernel and no matrix product of XLA's."""
    shape = SHAPES[name]
    assert_one_kernel(
        attention.tree_attention.trace(*attention_structs(shape, rows, nodes, SLOTS, nodes))
    )


@every_shape
@every_size
def test_verify_head_lowers_for_hopper(name, rows, nodes):
    """The same, and no array of the program is as large as the logits."""
    shape = SHAPES[name]
    count = rows * nodes
    blocks = -(-shape.vocab // BLOCK)
    weights = struct((shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab))
    inputs = struct((count, shape.width)), weights, struct((count, blocks), jnp.float32)
    temperature = struct((count,), jnp.float32)
    text = assert_one_kernel(head.verify_head.trace(*inputs, temperature, tied=shape.tied))
    assert f"{count}x{shape.vocab}x" not in text
    cut = hopper.plan(count, shape.width, shape.vocab, tied=shape.tied)
    assert cut.slices * cut.rows * BLOCK <= max(1 << 23, count * shape.vocab // 8)


@every_shape
def test_log_probs_lower_for_hopper(name):
    """A kernel forward and, backward, one and two products of a slice; twice where the last slice
    is a shorter one.
    """
    shape = SHAPES[name]
    rows = 4000
    weights = struct(
        (shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab), jnp.float32
    )
    inputs = struct((rows, shape.width)), weights, struct((rows,), jnp.int32)
    law = functools.partial(logprobs.token_logprobs, temperature=1.0, tied=shape.tied)

    def loss(*inputs):
        return sum(part.sum() for part in law(*inputs))

    text = assert_one_kernel(jax.jit(law).trace(*inputs))
    assert f"{rows}x{shape.vocab}x" not in text
    text = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .trace(*inputs)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    kernels = text.count("stablehlo.custom_call @mosaic_gpu")
    products = text.count("stablehlo.dot_general")
    assert (kernels, products) in ((2, 2), (3, 4))  # of which one kernel is the forward's
    assert f"{rows}x{shape.vocab}x" not in text


@every_shape
@every_size
def test_commit_lowers_for_hopper(name, rows, nodes):
    """One kernel for all layers, to which every leaf of the cache is lent, and nothing else but the
    starts.
    """
    shape = SHAPES[name]
    keys = (rows, shape.groups, shape.dim)
    values = (rows, shape.groups)
    cache, window = (
        ((struct((*keys, size)), struct((*values, size, shape.dim))),) * shape.layers
        for size in (SLOTS, nodes)
    )
    path = struct((rows, nodes), jnp.int32)
    start = struct((rows,), jnp.int32)
    text = assert_one_kernel(
        jax.jit(commit.commit, donate_argnums=0).trace(cache, window, path, start)
    )
    assert text.count("output_operand_alias<") == 2 * shape.layers
    assert not any(
        f"stablehlo.{copy}" in text
        for copy in ("pad", "gather", "dynamic_update_slice", "transpose")
    )


def test_sizes_that_fit_no_tile_lower():
    """A cache of odd slots, two window blocks, few nodes, and a vocabulary of no whole blocks."""
    shape = SHAPES["llama3_8b"]
    assert_one_kernel(
        attention.tree_attention.trace(*attention_structs(shape, 3, 5, SLOTS + 9, 70))
    )
    inputs = struct((7, 576)), struct((576, 49152 - 192)), struct((7, 192), jnp.float32)
    temperature = struct((7,), jnp.float32)
    assert_one_kernel(head.verify_head.trace(*inputs, temperature, tied=False))


def attention_structs(shape, rows: int, nodes: int, slots: int, window: int) -> list:
    """What `tree_attention` takes, as shapes."""
    groups = shape.groups
    dim = shape.dim
    cache = (rows, groups, dim, slots), (rows, groups, slots, dim)
    news = (rows, groups, dim, window), (rows, groups, window, dim)
    arrays = [struct(size) for size in ((rows, nodes, shape.heads, dim), *cache, *news)]
    return [*arrays, struct((rows,), jnp.int32), struct((rows, nodes, window), jnp.bool_)]


def struct(shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_one_kernel(traced) -> str:
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.dot_general" not in text
    return text


# Tree attention


def attention_inputs(shape, rows: int, nodes: int, slots: int, window: int, lengths) -> list:
    """Random bfloat16 inputs of `tree_attention`; the cache is NaN from each row's length on."""
    random = np.random.default_rng(rows + nodes + slots)
    structs = attention_structs(shape, rows, nodes, slots, window)
    arrays = [random.normal(size=part.shape).astype(part.dtype) for part in structs[:5]]
    for row, length in enumerate(lengths):
        arrays[1][row, :, :, length:] = np.nan
        arrays[2][row, :, length:] = np.nan
    mask = random.random((rows, nodes, window)) < 0.5
    mask[:, 0] = False
    return [*arrays, np.array(lengths, np.int32), mask]


@runs_on_gpu
@pytest.mark.parametrize(
    ("name", "nodes", "slots", "window", "lengths"),
    [
        # a cache that is padded, a window that has grown
        ("llama3_8b_of_8", 5, 203, 9, (0, 1, 64, 203)),
        ("smollm2_135m", 1, 136, 1, (130, 0)),  # N = 0, D = 64
        ("llama3_8b_of_8", 33, 128, 33, (100,)),  # three warpgroups share a ring
        # two tiles, two window blocks
        pytest.param("llama3_70b_of_8", 33, 320, 70, (320, 65), marks=pytest.mark.slow),
        # five parts of the context
        pytest.param("qwen3_0.6b", 9, 640, 9, (640, 1, 128, 333), marks=pytest.mark.slow),
    ],
)
def test_tree_attention_follows_its_law(name, nodes, slots, window, lengths):
    """Within 1e-2 of each row's largest value, with NaN beyond each length; what sees nothing is
    zero.
    """
    inputs = attention_inputs(reduced(SHAPES[name]), len(lengths), nodes, slots, window, lengths)
    out = np.asarray(on_gpu(attention.tree_attention)(*inputs), np.float64)
    law = exact(*inputs)
    assert np.all(np.abs(out - law).max(-1) <= 1e-2 * np.abs(law).max(-1))


def test_tree_attention_refuses_float32():
    inputs = attention_inputs(reduced(SHAPES["llama3_8b"]), 1, 1, 64, 1, (64,))
    with pytest.raises(ValueError, match="serves bfloat16, not float32"):
        attention.tree_attention(*[x.astype(np.float32) for x in inputs[:5]], *inputs[5:])


# The head


def head_inputs(shape, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random hidden states [R, M], a head, and Gumbel noise [R, blocks]."""
    random = np.random.default_rng(rows)
    size = (shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab)
    hidden, weights = (
        random.normal(size=size).astype(jnp.bfloat16) for size in ((rows, shape.width), size)
    )
    noise = random.gumbel(size=(rows, -(-shape.vocab // BLOCK))).astype(np.float32)
    return hidden, weights * jnp.bfloat16(0.25), noise


def head_law(hidden, weights, noise, temperature: np.ndarray, tied: bool):
    """Normaliser, score, block and inside in float64."""
    hidden = np.asarray(hidden, np.float64)
    weights = np.asarray(weights, np.float64)
    greedy = temperature[:, None] == 0
    logits = hidden @ (weights.T if tied else weights) / np.where(greedy, 1, temperature[:, None])
    short = -logits.shape[1] % BLOCK
    blocks = np.pad(logits, [(0, 0), (0, short)], constant_values=-np.inf).reshape(
        len(hidden), -1, BLOCK
    )
    scores = np.where(greedy, blocks.max(-1), np.logaddexp.reduce(blocks, -1) + noise)
    block = scores.argmax(-1)
    return (
        np.logaddexp.reduce(logits, -1),
        scores.max(-1),
        block,
        blocks[np.arange(len(hidden)), block],
    )


@runs_on_gpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("qwen3_8b", 5),  # half a block at the end of the vocabulary
        ("smollm2_135m", 3),  # tied, a width of 5 chunks
        pytest.param("qwen3_0.6b", 70, marks=pytest.mark.slow),  # two warpgroups
        pytest.param("llama3_8b", 200, marks=pytest.mark.slow),  # two tiles
    ],
)
def test_verify_head_follows_its_law(name, rows):
    """The law's block at every node, and numbers within 1e-2 of the largest of each node; each
    node has one of three temperatures.
    """
    shape = reduced(SHAPES[name])
    hidden, weights, noise = head_inputs(shape, rows)
    temperature = np.resize(np.array([0.7, 0.0, 1.0], np.float32), rows)
    parts = on_gpu(head.verify_head)(hidden, weights, noise, temperature, tied=shape.tied)
    normaliser, score, block, inside = head_law(hidden, weights, noise, temperature, shape.tied)
    np.testing.assert_array_equal(parts.block, block)
    np.testing.assert_allclose(parts.normaliser, normaliser, rtol=1e-2)
    np.testing.assert_allclose(parts.score, score, rtol=1e-2)
    real = np.isfinite(inside)
    np.testing.assert_array_equal(np.isfinite(parts.inside), real)
    error = np.abs(np.where(real, parts.inside, 0) - np.where(real, inside, 0)).max(-1)
    assert np.all(error <= 1e-2 * np.abs(np.where(real, inside, 0)).max(-1))


@runs_on_gpu
def test_the_best_block_may_be_the_short_last_one():
    """Noise that favours the vocabulary's half block: its 128 logits are kept, and -inf beyond
    them.
    """
    shape = reduced(SHAPES["qwen3_8b"])
    hidden, weights, noise = head_inputs(shape, 2)
    noise[:, -1] += 1000
    temperature = np.ones(2, np.float32)
    parts = on_gpu(head.verify_head)(hidden, weights, noise, temperature, tied=False)
    *_, block, inside = head_law(hidden, weights, noise, temperature, False)
    np.testing.assert_array_equal(parts.block, block)
    assert np.all(block == noise.shape[1] - 1)
    assert np.all(np.isneginf(parts.inside[:, 128:]))
    np.testing.assert_allclose(parts.inside[:, :128], inside[:, :128], rtol=1e-2, atol=1e-2)


def test_verify_head_refuses_what_it_cannot_serve():
    hidden, weights, noise = head_inputs(reduced(SHAPES["qwen3_8b"]), 1)
    temperature = np.ones(1, np.float32)
    with pytest.raises(ValueError, match="serves bfloat16, not float32"):
        head.verify_head(
            hidden.astype(np.float32), weights.astype(np.float32), noise, temperature, tied=False
        )
    with pytest.raises(ValueError, match="no whole tiles"):
        head.verify_head(hidden, weights[:, :-1], noise, temperature, tied=False)


# Warpgroups beside each other


def two_warpgroups_attend():
    shape = reduced(SHAPES["llama3_8b_of_8"])
    return attention.tree_attention(
        *attention_inputs(shape, 1, 20, 203, 20, (100,)), interpret=True
    )


def two_warpgroups_draw():
    shape = dataclasses.replace(SHAPES["llama3_8b"], width=128, vocab=640)
    temperature = jnp.ones(70)
    return head.verify_head(*head_inputs(shape, 70), temperature, tied=False, interpret=True)


def two_warpgroups_differentiate():
    shape = dataclasses.replace(SHAPES["llama3_8b"], width=128, vocab=640)
    hidden, weights = (jnp.asarray(x) for x in head_inputs(shape, 70)[:2])
    law = functools.partial(logprobs.token_logprobs, temperature=1.0, tied=False, interpret=True)
    return jax.grad(
        lambda x: sum(part.sum() for part in law(x, weights, jnp.arange(70, dtype=jnp.int32)))
    )(hidden)


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.12 has the interpreter that sees races"
)
@pytest.mark.parametrize(
    "run", [two_warpgroups_attend, two_warpgroups_draw, two_warpgroups_differentiate]
)
def test_no_warpgroup_reads_what_another_writes(run, monkeypatch):
    """The interpreter raises where two of them, or a copy, touch memory with no barrier between."""
    watching: Any = getattr(plgpu, "InterpretGPUParams", None)
    monkeypatch.setattr(hopper, "interpretation", lambda interpret: watching(detect_races=True))
    jax.block_until_ready(run())
