"""A kind of cache is a file: two are here, and no file of the package knows of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from generated import CORE, decoding, run
from sliced import roll_out, slices, texts
from tiny_stage import Shuffled

from rlhf_jax import mesh as meshes
from rlhf_jax.cache.cache import KVCache, Window
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.cache.state import CACHE_KINDS
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.precompile import first_programs
from rlhf_jax.generation.requests import Request
from rlhf_jax.mesh import Layout
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.types import Array, ModelConfig

PAGE = 8  # slots


@struct.dataclass
class PagedCache(KVCache):
    """Pages of all rows in one pool, found by a table: no leaf but the table has rows.

    A page of a row is anywhere, but its rows keep theirs. Pages are put in order to be read.
    """

    pool: tuple[tuple[jax.Array, jax.Array], ...]  # by layer, k and v [P, G, PAGE, D]
    table: jax.Array  # [B, P / B] int32
    cache_length: int = struct.field(pytree_node=False)

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, cache_length: int, layout: Layout) -> Self:
        pages = rows * -(-cache_length // PAGE)
        leaf = jnp.zeros((pages, config.num_kv_heads, PAGE, config.head_dim), layout.dtype)
        return cls(((leaf, leaf),) * config.num_layers, scattered(rows, pages), cache_length)

    @classmethod
    def prefill(cls, window: Window) -> ContiguousCache:
        return ContiguousCache.prefill(window)

    def in_order(self) -> ContiguousCache:
        def view(leaf):
            found = leaf[self.table].swapaxes(1, 2)  # [B, G, pages, PAGE, D]
            return found.reshape(*found.shape[:2], -1, found.shape[-1])[:, :, : self.cache_length]

        return ContiguousCache(tuple((view(k).swapaxes(2, 3), view(v)) for k, v in self.pool))

    def holding(self, rows: ContiguousCache) -> Self:
        def put(leaf, new):
            short = self.table.shape[1] * PAGE - new.shape[2]
            new = jnp.pad(new, ((0, 0), (0, 0), (0, short), (0, 0)))
            new = new.reshape(*new.shape[:2], -1, PAGE, new.shape[3]).swapaxes(1, 2)
            return leaf.at[self.table].set(new)

        pairs = zip(self.pool, rows.layers, strict=True)
        pool = tuple(
            (put(k, new_k.swapaxes(2, 3)), put(v, new_v)) for (k, v), (new_k, new_v) in pairs
        )
        return dataclasses.replace(self, pool=pool)

    def attend(self, length: Array, mask: Array, layout: Layout) -> Callable:
        return self.in_order().attend(length, mask, layout)

    def memory(self, window: Window | None = None) -> tuple:
        return self.in_order().memory(window)

    def commit(self, window: Window, path: Array, start: Array, layout: Layout) -> Self:
        return self.holding(self.in_order().commit(window, path, start, layout))

    def specs(self) -> Self:
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, self)

    def rows_out(self, rows: Array, cache_length: int) -> ContiguousCache:
        return self.in_order().rows_out(rows, cache_length)

    def rows_in(self, rows: Array, new: KVCache) -> Self:
        return self.holding(self.in_order().rows_in(rows, new))

    def take(self, rows: Array, layout: Layout, execute: Execute) -> Self:
        return execute(take_pages, self, rows)


def scattered(rows: int, pages: int) -> jax.Array:
    """A table in which every row has as many pages, neighbours far apart."""
    return jnp.arange(pages, dtype=jnp.int32)[::-1].reshape(-1, rows).T


@jax.jit
def take_pages(cache: PagedCache, rows: Array) -> PagedCache:
    pages = cache.table[rows]
    table = scattered(len(rows), pages.size)
    source = jnp.zeros(pages.size, jnp.int32).at[table].set(pages)
    pool = jax.tree.map(lambda leaf: leaf[source], cache.pool)
    return dataclasses.replace(cache, pool=pool, table=table)


NARROW = jnp.bfloat16


def rounded(tree):
    return jax.tree.map(lambda leaf: leaf.astype(NARROW), tree)


@struct.dataclass
class NarrowCache(ContiguousCache):
    """Keys and values in bfloat16, whatever the products are in; windows are rounded alike."""

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, cache_length: int, layout: Layout) -> Self:
        return cls(rounded(ContiguousCache.empty(config, rows, cache_length, layout).layers))

    @classmethod
    def prefill(cls, window: Window) -> Self:
        return cls(rounded(window.layers))

    def attend(self, length: Array, mask: Array, layout: Layout) -> Callable:
        attend = super().attend(length, mask, layout)

        def attend_rounded(query, key, value, memory):
            cache, window = memory
            wide = jax.tree.map(lambda leaf: leaf.astype(query.dtype), cache)
            near = [part.astype(NARROW).astype(part.dtype) for part in (key, value)]
            return attend(query, *near, (wide, window))

        return attend_rounded

    def commit(self, window: Window, path: Array, start: Array, layout: Layout) -> NarrowCache:
        done = super().commit(Window(rounded(window.layers)), path, start, layout)
        return NarrowCache(done.layers)

    def rows_out(self, rows: Array, cache_length: int) -> NarrowCache:
        return NarrowCache(super().rows_out(rows, cache_length).layers)


LIKE_OTHERS = pytest.mark.long


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    """The two kinds have names."""
    monkeypatch.setitem(CACHE_KINDS, "paged", PagedCache)
    monkeypatch.setitem(CACHE_KINDS, "narrow", NarrowCache)


@pytest.fixture(scope="module")
def plain_text(target):
    """Plain samples with each kind, in batches that shrink."""
    return functools.cache(lambda kind: run(target, None, decoding(), layout=Layout(cache=kind)))


@pytest.mark.parametrize("kind", ["paged", "narrow"])
@pytest.mark.parametrize("strategy", CORE[1:])
def test_speculative_text_is_plain_text(target, drafter, strategy, kind, plain_text):
    """The draft model's cache is of the kind, too; batches shrink, and rows are used again."""
    ours = run(target, drafter, decoding(strategy), layout=Layout(cache=kind))
    assert texts(ours) == texts(plain_text(kind))


def test_text_is_that_of_another_kind_where_arithmetic_is(plain_text):
    """Pages keep every bit; rounded keys are other keys, and give another law."""
    ours, paged, narrow = map(plain_text, ("contiguous", "paged", "narrow"))
    assert texts(paged) == texts(ours)
    for name, sample in ours.items():
        np.testing.assert_allclose(paged[name].logprobs, sample.logprobs, atol=1e-5)
    apart = [
        abs(one.logprobs[1] - narrow[name].logprobs[1])
        for name, one in ours.items()
        if one.tokens[1:] and narrow[name].tokens[1:]
    ]
    assert max(apart) > 1e-4


@pytest.mark.parametrize("kind", ["paged", pytest.param("narrow", marks=LIKE_OTHERS)])
def test_rows_move_between_slices_with_their_keys(target, drafter, kind, plain_text):
    """A plan moves samples at random: rows leave one cache, and come into another."""
    shuffled = Shuffled(seed=2)
    layout = dataclasses.replace(slices(2), cache=kind)
    found = roll_out(
        target, drafter, decoding(CORE[2]), layout, assignment_policy=AssignmentPolicy(shuffled)
    )
    assert shuffled.moves > 10
    assert texts(found) == texts(plain_text(kind))


@pytest.mark.parametrize(
    "strategy", [pytest.param("lookup-chain-2", marks=LIKE_OTHERS), "model-chain-2"]
)
def test_a_stage_finds_its_programs_compiled(target, drafter, strategy, compilations):
    """Those of a batch that shrinks, too, of which nothing but the kind knows the shapes."""
    layout = Layout(cache="paged")
    models = (target, drafter if "model" in strategy else None)
    how = decoding(strategy, stop_tokens=(), max_rows=8, min_rows=2, history=16)
    prompts = [np.arange(5, 9 + i, dtype=np.int32) for i in range(2)]
    wanted = [
        Request(prompt, tuple(range(4 * i, 4 * i + 4)), 4 + 8 * i)
        for i, prompt in enumerate(prompts)
    ]
    found, _ = first_programs(models, 8, [*map(len, prompts)], how, layout)
    for compile_program in found:
        compile_program()
    with compilations() as seen:
        assert len(list(generate(*models, wanted, how, layout))) == 8
    assert not seen


def test_bytes_of_a_narrow_cache_are_half(target):
    """As a plan counts them, of shapes."""
    sizes = {}
    for kind in ("contiguous", "narrow", "paged"):
        state = jax.eval_shape(
            lambda kind=kind: row_verbs.empty(target.config, None, 4, 64, 0, 0, Layout(cache=kind))
        )
        layout = Layout(meshes.abstract_mesh(dict.fromkeys(meshes.AXES, 1)), cache=kind)
        sizes[kind] = meshes.bytes_per_device(
            state.cache, meshes.row_shardings(state.cache, layout)
        )
    assert sizes["narrow"] == sizes["contiguous"] / 2
    assert sizes["paged"] == sizes["contiguous"] + 4 * 4 * 64 / PAGE
