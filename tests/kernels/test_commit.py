"""The commit kernel against its reference, bit for bit, and compiled for TPUs."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_libtpu, one
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import each, few, on_gpu, reduced

from benchmarks.shapes import NODES, ROWS, SHAPES, SLOTS
from pallas_kernels.commit import gpu, reference, tpu


def on_tpu(interpret):
    return jax.jit(functools.partial(tpu.commit, interpret=interpret))


# A TPU's with memories and copies as on the chip, and with plain arrays.
KERNELS = {"tpu": on_tpu(pltpu.InterpretParams()), "plain": on_tpu(True), "gpu": on_gpu(gpu.commit)}
every = pytest.mark.parametrize("kernel", each(KERNELS))


def leaves(random, layers, groups, dim, rows, slots, dtype):
    """A cache or a window of noise: per layer k [B, G, D, T] and v [B, G, T, D]."""

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    return tuple(
        (draw(rows, groups, dim, slots), draw(rows, groups, slots, dim)) for _ in range(layers)
    )


def problem(start, entries, slots=256, width=33, groups=2, dim=128, layers=2, dtype=jnp.bfloat16):
    """Cache, window, path and start for as many rows as there are starts."""
    random = np.random.default_rng(entries)
    make = functools.partial(leaves, random, layers, groups, dim, len(start), dtype=dtype)
    path = jnp.asarray(random.integers(0, width, (len(start), entries)), jnp.int32)
    return make(slots), make(width), path, jnp.asarray(start, jnp.int32)


def assert_same_bits(got, want):
    def same(a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))

    jax.tree.map(same, got, want)


def assert_is_reference(kernel, *inputs):
    got = kernel(*inputs)
    want = jax.jit(reference.commit)(*inputs)
    assert any(
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(want[-1], inputs[0][-1], strict=True)
    )
    assert_same_bits(got, want)


# Shapes that differ in the vocabulary only are the same here.
CACHES = sorted({(of.groups, of.dim, of.layers) for of in map(reduced, SHAPES.values())})


@every
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups, dim, layers", CACHES)
def test_equals_the_reference_at_every_shape(kernel, groups, dim, layers, dtype):
    sizes = {"groups": groups, "dim": dim, "layers": layers, "dtype": dtype}
    assert_is_reference(kernel, *problem((125, 130), entries=5, width=5, **sizes))


@every
@pytest.mark.parametrize("entries, starts", [(1, (0, 127, 255, 300)), (33, (15, 96, 111, -1))])
def test_starts_anywhere(kernel, entries, starts):
    """Around the edges of tiles, at the last slots, and where `dynamic_update_slice` moves the
    start inside.
    """
    assert_is_reference(kernel, *problem(starts, entries, groups=1, layers=1))


EVERYWHERE = [(5, 128, jnp.float32), (17, 64, jnp.bfloat16), (33, 128, jnp.bfloat16)]


@pytest.mark.slow
@every
@pytest.mark.parametrize(
    "entries, dim, dtype", [*EVERYWHERE[:2], pytest.param(*EVERYWHERE[2], marks=pytest.mark.long)]
)
def test_starts_everywhere(kernel, entries, dim, dtype):
    """Two tiles of keys are enough for every remainder."""
    inputs = problem((0,) * 8, entries, slots=384, groups=1, layers=1, dim=dim, dtype=dtype)
    for low in range(96, 256, 8):
        assert_is_reference(kernel, *inputs[:3], jnp.arange(low, low + 8, dtype=jnp.int32))


@every
@pytest.mark.parametrize("slots, dtype", [(40, jnp.bfloat16), (200, jnp.float32)])
def test_a_cache_of_any_length(kernel, slots, dtype):
    sizes = {"slots": slots, "dim": 64, "layers": 1, "dtype": dtype}
    assert_is_reference(kernel, *problem((0, slots - 9, 3), entries=9, **sizes))


@every
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("poison", [np.nan, pytest.param(-0.0, marks=pytest.mark.slow)])
def test_no_value_touches_another(kernel, poison, dim):
    """Poison in the cache, in window entries beside the path and in one on it stays where it is
    put.
    """
    cache, window, _, start = problem((120, 7), entries=5, width=9, dim=dim, layers=1)
    path = jnp.asarray([[0, 2, 4, 4, 4], [0, 1, 2, 3, 8]], jnp.int32)
    cache = jax.tree.map(lambda leaf: leaf.at[:, :, ::3, ::3].set(poison), cache)
    window = tuple(
        (key.at[..., 2:4].set(poison), value.at[:, :, 2:4].set(poison)) for key, value in window
    )
    assert_is_reference(kernel, cache, window, path, start)


def test_heads_of_sixteen_are_for_a_tpu():
    inputs = problem((0, 31, 3), entries=9, slots=40, dim=16, layers=1)
    for kernel in (KERNELS["tpu"], KERNELS["plain"]):
        assert_is_reference(kernel, *inputs)
    with pytest.raises(ValueError, match="A head dim of 16"):
        gpu.commit(*inputs)


@pytest.mark.slow
def test_layers_that_do_not_fit_go_one_after_another(monkeypatch):
    monkeypatch.setattr(tpu, "BUFFER_BYTES", 2**16)
    inputs = problem((126, 60), entries=5, layers=2, groups=1)
    for interpret in (pltpu.InterpretParams(), True):  # traced here, with few buffers
        assert_same_bits(on_tpu(interpret)(*inputs), reference.commit(*inputs))


def test_a_window_too_wide_is_refused():
    with pytest.raises(ValueError, match="129 tokens"):
        tpu.commit(*problem((0,), entries=1, width=129, layers=1))


EVERY_SHAPE = [("v5e", name, ROWS[1], NODES[2]) for name in SHAPES]
OTHER_SIZES = [
    ("v5e", "llama3_8b_of_8", rows, nodes) for rows, nodes in zip(ROWS, NODES, strict=True)
]
OTHER_CHIPS = [(chip, name, ROWS[2], NODES[3]) for chip in ("v5p", "v6e") for name in SHAPES]


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("chip, name, rows, nodes", EVERY_SHAPE + OTHER_SIZES + few(OTHER_CHIPS, 1))
def test_a_tpu_commits_in_place(chip, name, rows, nodes, uncached):
    """The whole cache is aliased, and no leaf of it is copied."""
    sharding = one(chip)
    shape = SHAPES[name]

    def spec(*sizes, dtype=jnp.bfloat16, form: Any = sharding):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=form)

    # A window is made in the same program, as the kernel wants it: each token a row.
    turned, in_rows = (Format(Layout(order), sharding) for order in ((0, 1, 3, 2), (0, 1, 2, 3)))

    def layers(slots, of_keys: Any = sharding, of_values: Any = sharding):
        sizes = (rows, shape.groups, shape.dim, slots), (rows, shape.groups, slots, shape.dim)
        return ((spec(*sizes[0], form=of_keys), spec(*sizes[1], form=of_values)),) * shape.layers

    path = spec(rows, nodes, dtype=jnp.int32)
    start = spec(rows, dtype=jnp.int32)
    inputs = layers(SLOTS), layers(nodes, turned, in_rows), path, start
    compiled = jax.jit(tpu.commit, donate_argnums=0).lower(*inputs).compile()
    sizes = compiled.memory_analysis()
    text = compiled.as_text()
    cost = compiled.cost_analysis()
    assert sizes is not None and text is not None and cost is not None
    moved = cost["bytes accessed"]
    leaf = rows * shape.groups * shape.dim * SLOTS
    print(
        f"{name}, {rows} rows, {nodes} nodes on {chip}: {sizes.temp_size_in_bytes} B temporary,"
        f" {moved:.0f} B moved"
    )
    assert sizes.alias_size_in_bytes == 4 * leaf * shape.layers
    assert sizes.temp_size_in_bytes < leaf
    copies = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|fusion|copy-start)\(", text)
    assert all(np.prod([int(size) for size in copy.split(",")]) < leaf for copy in copies)
