"""Attention within packed lines is that of each sample by itself, and skips blocks that no token
sees.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import drawn, grouped, seen_by

from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.models.packed_attention import attend_packed
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.packing import Extent, pack

HEADS = 4
GROUPS = 2
DIM = 8


def dense(query, key, value, segments):
    """The same with all scores of a line at one time."""
    seen = np.stack([seen_by(line) for line in np.asarray(segments)])[:, None, None]
    lines, count, heads, dim = query.shape
    grouped = query.reshape(lines, count, GROUPS, heads // GROUPS, dim)
    scores = jnp.einsum("sqgrd,skgd->sgrqk", grouped, key) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    weights = jnp.where(seen, weights, 0.0)
    return jnp.einsum("sgrqk,skgd->sqgrd", weights, value).reshape(query.shape)


def lines_of(block: int, shards: int):
    """Two lines of samples of one prompt, or one, and random queries, keys, values, cotangents."""
    part = pack(grouped(50), Extent(12), block, row_shards=shards)[0]
    batch = part.batch
    random = np.random.default_rng(0)
    sizes = [HEADS, GROUPS, GROUPS, HEADS]
    arrays = [
        jnp.asarray(random.normal(size=(*batch.tokens.shape, heads, DIM)), jnp.float32)
        for heads in sizes
    ]
    return arrays, jnp.asarray(batch.segments), jnp.asarray(batch.pairs)


@pytest.mark.parametrize(("block", "shards"), [(8, 1), (8, 2), (16, 1), (512, 1)])
def test_blocks_give_the_sums_and_gradients_of_all_scores_at_once(block, shards):
    (*given, cotangent), segments, pairs = lines_of(block, shards)
    assert (pairs[..., 0] < 0).any() or block == 512  # some blocks are skipped
    got, pull = jax.vjp(functools.partial(attend_packed, segments=segments, pairs=pairs), *given)
    want, pull_dense = jax.vjp(functools.partial(dense, segments=segments), *given)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for own, other in zip(pull(cotangent), pull_dense(cotangent), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_half_precision_is_summed_in_float32():
    (*given, cotangent), segments, pairs = lines_of(8, 1)
    halves = [part.astype(jnp.bfloat16) for part in given]
    got, pull = jax.vjp(functools.partial(attend_packed, segments=segments, pairs=pairs), *halves)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), dense(*given, segments=segments), atol=3e-2)
    assert all(own.dtype == jnp.bfloat16 for own in pull(cotangent.astype(jnp.bfloat16)))


def test_what_a_sample_is_given_changes_no_bit_of_another(tiny):
    """As where a sibling's tokens change."""
    model = init(jax.random.key(0), tiny)
    given = dataclasses.replace(grouped(tiny.vocab_size), columns={})
    mask = np.asarray(given.mask)
    others = np.where(mask & (np.arange(len(mask)) == 1)[:, None], 1, given.tokens)
    changed = dataclasses.replace(given, tokens=others.astype(np.int32))
    said = []
    for batch in (given, changed):
        found = np.zeros(mask.shape, np.float32)
        for part in pack(batch, Extent(12), 16, row_shards=1):
            scores = np.asarray(score_packed(model, part.batch, temperature=1.0))
            found.put(part.source[part.batch.mask], scores[part.batch.mask])
        said.append(found)
    same = np.arange(len(mask)) != 1
    np.testing.assert_array_equal(said[0][same], said[1][same])
    assert (said[0][1] != said[1][1]).any()


def test_a_line_of_one_long_sample_and_of_many_short_ones_are_one_program():
    traced = 0

    @jax.jit
    def attend(query, key, value, segments, pairs):
        nonlocal traced
        traced += 1
        return attend_packed(query, key, value, segments, pairs)

    for responses in ([200], [20] * 10):
        (part,) = pack(drawn(50, np.array(responses), 10, 200), Extent(1), 32, row_shards=1)
        length = part.batch.tokens.shape[1]
        heads = [jnp.ones((1, length, n, DIM)) for n in (HEADS, GROUPS, GROUPS)]
        attend(*heads, part.batch.segments, part.batch.pairs)
    assert traced == 1
