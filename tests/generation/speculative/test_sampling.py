"""The replayable draw: its law, its noise, its replay, and that the law's test sees planted
biases.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import margins
import numpy as np
import pytest
from chi_square import SIGNIFICANCE, expected_law, law_of, p_value
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.generation.speculative import sampling as module
from rlhf_jax.generation.speculative.sampling import (
    UNTRUNCATED,
    Sampling,
    Truncation,
    gumbel,
    noise_bits,
    threefry,
    uniform,
)

draw = jax.jit(module.draw, static_argnums=(4, 5))
rank = jax.jit(module.rank, static_argnums=(4, 5))
decision_margin = jax.jit(margins.decision_margin, static_argnums=3)
log_probabilities = jax.jit(module.log_probabilities, static_argnums=2)
truncate = jax.jit(module.truncate, static_argnums=2)

DRAWS = 100_000
LAWS = [
    Sampling(),
    Sampling(0.7),
    Sampling(top_k=20),
    Sampling(top_p=0.9),
    Sampling(0.7, top_k=50, top_p=0.8),
]
EXTREMES = [LAWS[0], LAWS[-1]]


def logits_of(
    vocabulary: int, rows: tuple[int, ...] = (), seed: int = 0, scale: float = 2.0
) -> jax.Array:
    draws = np.random.default_rng(seed).normal(size=(*rows, vocabulary)) * scale
    return jnp.asarray(draws, jnp.float32)


def keys(count: int, seed: int = 3) -> tuple[jax.Array, jax.Array]:
    """`count` pairs of (seed, sample) and position, four positions a sample."""
    index = np.arange(count)
    sample = np.stack([np.full(count, seed), index // 4], -1)
    return jnp.asarray(sample, jnp.uint32), jnp.asarray(index % 4, jnp.int32)


def sample(one, logits: jax.Array, **options) -> np.ndarray:
    """`one(logits, key, position, **options)` over many keys."""
    run = jax.jit(jax.vmap(functools.partial(one, **options), (None, 0, 0)))
    parts = [
        run(logits, *part) for part in zip(*(jnp.split(x, 4) for x in keys(DRAWS)), strict=True)
    ]
    return np.concatenate([np.asarray(part) for part in parts])


def token_of(logits, key, position, sampling, levels=(0, 1)):
    return draw(logits, key, position, *law_of(sampling), levels).token


# Noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(counter, key, words):
    as_words = functools.partial(np.asarray, dtype=np.uint32)
    x, y = threefry(
        (jnp.asarray(as_words(key[0])), jnp.asarray(as_words(key[1]))),
        (jnp.asarray(as_words(counter[0])), jnp.asarray(as_words(counter[1]))),
    )
    assert (int(x), int(y)) == words
    level = counter[1] >> 28
    index = counter[1] & 0x0FFFFFFF
    position = jnp.asarray(as_words(counter[0]))
    assert (
        int(noise_bits(jnp.asarray(as_words(key)), position, level, jnp.uint32(index))) == words[0]
    )


def test_threefry_is_jax_own():
    key = np.random.default_rng(0).integers(0, 2**32, 2, np.uint32)
    counter = np.random.default_rng(1).integers(0, 2**32, (2, 64), np.uint32)
    theirs = threefry_2x32(jnp.asarray(key), jnp.asarray(counter.ravel()))
    x, y = threefry(
        (jnp.asarray(key[0]), jnp.asarray(key[1])),
        (jnp.asarray(counter[0]), jnp.asarray(counter[1])),
    )
    np.testing.assert_array_equal(np.concatenate([x, y]), theirs)


def test_noise_is_exact_at_its_ends():
    bits = np.array([0, 1, 1000, 2**31, 2**32 - 1], np.uint32)
    upper = (bits.astype(np.float64) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-upper))
    np.testing.assert_allclose(gumbel(jnp.asarray(bits))[:-1], exact[:-1], rtol=1e-5, atol=1e-6)
    assert np.isfinite(gumbel(jnp.asarray(bits))).all()
    ends = np.asarray(uniform(jnp.asarray(bits)))
    assert ends[0] > 0 and ends[-1] < 1


# Laws


@pytest.mark.parametrize("vocabulary", [700, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_draws_follow_the_law(sampling, vocabulary):
    logits = logits_of(vocabulary)
    expected = expected_law(logits, sampling)
    np.testing.assert_allclose(
        np.exp(log_probabilities(logits, *law_of(sampling))), expected, rtol=2e-5, atol=1e-9
    )
    assert p_value(sample(token_of, logits, sampling=sampling), expected) > SIGNIFICANCE


def planted(logits, key, position, sampling, bias: str):
    """The draw with one mistake in it."""
    tempered = logits / sampling.temperature
    kept = module.blocks(truncate(logits, *law_of(sampling))[0])
    by_best = jnp.max(kept, -1)
    untruncated = jax.nn.logsumexp(module.blocks(tempered), -1)
    summary = by_best if bias == "block by its best token" else untruncated
    index = jnp.arange(summary.shape[-1], dtype=jnp.uint32)
    block = jnp.argmax(summary + gumbel(noise_bits(key, position, 0, index)))
    tokens = block * 256 + jnp.arange(256)
    return tokens[jnp.argmax(kept[block] + gumbel(noise_bits(key, position, 1, tokens)))]


@pytest.mark.parametrize(
    "biased",
    [
        functools.partial(token_of, sampling=Sampling(), levels=(0, 0)),
        functools.partial(planted, sampling=Sampling(), bias="block by its best token"),
        functools.partial(
            planted, sampling=Sampling(top_k=20), bias="truncation after the block sums"
        ),
        functools.partial(
            planted, sampling=Sampling(top_p=0.6), bias="truncation after the block sums"
        ),
        functools.partial(token_of, sampling=Sampling(temperature=0.95)),
    ],
    ids=[
        "shared counters",
        "block by its best",
        "top-k after sums",
        "top-p after sums",
        "temperature",
    ],
)
def test_the_law_test_sees_planted_biases(biased):
    logits = logits_of(700)
    claimed = biased.keywords["sampling"]
    claimed = Sampling(top_k=claimed.top_k, top_p=claimed.top_p)
    assert p_value(sample(biased, logits), expected_law(logits, claimed)) < SIGNIFICANCE


def test_shared_counters_pass_where_block_and_token_noise_never_meet():
    """The control of the planted bias: the same code with the two levels apart, whichever they
    are.
    """
    logits = logits_of(700)
    tokens = sample(token_of, logits, sampling=Sampling(), levels=(2, 3))
    assert p_value(tokens, expected_law(logits, Sampling())) > SIGNIFICANCE


@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_logprob_is_of_the_law(sampling):
    logits = logits_of(700, (64,))
    (key, position) = keys(64)
    drawn = draw(logits, key, position, *law_of(sampling))
    expected = np.take_along_axis(
        np.asarray(log_probabilities(logits, *law_of(sampling))),
        np.asarray(drawn.token)[:, None],
        -1,
    )
    np.testing.assert_allclose(drawn.logprob, expected[:, 0], atol=1e-5)


def test_equal_logits_at_the_edge():
    """Top-k keeps exactly k, the lower ids; top-p keeps equals together."""
    logits = jnp.asarray([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])

    def kept(sampling):
        return np.flatnonzero(np.isfinite(log_probabilities(logits, *law_of(sampling)))).tolist()

    assert kept(Sampling(top_k=2)) == [0, 2]
    assert kept(Sampling(top_k=4)) == [0, 1, 2, 4]
    assert kept(Sampling(top_p=0.5)) == [0, 2, 4]
    assert kept(Sampling(top_p=1e-6)) == [0, 2, 4]
    assert kept(Sampling(top_k=600)) == kept(Sampling()) == [0, 1, 2, 3, 4, 5]
    assert kept(Sampling(temperature=0.0)) == [0]


def kept_by_hand(logits: tuple[float, ...], top_k: int, top_p: float) -> list[int]:
    """The likeliest tokens, of equal ones the lower ids, then those of them that make up top_p."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: top_k or None]
    mass = {token: np.exp(logits[token]) for token in kept}
    for edge in sorted({logits[token] for token in kept}, reverse=True):
        nucleus = [token for token in kept if logits[token] >= edge]
        if sum(mass[token] for token in nucleus) >= top_p * sum(mass.values()):
            return sorted(nucleus)
    return sorted(kept)


@pytest.mark.parametrize("top_p", [1.0, 0.55])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3])
def test_what_is_kept_is_that_of_plain_python(top_k, top_p):
    """Of all logits of four tokens among three numbers, so that most have equals."""
    given = list(itertools.product((0.0, 1.0, 2.5), repeat=4))
    law = 1.0, Truncation(top_k, top_p)
    found = np.isfinite(log_probabilities(jnp.asarray(given, jnp.float32), *law))
    assert [np.flatnonzero(row).tolist() for row in found] == [
        kept_by_hand(logits, top_k, top_p) for logits in given
    ]


def test_support_holds_the_kept_tokens_and_renormalises():
    logits = logits_of(700, (16,))
    (key, position) = keys(16)
    sampling = Sampling(0.8, top_k=12, top_p=0.7)
    drawn = draw(logits, key, position, *law_of(sampling))
    kept = np.isfinite(log_probabilities(logits, *law_of(sampling)))
    assert drawn.top_k_ids is not None and drawn.top_k_ids.shape == (16, 12)
    for row, ids in zip(kept, np.asarray(drawn.top_k_ids), strict=True):
        assert set(ids[ids >= 0]) == set(np.flatnonzero(row))
    renormalised = np.where(kept, jax.nn.log_softmax(jnp.where(kept, logits / 0.8, -jnp.inf)), 0.0)
    again = np.take_along_axis(renormalised, np.asarray(drawn.token)[:, None], 1)[:, 0]
    np.testing.assert_allclose(again, drawn.logprob, atol=1e-5)
    small = draw(logits[:, :5], key, position, 1.0, Truncation(8)).top_k_ids
    assert small is not None and (np.asarray(small)[:, 5:] == -1).all()


def test_temperature_zero_is_the_argmax():
    logits = logits_of(700, (64,))
    (key, position) = keys(64)
    best = np.argmax(logits, -1)
    for sampling in [Sampling(0.0), Sampling(0.0, top_k=4), Sampling(0.0, top_p=0.5)]:
        drawn = draw(logits, key, position, *law_of(sampling))
        np.testing.assert_array_equal(drawn.token, best)
        np.testing.assert_array_equal(drawn.logprob, np.zeros(64))
        np.testing.assert_array_equal(
            np.argmax(log_probabilities(logits, *law_of(sampling)), -1), best
        )


@pytest.mark.parametrize(
    "truncation", [UNTRUNCATED, Truncation(20), Truncation(50, 0.8), Truncation(top_p=0.9)], ids=str
)
def test_each_row_is_drawn_at_its_own_temperature(truncation):
    """Bit for bit as in a batch of that temperature alone, whether drawn, ranked or accepted."""
    logits = logits_of(700, (64,))
    key, position = keys(64)
    temperatures = np.array([0.0, 0.7, 1.0, 1.3], np.float32)
    mixed = jnp.asarray(np.resize(temperatures, 64))

    def outcomes(temperature):
        of_rows = logits, key, position, temperature, truncation
        laws = log_probabilities(logits, temperature, truncation)
        return *draw(*of_rows)[: 3 if truncation.top_k else 2], rank(*of_rows, 4), laws

    together = outcomes(mixed)
    assert all(np.isfinite(np.asarray(together[1])))
    for temperature in temperatures:
        own = np.asarray(mixed == temperature)
        alone = outcomes(jnp.full(64, temperature))
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(ours)[own], np.asarray(theirs)[own])


def test_temperatures_of_one_batch_keep_their_laws():
    logits = logits_of(700)
    temperatures = (0.5, 1.0, 2.0)
    given = keys(DRAWS)
    mixed = jnp.asarray(np.resize(np.array(temperatures, np.float32), DRAWS))
    of_rows = jax.jit(jax.vmap(module.draw, (None, 0, 0, 0)))
    parts = zip(*(jnp.split(x, 4) for x in (*given, mixed)), strict=True)
    tokens = np.concatenate([np.asarray(of_rows(logits, *part).token) for part in parts])
    for place, temperature in enumerate(temperatures):
        expected = expected_law(logits, Sampling(temperature))
        assert p_value(tokens[place::3], expected) > SIGNIFICANCE
        assert p_value(tokens[(place + 1) % 3 :: 3], expected) < SIGNIFICANCE


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_settings_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        Sampling(**options)


# Replay


@pytest.mark.parametrize("sampling", EXTREMES, ids=str)
def test_a_draw_is_a_function_of_sample_and_position(sampling):
    """Batch shape, order and the padding of the vocabulary change nothing."""
    logits = logits_of(700, (24,))
    (key, position) = keys(24)
    tokens = np.asarray(draw(logits, key, position, *law_of(sampling)).token)
    order = np.random.default_rng(0).permutation(24)
    np.testing.assert_array_equal(
        draw(logits[order], key[order], position[order], *law_of(sampling)).token, tokens[order]
    )
    assert int(draw(logits[5], key[5], position[5], *law_of(sampling)).token) == tokens[5]
    boxed = draw(
        logits.reshape(6, 4, 700), key.reshape(6, 4, 2), position.reshape(6, 4), *law_of(sampling)
    )
    np.testing.assert_array_equal(boxed.token, tokens.reshape(6, 4))
    padded = jnp.pad(logits, ((0, 0), (0, 500)), constant_values=-jnp.inf)
    np.testing.assert_array_equal(draw(padded, key, position, *law_of(sampling)).token, tokens)
    assert len(set(tokens)) > 10


def gumbel_by_hand(key, counter) -> np.ndarray:
    """Noise of (seed, sample) at counters [n, 2] of position and use, in float64."""
    words = np.asarray(threefry_2x32(jnp.asarray(key), jnp.asarray(counter, jnp.uint32).T.ravel()))
    upper = (words[: len(counter)].astype(float) + 0.5) / 2**32
    return -np.log(-np.log1p(-upper))


def test_the_noise_of_a_draw_is_that_of_its_place_its_block_and_its_token():
    """By jax's threefry in float64: any other noise would be another text of the same law."""
    logits = logits_of(700, (12,), scale=1.0)
    (key, position) = keys(12)
    drawn = np.asarray(draw(logits, key, position, 1.0).token)
    for row, token in enumerate(drawn):
        own = np.asarray(logits[row], float)
        sums = [np.log(np.exp(own[at : at + 256]).sum()) for at in (0, 256, 512)]
        at = int(position[row])
        block = np.argmax(sums + gumbel_by_hand(key[row], [(at, index) for index in range(3)]))
        inside = range(256 * block, min(256 * block + 256, 700))
        noise = gumbel_by_hand(key[row], [(at, (1 << 28) | index) for index in inside])
        assert token == inside[np.argmax(own[inside.start : inside.stop] + noise)]


def test_one_key_serves_all_the_nodes_of_a_row():
    logits = logits_of(700, (4, 5))
    (key, _) = keys(4)
    position = jnp.arange(20, dtype=jnp.int32).reshape(4, 5) % 3
    together = draw(logits, key[:, None], position, 1.0).token
    apart = [draw(logits[:, i], key, position[:, i], 1.0).token for i in range(5)]
    np.testing.assert_array_equal(together, np.stack([np.asarray(x) for x in apart], 1))


def test_a_sharded_vocabulary_changes_nothing():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    logits = logits_of(2048, (16,))
    (key, position) = keys(16)
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    for sampling in [Sampling(), Sampling(top_k=20)]:
        np.testing.assert_array_equal(
            draw(sharded, key, position, *law_of(sampling)).token,
            draw(logits, key, position, *law_of(sampling)).token,
        )


# Ranks


@pytest.mark.parametrize("sampling", [*EXTREMES, Sampling(0.0)], ids=str)
@pytest.mark.parametrize("vocabulary", [100, 3000])
def test_ranks_begin_with_the_draw_and_are_distinct(sampling, vocabulary):
    logits = logits_of(vocabulary, (256,))
    (key, position) = keys(256)
    ranks = np.asarray(rank(logits, key, position, *law_of(sampling), 6))
    np.testing.assert_array_equal(ranks[:, 0], draw(logits, key, position, *law_of(sampling)).token)
    allowed = np.isfinite(truncate(logits, *law_of(sampling))[0])
    for row, kept in zip(ranks, allowed, strict=True):
        real = row[row >= 0]
        assert len(set(real)) == len(real) == min(6, kept.sum()) and kept[real].all()
    np.testing.assert_array_equal(rank(logits, key, position, *law_of(sampling), 2), ranks[:, :2])


@pytest.mark.parametrize("truncation", [UNTRUNCATED, Truncation(2, 0.5)], ids=str)
def test_greedy_ranks_are_the_largest_logits(truncation):
    logits = logits_of(3000, (64,))
    ranks = rank(logits, *keys(64), 0.0, truncation, 6)
    np.testing.assert_array_equal(ranks, jax.lax.top_k(logits, 6)[1])


@pytest.mark.parametrize("offset", [0.0, 300.0, 5e3, -5e3])
def test_the_draw_is_the_first_rank_though_scores_are_rounded(offset):
    """Large logits leave few bits for the noise, so that runners-up come near the best."""
    logits = offset + logits_of(40, (4096,), scale=0.01)
    (key, position) = keys(4096)
    ranks = np.asarray(rank(logits, key, position, 1.0, UNTRUNCATED, 2))
    np.testing.assert_array_equal(ranks[:, 0], draw(logits, key, position, 1.0).token)


def test_ranks_end_where_tokens_do():
    logits = logits_of(300, (8,))
    (key, position) = keys(8)
    ranks = np.asarray(rank(logits, key, position, 1.0, Truncation(3), 5))
    assert (ranks[:, :3] >= 0).all() and (ranks[:, 3:] == -1).all()
    assert (np.asarray(rank(logits[:, :2], key, position, 0.0, UNTRUNCATED, 4))[:, 2:] == -1).all()


def without_replacement(first: np.ndarray) -> np.ndarray:
    """Joint law of two draws without replacement, flattened."""
    rest = first[None] / (1 - first[:, None])
    return (first[:, None] * rest * (1 - np.eye(first.size))).ravel()


def test_ranks_are_drawn_without_replacement():
    """Over 12 tokens that lie in three blocks, several a block."""
    places = np.array([0, 1, 2, 3, 255, 256, 257, 300, 511, 512, 600, 699])
    likely = logits_of(12, scale=1.0)
    logits = jnp.full(700, -jnp.inf).at[places].set(likely)
    ranks = np.searchsorted(
        places, sample(rank, logits, temperature=1.0, truncation=UNTRUNCATED, count=3)
    )
    first = expected_law(likely, Sampling())
    pairs = without_replacement(first)
    assert p_value(ranks[:, 0] * 12 + ranks[:, 1], pairs) > SIGNIFICANCE
    i, j, k = np.indices((12, 12, 12))
    triples = pairs.reshape(12, 12, 1) * first / np.maximum(1 - first[i] - first[j], 1e-9)
    triples = np.where((i == k) | (j == k), 0.0, triples)
    assert (
        p_value((ranks[:, 0] * 12 + ranks[:, 1]) * 12 + ranks[:, 2], triples.ravel()) > SIGNIFICANCE
    )


def raw_ranks(logits, key, position):
    """Runners-up on their raw scores, block scores and token scores mixed: the planted mistake."""
    best = jax.nn.logsumexp(module.blocks(logits), -1)
    best = best + module.block_noise(key, position, logits.shape[-1])
    chosen = jnp.arange(3, dtype=jnp.int32)
    scores = module.inside(logits, chosen) + module._token_noise(chosen, key, position, 1)
    mixed = scores - jnp.max(scores, -1, keepdims=True) + best[:, None]
    return jax.lax.top_k(mixed.reshape(-1), 2)[1]


def test_the_rank_test_sees_scores_that_are_not_truncated():
    places = np.array([0, 1, 2, 3, 255, 256, 257, 300, 511, 512, 600, 699])
    likely = logits_of(12, scale=1.0)
    ranks = np.searchsorted(
        places, sample(raw_ranks, jnp.full(700, -jnp.inf).at[places].set(likely))
    )
    pairs = without_replacement(expected_law(likely, Sampling()))
    assert p_value(ranks[:, 0], expected_law(likely, Sampling())) > SIGNIFICANCE
    assert p_value(ranks[:, 0] * 12 + ranks[:, 1], pairs) < SIGNIFICANCE


# Margins


@pytest.mark.parametrize("sampling", [*EXTREMES, Sampling(0.0)], ids=str)
def test_a_draw_stands_within_its_margin(sampling):
    """Logits moved by less than a quarter of the margin, or of a hundredth, give the same token."""
    logits = logits_of(700, (512,))
    (key, position) = keys(512)
    token = draw(logits, key, position, *law_of(sampling)).token
    margin = decision_margin(logits, key, position, sampling)
    assert (np.asarray(margin) >= 0).all() and float(jnp.median(margin)) > 0.05
    noise = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, logits.shape), jnp.float32)
    scale = 0.25 * jnp.minimum(margin, 0.01) * max(sampling.temperature, 0.5)
    moved = draw(logits + noise * scale[:, None], key, position, *law_of(sampling)).token
    np.testing.assert_array_equal(moved, token)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7, top_k=20), pytest.param(Sampling(top_p=0.9), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_small_change_only_moves_draws_of_small_margin(sampling):
    """Rounding of 1e-4 changes some of many draws; all of those are ties, and ties are rare."""
    logits = logits_of(700, (10_000,), scale=1.0)
    (key, position) = keys(10_000)
    noise = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, logits.shape), jnp.float32)
    before = draw(logits, key, position, *law_of(sampling)).token
    changed = np.asarray(
        before != draw(logits + 1e-4 * noise, key, position, *law_of(sampling)).token
    )
    margin = np.asarray(decision_margin(logits, key, position, sampling))
    assert changed.any() and (margin[changed] < 1e-3).all() and (margin < 1e-3).mean() < 0.01


def test_greedy_margin_is_the_gap_of_the_two_best():
    logits = jnp.asarray([[0.0, 3.0, 2.5], [1.0, 1.0, 0.0]])
    (key, position) = keys(2)
    np.testing.assert_allclose(decision_margin(logits, key, position, Sampling(0.0)), [0.5, 0.0])


def test_the_margin_of_a_single_kept_token_is_its_lead():
    """With one token kept, only another token in its place changes the draw."""
    logits = jnp.asarray([[3.0, 1.0, 0.0], [0.0, 1.0, 3.5]])
    (key, position) = keys(2)
    np.testing.assert_allclose(
        decision_margin(logits, key, position, Sampling(top_k=1)), [2.0, 2.5]
    )
    assert np.isfinite(decision_margin(logits, key, position, Sampling(top_p=0.1))).all()
