"""`verify_head`: every implementation against float64, the draws of its parts, its shards, what it
compiles to.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import SIGNIFICANCE, expected_law, p_value
from compilers import needs_libtpu, one
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from kernel_cases import by_name, each_by_type, few, on_gpu, reduced
from margins import decision_margin
from scipy.special import logsumexp

from benchmarks.shapes import SHAPES
from pallas_kernels.shapes import BLOCK, Shape
from pallas_kernels.verify_head import gpu, reference, tpu
from rlhf_jax.generation.speculative.sampling import Sampling, block_noise, draw, draw_inside

IMPLEMENTATIONS = {
    "reference": jax.jit(reference.verify_head, static_argnames="tied"),
    "tpu": functools.partial(tpu.verify_head, interpret=True),
    "gpu": on_gpu(gpu.verify_head),
}
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}

of_any_size = pytest.mark.parametrize(
    "verify", [IMPLEMENTATIONS[name] for name in ("reference", "tpu")], ids=["reference", "tpu"]
)
every = pytest.mark.parametrize("verify, dtype", each_by_type(IMPLEMENTATIONS))


def inputs(rows: int, width: int, vocab: int, *, tied=False, dtype=jnp.float32, seed: int = 0):
    """hidden [R, M], head and block noise: logits of standard deviation 2."""
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(rows, width))
    head = random.normal(size=(width, vocab)) * 2 / np.sqrt(width)
    noise = jnp.asarray(random.gumbel(size=(rows, -(-vocab // BLOCK))), jnp.float32)
    return jnp.asarray(hidden, dtype), jnp.asarray(head.T if tied else head, dtype), noise


def mixed(rows: int) -> jax.Array:
    """Temperatures [R], greedy rows among them."""
    return jnp.asarray(np.resize(np.array([0.7, 0.0, 1.0, 1.3], np.float32), rows))


def exact_logits(hidden, head, temperature: np.ndarray, tied: bool) -> np.ndarray:
    """Tempered logits [R, blocks, 256] in float64, -inf past V."""
    hidden = np.asarray(hidden, np.float64)
    head = np.asarray(head, np.float64)
    with np.errstate(invalid="ignore"):
        z = hidden @ (head.T if tied else head) / np.where(temperature, temperature, 1)[:, None]
    z = np.pad(z, ((0, 0), (0, -z.shape[1] % BLOCK)), constant_values=-np.inf)
    return z.reshape(len(z), -1, BLOCK)


def assert_parts(parts, hidden, head, noise, temperature, *, tied: bool) -> None:
    """Parts are those of float64 to within the tolerance, the block one that is best to within the
    tolerance.
    """
    temperature = np.asarray(temperature, np.float64)
    z = exact_logits(hidden, head, temperature, tied)
    noisy = np.asarray(noise, np.float64) + np.asarray(logsumexp(z, -1))
    scores = np.where(temperature[:, None] == 0, z.max(-1), noisy)
    bound = TOLERANCE[hidden.dtype.type] * np.abs(np.where(np.isfinite(z), z, 0)).max((1, 2))
    rows = np.arange(len(z))
    block = np.asarray(parts.block)
    assert (np.abs(parts.normaliser - logsumexp(z, (1, 2))) <= bound).all()
    assert (np.abs(parts.score - scores.max(-1)) <= bound).all()
    assert (scores.max(-1) - scores[rows, block] <= bound).all()
    chosen = z[rows, block]
    inside = np.asarray(parts.inside)
    np.testing.assert_array_equal(np.isfinite(inside), np.isfinite(chosen))
    error = np.abs(
        np.where(np.isfinite(chosen), inside, 0) - np.where(np.isfinite(chosen), chosen, 0)
    )
    assert (error.max(-1) <= bound).all()


# Parts


@every
@pytest.mark.parametrize("name", by_name())
def test_parts_are_those_of_float64(name, dtype, verify):
    shape = reduced(SHAPES[name])
    given = *inputs(18, shape.width, shape.vocab, tied=shape.tied, dtype=dtype), mixed(18)
    assert_parts(verify(*given, tied=shape.tied), *given, tied=shape.tied)


@of_any_size
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "tied"),
    [(1, 32, 100, False), (3, 32, 257, True), (17, 8, 70_000, False), (1030, 8, 600, True)],
    ids=["less than a block", "one token more", "more than 128 blocks a span", "several row tiles"],
)
def test_sizes_need_not_fit_tiles(rows, width, vocab, tied, verify):
    given = *inputs(rows, width, vocab, tied=tied), mixed(rows)
    assert_parts(verify(*given, tied=tied), *given, tied=tied)


def test_the_kernel_by_tpu_semantics():
    """In the interpreter of TPUs memory that nobody wrote is NaN: beside ragged tiles, in buffers
    before their use.
    """
    given = *inputs(21, 128, 4700, tied=True), mixed(21)
    parts = tpu.verify_head(*given, tied=True, interpret=pltpu.InterpretParams())
    assert_parts(parts, *given, tied=True)


@every
def test_a_temperature_of_each_node_is_that_of_a_call_of_its_own(verify, dtype):
    """Bit for bit, and several are one program."""
    given = inputs(8, 64, 1472, dtype=dtype)
    together = verify(*given, mixed(8), tied=False)
    for temperature in set(mixed(8).tolist()):
        own = np.asarray(mixed(8) == temperature)
        alone = verify(*given, jnp.full(8, temperature), tied=False)
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(ours)[own], np.asarray(theirs)[own])


@every
def test_tokens_that_cannot_be_drawn(verify, dtype):
    """Logits may be -inf: some of a block, a whole block, or all but one token."""
    hidden, head, noise = inputs(8, 64, 1472, dtype=dtype)
    hidden = hidden.at[:, 0].set(1.0)
    banned = np.zeros(1472, bool)
    banned[[*range(256), *range(300, 400), 1471]] = True
    for absent in (banned, np.arange(1472) != 700):
        words = jnp.where(absent & (jnp.arange(64)[:, None] == 0), -jnp.inf, head)
        given = hidden, words, noise, mixed(8)
        parts = verify(*given, tied=False)
        assert_parts(parts, *given, tied=False)
    assert (np.asarray(parts.block) == 700 // BLOCK).all()
    np.testing.assert_allclose(
        parts.normaliser, np.asarray(parts.inside)[:, 700 % BLOCK], rtol=1e-6
    )


@every
def test_tokens_behind_the_vocabulary_do_not_count(verify, dtype):
    """A head filled up to whole blocks gives what the head without them gives; of no tokens nothing
    is drawn.
    """
    hidden, head, noise = inputs(6, 64, 704, dtype=dtype)
    filled = jnp.pad(head, ((0, 0), (0, 4 * BLOCK - 704)), constant_values=9.0)
    longer = jnp.pad(noise, ((0, 0), (0, 1)))
    alone = verify(hidden, head, noise, mixed(6), tied=False)
    parts = verify(hidden, filled, longer, mixed(6), jnp.int32(704), tied=False)
    for ours, theirs in zip(parts, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    none = verify(hidden, filled, longer, mixed(6), jnp.int32(0), tied=False)
    assert (np.asarray(none.normaliser) == -np.inf).all() and (
        np.asarray(none.inside) == -np.inf
    ).all()


@every
def test_of_equal_scores_the_first_block_wins(verify, dtype):
    """Small whole numbers, so that equal columns are equal logits; the copies lie in tiles and
    spans of their own.
    """
    random = np.random.default_rng(0)
    block = random.integers(-3, 4, (64, BLOCK))
    head = jnp.asarray(np.concatenate([np.zeros((64, BLOCK)), *[block] * 19], 1), dtype)
    hidden = jnp.asarray(random.integers(1, 4, (5, 64)), dtype)
    temperature = jnp.asarray([0.0, 1.0, 0.0, 1.0, 1.0])
    parts = verify(hidden, head, jnp.zeros((5, 20)), temperature, tied=False)
    np.testing.assert_array_equal(parts.block, np.ones(5))


@every
def test_noise_and_temperature_are_of_every_node(verify, dtype):
    hidden, head, noise = inputs(2, 64, 320, dtype=dtype)
    for wrong in ((noise[:, :1], jnp.ones(2)), (noise, jnp.ones(1)), (noise, jnp.ones((2, 1)))):
        with pytest.raises(AssertionError):
            verify(hidden, head, *wrong, tied=False)


# Draws


@functools.partial(jax.jit, static_argnames="verify")
def drawn(hidden, head, key, position, temperature, *, verify):
    """The draw without logits."""
    noise = block_noise(key, position, head.shape[1])
    parts = verify(hidden, head, noise, temperature, tied=False)
    return draw_inside(parts, key, position, temperature)


@functools.partial(jax.jit, static_argnames="sampling")
def drawn_from_logits(hidden, head, key, position, *, sampling: Sampling):
    """The draw of logits, and how far it is from another."""
    logits = jnp.dot(hidden, head, precision=jax.lax.Precision.HIGHEST)
    drawn = draw(logits, key, position, sampling.temperature)
    return drawn, decision_margin(logits, key, position, sampling)


def keys(seed: int, count: int) -> tuple[jax.Array, jax.Array]:
    """`count` pairs of (seed, sample) and position, nine positions a sample."""
    index = np.arange(count)
    key = np.stack([np.full(count, seed), index // 9], -1)
    return jnp.asarray(key, jnp.uint32), jnp.asarray(index % 9, jnp.int32)


@pytest.mark.parametrize(
    ("sampling", "seeds"),
    [
        (Sampling(0.8), 4),
        (Sampling(0.0), 1),
        pytest.param(Sampling(0.8), 100, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_draws_are_those_of_the_logits(sampling, seeds):
    """1,000 nodes; a draw may differ only where two outcomes are closer than rounding, which is
    rare.
    """
    hidden, head, _ = inputs(1000, 64, 4700)
    verify = IMPLEMENTATIONS["tpu"]
    temperature = jnp.full(1000, sampling.temperature)
    ties = 0
    for seed in range(seeds):
        key, position = keys(seed, 1000)
        ours = drawn(hidden, head, key, position, temperature, verify=verify)
        theirs, margin = drawn_from_logits(hidden, head, key, position, sampling=sampling)
        differs = np.asarray(ours.token != theirs.token)
        assert (np.asarray(margin)[differs] < 1e-4).all()
        np.testing.assert_allclose(ours.logprob[~differs], theirs.logprob[~differs], atol=1e-5)
        ties += int(differs.sum())
    print(f"{ties} of {seeds * 1000} draws are ties that fell otherwise")
    assert ties <= seeds


def test_draws_follow_the_law():
    """100,000 draws of one law, rare tokens pooled by about five expected, one token forbidden."""
    logits = np.random.default_rng(0).normal(size=700) * 2
    logits[123] = -np.inf
    head = jnp.asarray(np.stack([logits, *np.zeros((7, 700))]), jnp.float32)
    hidden = jnp.zeros((10_000, 8)).at[:, 0].set(1.0)
    outcomes = []
    temperature = jnp.full(10_000, 0.7)
    for seed in range(10):
        given = hidden, head, *keys(seed, 10_000), temperature
        outcomes.append(drawn(*given, verify=IMPLEMENTATIONS["tpu"]).token)
    tokens = np.concatenate(outcomes)
    assert p_value(tokens, expected_law(logits, Sampling(0.7))) > SIGNIFICANCE
    assert p_value(tokens, expected_law(logits, Sampling(0.75))) < SIGNIFICANCE


# Shards


@of_any_size
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_a_sharded_vocabulary_changes_nothing(shards, verify):
    """Parts of shards, combined, are those of the whole; one shard has nothing that can be
    drawn.
    """
    hidden, head, noise = inputs(12, 16, 16 * BLOCK)
    head = head.at[:, : 2 * BLOCK].set(-jnp.inf)
    given = jnp.abs(hidden), head, noise, mixed(12)

    def local(hidden, head, noise, temperature):
        parts = verify(hidden, head, noise, temperature, tied=False)
        offset = jax.lax.axis_index("tensor") * (head.shape[1] // BLOCK)
        return reference.combine(parts, "tensor", offset)

    split = PartitionSpec(None, "tensor")
    whole = PartitionSpec()
    mesh = Mesh(np.array(jax.devices()[:shards]), ("tensor",))
    combined = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(whole, split, split, whole),
            out_specs=whole,
            check_vma=False,
        )
    )
    parts = combined(*given)
    assert len(set(np.asarray(parts.block).tolist())) > 2
    assert_parts(parts, *given, tied=False)
    together = IMPLEMENTATIONS["reference"](*given, tied=False)
    np.testing.assert_array_equal(parts.block, together.block)


def test_combining_takes_the_first_of_equal_shards():
    whole = PartitionSpec()
    split = PartitionSpec("tensor")
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))

    def local(block, inside):
        parts = reference.Parts(jnp.zeros(1), jnp.ones(1), block, inside)
        return reference.combine(parts, "tensor", 10 * jax.lax.axis_index("tensor"))

    combined = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, split), out_specs=whole, check_vma=False)
    )
    inside = jnp.arange(4 * BLOCK, dtype=jnp.float32).reshape(4, BLOCK)
    parts = combined(jnp.asarray([7, 1, 2, 3], jnp.int32), inside)
    assert parts.block.tolist() == [7]
    np.testing.assert_array_equal(parts.inside, inside[:1])
    np.testing.assert_allclose(parts.normaliser, np.log(4), rtol=1e-6)


# What it compiles to

OTHER_CASES = (
    ("v5p", 1, jnp.bfloat16),
    ("v5p", 64 * 33, jnp.bfloat16),
    ("v5p", 32 * 9, jnp.float32),
    ("v5e", 64 * 9, jnp.bfloat16),
    ("v6e", 64 * 9, jnp.bfloat16),
)


def memory_of(step, chip: str, rows: int, shape: Shape, dtype) -> int:
    """Temporary bytes of step(hidden, head, key [R, 2], position [R], temperature [R]) on one chip,
    as the compiler plans them.
    """
    head = (shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab)
    kinds = (
        ((rows, shape.width), dtype),
        (head, dtype),
        ((rows, 2), jnp.uint32),
        ((rows,), jnp.int32),
        ((rows,), jnp.float32),
    )
    given = [jax.ShapeDtypeStruct(*kind, sharding=one(chip)) for kind in kinds]
    memory = jax.jit(step).lower(*given).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def step_of(verify, shape: Shape):
    """From hidden states to a draw, without logits."""

    def step(hidden, head, key, position, temperature):
        noise = block_noise(key, position, shape.vocab)
        parts = verify(hidden, head, noise, temperature, tied=shape.tied)
        return draw_inside(parts, key, position, temperature)

    return step


def step_with_logits(hidden, head, key, position, temperature):
    logits = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
    return draw(logits, key, position, temperature)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chip", "rows", "dtype"),
    [
        *((name, "v5p", 64 * 9, jnp.bfloat16) for name in SHAPES),
        *few([(name, *case) for name in SHAPES for case in OTHER_CASES], 0),
    ],
)
def test_it_compiles_for_tpus(name, chip, rows, dtype, uncached):
    """And needs little more than its parts: noise and log-sum-exps of blocks, and a block of logits
    a span.
    """
    shape = SHAPES[name]
    memory = memory_of(step_of(tpu.verify_head, shape), chip, rows, shape, dtype)
    print(f"{name} {chip} {rows} rows {dtype.__name__}: {memory / 1e6:.2f} MB")
    blocks = -(-shape.vocab // BLOCK)
    assert memory < 4 * rows * (4 * blocks + 6 * BLOCK) + 4e6


@pytest.mark.slow
@needs_libtpu
def test_the_logits_are_gone(uncached):
    """128k tokens, 64 rows of 9 nodes: the memory of the step falls by the logits at least."""
    shape = SHAPES["llama3_8b"]
    rows = 64 * 9
    before = memory_of(step_with_logits, "v5p", rows, shape, jnp.bfloat16)
    after = memory_of(step_of(tpu.verify_head, shape), "v5p", rows, shape, jnp.bfloat16)
    logits = 4 * rows * shape.vocab
    print(
        f"temporary memory {before / 1e6:.1f} MB with logits ({logits / 1e6:.1f} MB),"
        f" {after / 1e6:.1f} MB without"
    )
    assert before - after >= logits - 4e6
