"""Tree attention: one law for every implementation, what a TPU would fetch, and what its compiler
says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import CHIPS, needs_libtpu, one
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import by_name, each_by_type, exact, few, on_gpu, reduced

from benchmarks.shapes import NODES, ROWS, SHAPES, SLOTS
from pallas_kernels.shapes import Shape
from pallas_kernels.tree_attention import cpu, gpu, reference, tpu
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.mesh import ONE_DEVICE

SLOTS_HERE = 300  # no multiple of a block
LENGTHS = [0, 300, 1, 128, 0, 171]
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """What the law is about; `poison` is what may lie beyond a row's length."""

    attend: Callable[..., Any]
    poison: float = np.nan


IMPLEMENTATIONS = {
    "reference": Implementation(reference.tree_attention, poison=1e30),
    "tpu": Implementation(
        functools.partial(tpu.attend, cut=tpu.Cut(128, splits=1), interpret=True)
    ),
    "gpu": Implementation(on_gpu(gpu.tree_attention)),
    "cpu": Implementation(cpu.over_live_blocks, poison=1e30),
}


def attention_shapes() -> dict[str, Shape]:
    """Of shapes that are the same to attention, the first."""
    first = {}
    for name, shape in SHAPES.items():
        first.setdefault((shape.heads, shape.groups, shape.dim), name)
    return {name: SHAPES[name] for name in first.values()}


def inputs(shape: Shape, length: list[int], nodes: int, slots: int, dtype) -> tuple[Any, ...]:
    """All arguments, on the host: query, cache and window of normal numbers, the lengths, and a
    random tree of each row.
    """
    rng = np.random.default_rng(0)
    rows = len(length)
    heads = shape.heads
    groups = shape.groups
    dim = shape.dim
    cache, window = [((rows, groups, dim, end), (rows, groups, end, dim)) for end in (slots, nodes)]
    parts = [
        rng.normal(size=size).astype(jnp.dtype(dtype))
        for size in ((rows, nodes, heads, dim), *cache, *window)
    ]
    mask = np.tril(rng.random((rows, nodes, nodes)) < 0.5) | np.eye(nodes, dtype=bool)
    mask[0, -1] = False  # this node sees the cache alone, if anything
    return *parts, np.asarray(length, np.int32), mask


def poisoned(arguments: tuple[Any, ...], poison: float) -> tuple[Any, ...]:
    """`arguments` with the cache overwritten beyond each row's length."""
    query, cache_k, cache_v, window_k, window_v, length, mask = arguments
    beyond = np.arange(cache_k.shape[3]) >= length[:, None]
    fill = np.asarray(poison, query.dtype)
    cache_k = np.where(beyond[:, None, None, :], fill, cache_k)
    cache_v = np.where(beyond[:, None, :, None], fill, cache_v)
    return query, cache_k, cache_v, window_k, window_v, length, mask


def assert_near(got, want: np.ndarray, dtype) -> None:
    error = np.abs(np.asarray(got, np.float64) - want).max(axis=-1)
    assert np.all(error <= TOLERANCE[dtype] * np.abs(want).max(axis=-1))


def assert_law(one: Implementation, shape: Shape, nodes: int, dtype) -> None:
    arguments = inputs(shape, LENGTHS, nodes, SLOTS_HERE, dtype)
    attend = jax.jit(one.attend)
    with jax.default_matmul_precision("highest"):
        clean = attend(*arguments)
        dirty = attend(*poisoned(arguments, one.poison))
    assert clean.dtype == arguments[0].dtype
    assert_near(clean, exact(*arguments), dtype)
    np.testing.assert_array_equal(np.asarray(clean, np.float32), np.asarray(dirty, np.float32))


@pytest.mark.parametrize("one, dtype", each_by_type(IMPLEMENTATIONS))
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("shape", by_name(attention_shapes()))
def test_every_implementation_is_near_float64_whatever_lies_beyond_the_length(
    one, shape, nodes, dtype
):
    assert_law(one, reduced(SHAPES[shape]), nodes, dtype)


def test_tpu_merges_the_splits_of_a_context():
    in_two = functools.partial(tpu.attend, cut=tpu.Cut(128, splits=2), interpret=True)
    assert_law(Implementation(in_two), reduced(SHAPES["smollm2_135m"]), 5, jnp.bfloat16)


def test_reference_is_what_the_model_computes_today():
    shape = reduced(SHAPES["smollm2_135m"])
    query, cache_k, cache_v, window_k, window_v, length, mask = inputs(
        shape, [3, 9], 4, 9, jnp.float32
    )
    key = window_k.transpose(0, 3, 1, 2)
    value = window_v.transpose(0, 2, 1, 3)
    cache = ContiguousCache(((cache_k, cache_v),))
    attend = cache.attend(length, mask, ONE_DEVICE)
    want, (keys, values) = attend(query, key, value, cache.memory()[0])
    got = reference.tree_attention(query, cache_k, cache_v, keys, values, length, mask)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_on_a_cpu_a_long_cache_is_read_whole_where_most_of_it_holds_tokens():
    """Full rows give the reference's bits, short ones the loop's; a short cache has one way."""
    shape = reduced(SHAPES["smollm2_135m"])
    attend = jax.jit(cpu.tree_attention)
    for lengths, same in (
        ([900, 1000], reference.tree_attention),
        ([200, 9], cpu.over_live_blocks),
    ):
        arguments = inputs(shape, lengths, 3, 1000, jnp.float32)
        np.testing.assert_array_equal(attend(*arguments), jax.jit(same)(*arguments))
    ways = [
        jax.make_jaxpr(attend)(*inputs(shape, [9], 1, slots, jnp.float32)) for slots in (767, 768)
    ]
    assert ["cond" in str(way) for way in ways] == [False, True]


def test_tpu_splits_the_long_context_of_a_single_row():
    shape = Shape(heads=4, groups=2, dim=128, width=0, vocab=0, layers=1)
    arguments = inputs(shape, [5000], 3, 8192, jnp.float32)
    query, cache_k = arguments[:2]
    assert tpu.cut_for(query, cache_k).splits == 2
    assert tpu.cut_for(query, cache_k[..., :4096]).splits == 1
    got = tpu.tree_attention(*poisoned(arguments, np.nan), interpret=True)
    assert_near(got, exact(*arguments), jnp.float32)


def test_tpu_kernel_reads_no_memory_that_was_never_written():
    arguments = inputs(reduced(SHAPES["smollm2_135m"]), [0, 200, 300], 5, SLOTS_HERE, jnp.float32)
    attend = functools.partial(tpu.attend, cut=tpu.Cut(128, splits=1))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = attend(*poisoned(arguments, np.nan))
    assert_near(got, exact(*arguments), jnp.float32)


@functools.partial(jax.jit, static_argnames=("cut", "slots"))
def places(length: jax.Array, cut: tpu.Cut, slots: int) -> jax.Array:
    """[steps, 2]: the (row, block) that each step of a call's grid wants in memory."""
    grid = jnp.indices(
        (length.size, cut.splits, -(-slots // (cut.block * cut.splits))), jnp.int32
    ).reshape(3, -1)
    after = tpu.followers(length)
    return jnp.stack(
        jax.vmap(lambda row, split, step: tpu.block_at(length, after, row, split, step, cut))(
            *grid
        ),
        axis=1,
    )


def fetches(length: list[int], cut: tpu.Cut, slots: int = 4096) -> list[tuple[int, int]]:
    """The (row, block) that the pipeline fetches, in its order: what stays in memory is not fetched
    again.
    """
    named = [
        (int(row), int(block))
        for row, block in np.asarray(places(np.asarray(length, np.int32), cut, slots))
    ]
    return [place for place, before in zip(named, [None, *named], strict=False) if place != before]


@pytest.mark.parametrize("splits", [1, 2])
def test_tpu_fetches_each_block_below_a_length_once_and_no_other(splits):
    cut = tpu.Cut(128, splits)
    rng = np.random.default_rng(0)
    for _ in range(10):
        length = rng.choice([0, 1, 100, 128, 129, 1000, 4095, 4096], size=5).tolist()
        need = [
            (row, block) for row, end in enumerate(length) for block in range(-(-end // cut.block))
        ]
        assert fetches(length, cut) == need


def test_a_row_of_100_among_4096_slots_costs_one_block_and_an_empty_one_nothing():
    rows = [row for row, _ in fetches([4096, 100, 0, 4096], tpu.Cut(512, 1))]
    assert [rows.count(row) for row in range(4)] == [8, 1, 0, 8]


# --- compiled for chips that are not there ---


def compiled(chip: str, shape: Shape, rows: int, nodes: int, slots: int, dtype) -> tuple[Any, int]:
    """The kernel's program for one device of a chip's topology, and the bytes of its cache."""
    at = one(chip)
    heads = shape.heads
    groups = shape.groups
    dim = shape.dim
    cache, window = [((rows, groups, dim, end), (rows, groups, end, dim)) for end in (slots, nodes)]
    parts = [
        jax.ShapeDtypeStruct(one, dtype, sharding=at)
        for one in ((rows, nodes, heads, dim), *cache, *window)
    ]
    length = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=at)
    mask = jax.ShapeDtypeStruct((rows, nodes, nodes), jnp.bool_, sharding=at)
    program = jax.jit(tpu.tree_attention).lower(*parts, length, mask).compile()
    return program, sum(part.size * part.dtype.itemsize for part in parts[1:3])


def assert_compiles(
    chip: str, name: str, rows: int, nodes: int, slots: int = SLOTS, dtype=jnp.bfloat16
) -> None:
    """A copy of the keys, or of the values, would take half a cache of memory and move as much as
    the cache.
    """
    program, cache = compiled(chip, SHAPES[name], rows, nodes, slots, dtype)
    temporary = program.memory_analysis().temp_size_in_bytes
    moved = program.cost_analysis()["bytes accessed"]
    what = f"{chip} {name} B={rows} Q={nodes} T={slots} {jnp.dtype(dtype).name}"
    print(
        f"{what}: {temporary / 1e6:.2f} MB temporary, {moved / 1e6:.1f} MB moved,"
        f" {moved / cache:.2f} of the cache"
    )
    assert temporary < cache / 2
    assert cache <= moved < 2 * cache


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", few([(name,) for name in attention_shapes()], 0))
def test_compiles_for_v5e_at_every_size(name, uncached):
    for rows in (min(ROWS), max(ROWS)):  # what lies between differs in the grid alone
        for nodes in NODES:
            assert_compiles("v5e", name, rows, nodes)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip, name", few([(chip, name) for name in attention_shapes() for chip in ("v5p", "v6e")], 1)
)
def test_compiles_for_larger_chips(chip, name, uncached):
    for rows, nodes in ((1, 5), (32, 1), (64, 33)):
        assert_compiles(chip, name, rows, nodes)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_with_a_long_context_and_in_float32(chip, uncached):
    assert_compiles(chip, "llama3_8b", 1, 9, slots=4096)
    assert_compiles(chip, "smollm2_135m", 8, 9, dtype=jnp.float32)
    assert_compiles(chip, "qwen3_0.6b", 1, 33, slots=4096, dtype=jnp.float32)
