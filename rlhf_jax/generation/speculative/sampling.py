"""Draw tokens reproducibly: from logits, seed, sample and position alone.

The next token is drawn in two levels. Level a chooses a block of 256 consecutive token ids by
log-sum-exp + Gumbel noise, level b a token inside it by logit + Gumbel noise. That is exact,
because the maximum of Gumbel-perturbed logits of a block is a Gumbel around the block's
log-sum-exp, independent of its position in the block, and it costs one pass of exp and a few
hundred hashes per row instead of one hash per token. The noise is threefry, implemented here, so
that no JAX flag or version changes a text. Drafter and target draw with the same noise, so that
speculative text is the plain text (Daliri et al. 2025, "Coupling without communication and
drafter-invariant speculative decoding").

Leading axes `...` are free and broadcast: `[B]` for one token per row, `[B, N+1]` over a tree. A
temperature `[...]` float32, or one number, is data: rows of several temperatures are drawn by one
program. If it is 0, the token is the argmax.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.shapes import BLOCK
from pallas_kernels.verify_head.reference import Parts, blocks, inside, parts_of, tempered
from rlhf_jax.mesh import ONE_DEVICE, ROW_AXES, Layout, on_each
from rlhf_jax.types import Array

# The rotations, in bits, of threefry's rounds: four rounds of the one, then four of the other.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Define which tokens of a tempered distribution may be drawn; static under jit.

    `top_k` 0 and `top_p` 1 keep every token. Raises ValueError for a negative top_k, or a top_p
    outside (0, 1].
    """

    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give 0 (off) or a positive number of tokens.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; give a number above 0 and at most 1 (off).")


UNTRUNCATED = Truncation()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Describe the distribution that tokens are drawn from.

    `temperature` is that of requests without one of their own; 0 is the argmax. `top_k` 0 and
    `top_p` 1 keep every token. Raises ValueError for a negative or infinite temperature, a negative
    top_k, or a top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        Truncation(self.top_k, self.top_p)

    @property
    def truncation(self) -> Truncation:
        """Return the part that is static under jit: all but the temperature."""
        return Truncation(self.top_k, self.top_p)


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that is negative, infinite or NaN."""
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; give 0 (greedy) or a positive number.")


class Draw(NamedTuple):
    """Hold one drawn token, its log-probability, and the tokens that it was drawn among."""

    token: Array  # [...] int32
    logprob: Array  # [...] float32, under the truncated, renormalised distribution
    top_k_ids: Array | None  # [..., top_k] int32, the kept tokens (-1: absent); None without top-k


# Noise


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Encrypt two uint32 words by Threefry-2x32 of 20 rounds; words broadcast.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x = counter[0] + words[0]
    y = counter[1] + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def noise_bits(key: Array, position: Array, level: int, index: Array) -> Array:
    """Return 32 random bits of (seed, sample, position, level, index), uint32; arguments broadcast.

    `key[..., 2]` uint32 is (seed, sample id); `level` is below 16 and keeps the uses of noise
    apart, `index` (a block, token or node) is below 2**28.
    """
    counter = jnp.uint32(level << 28) | index.astype(jnp.uint32)
    return threefry((key[..., 0], key[..., 1]), (position.astype(jnp.uint32), counter))[0]


def gumbel(bits: Array) -> jax.Array:
    """Turn uint32 bits into standard Gumbel noise, float32.

    All 32 bits count in the upper tail, where the winners of draws are.
    """
    upper = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-upper))


def uniform(bits: Array) -> jax.Array:
    """Turn uint32 bits into uniform float32 noise strictly inside (0, 1)."""
    return (bits >> jnp.uint32(9)).astype(jnp.float32) * 2.0**-23 + 2.0**-24


def block_noise(key: Array, position: Array, vocab: int, level: int = 0) -> jax.Array:
    """Return the Gumbel noise of every block, `[..., ceil(vocab / 256)]` float32.

    It is an input of `parts_of` and the `verify_head` kernels. key `[..., 2]`, position `[...]`.
    """
    chex.assert_rank(key, position.ndim + 1)
    index = jnp.arange(-(-vocab // BLOCK), dtype=jnp.uint32)
    return gumbel(noise_bits(key[..., None, :], position[..., None], level, index))


def _token_noise(chosen: Array, key: Array, position: Array, level: int) -> jax.Array:
    """Return the Gumbel noise `[..., c, 256]` of the tokens of the blocks `chosen[..., c]`."""
    ids = chosen[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    return gumbel(noise_bits(key[..., None, None, :], position[..., None, None], level, ids))


# Distributions


def truncate(
    logits: jax.Array, temperature: Array | float, truncation: Truncation
) -> tuple[jax.Array, jax.Array | None]:
    """Return tempered logits `[..., V]` float32 with -inf outside top-k and top-p.

    These are the logits that a draw perturbs. Top-k keeps exactly k tokens (of equal ones the lower
    ids); top-p then keeps, of the tempered distribution on those, the smallest set {z >= t} whose
    mass is at least `top_p` (equal tokens stay together). The likeliest token is always kept, and
    at temperature 0 every token. Also returns the ids `[..., k]` int32 that top-k keeps, likeliest
    first; None without top-k.
    """
    whole = z = candidates = tempered(logits, temperature)
    ids = None
    if truncation.top_k:
        candidates, ids = lax.top_k(z, min(truncation.top_k, z.shape[-1]))
        # A minimum, not the last entry: a slice of top_k makes XLA sort the vocabulary on a CPU.
        edge = jnp.min(candidates, -1, keepdims=True)
        last_tie = jnp.max(jnp.where(candidates == edge, ids, -1), -1, keepdims=True)
        tokens = jnp.arange(z.shape[-1], dtype=ids.dtype)
        z = jnp.where((z > edge) | ((z == edge) & (tokens <= last_tie)), z, -jnp.inf)
    if truncation.top_p < 1:
        z = jnp.where(z >= _nucleus_edge(candidates, truncation.top_p)[..., None], z, -jnp.inf)
    return jnp.where(_is_greedy(temperature), whole, z), ids


def log_probabilities(
    logits: jax.Array, temperature: Array | float, truncation: Truncation = UNTRUNCATED
) -> jax.Array:
    """Return the log-probabilities `[..., V]` float32 that tokens are drawn with (-inf: never).

    They are those of the truncated, renormalised distribution, at temperature 0 the point mass of
    the argmax.
    """
    z = truncate(logits, temperature, truncation)[0]
    tokens = jnp.arange(z.shape[-1], dtype=jnp.int32)
    # By two reductions, because an argmax over the whole vocabulary is ten times slower.
    best = z == jnp.max(z, -1, keepdims=True)
    first = jnp.min(jnp.where(best, tokens, z.shape[-1]), -1, keepdims=True)
    drawn = ~_is_greedy(temperature) | (tokens == first)
    return jax.nn.log_softmax(jnp.where(drawn, z, -jnp.inf))


def _is_greedy(temperature: Array | float) -> jax.Array:
    """Return where a temperature `[...]` is 0: `[..., 1]` bool."""
    return jnp.asarray(temperature)[..., None] == 0


def _nucleus_edge(z: Array, top_p: float) -> jax.Array:
    """Find the largest t `[...]` with mass(z >= t) >= top_p, by 30 bisections instead of a sort.

    The bits of non-negative floats are ordered like the floats, so halving the bits ends exactly.
    """
    weights = jnp.exp(z - jnp.max(z, -1, keepdims=True))
    enough = top_p * jnp.sum(weights, -1)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        edge = lax.bitcast_convert_type(middle, jnp.float32)[..., None]
        feasible = jnp.sum(jnp.where(weights >= edge, weights, 0.0), -1) >= enough
        return jnp.where(feasible, middle, low), jnp.where(feasible, high, middle - 1)

    one = lax.bitcast_convert_type(jnp.ones_like(enough), jnp.int32)
    low, _ = lax.fori_loop(0, 30, halve, (jnp.zeros_like(one), one))
    edge = lax.bitcast_convert_type(low, jnp.float32)[..., None]
    return jnp.min(jnp.where(weights >= edge, z, jnp.inf), -1)


# Draws


def draw(
    logits: jax.Array,
    key: Array,
    position: Array,
    temperature: Array | float,
    truncation: Truncation = UNTRUNCATED,
    levels: tuple[int, int] = (0, 1),
) -> Draw:
    """Draw one token per place: logits `[..., V]`, key `[..., 2]` uint32, position `[...]` int32.

    `position` is the drawn token's place in the sample; `levels` are the noise levels of block and
    token and must differ. At temperature 0 the token is the argmax, with log-probability 0, and the
    only one of its top-k ids.
    """
    _assert_ranks(logits, key, position)
    z, ids = truncate(logits, temperature, truncation)
    parts = parts_of(z, block_noise(key, position, z.shape[-1], levels[0]), temperature)
    drawn = draw_inside(parts, key, position, temperature, levels[1])
    if ids is None:
        return drawn
    among = jnp.take_along_axis(z, ids, -1) > -jnp.inf
    among &= ~_is_greedy(temperature) | (jnp.arange(ids.shape[-1]) == 0)
    return drawn._replace(top_k_ids=_fill(jnp.where(among, ids, -1), truncation.top_k))


def draw_inside(
    parts: Parts, key: Array, position: Array, temperature: Array | float, level: int = 1
) -> Draw:
    """Draw a token inside the block that `parts` chose: the second half of `draw`.

    It needs no logits, so a kernel need not write them. Only whether the temperature is 0 matters.
    Top-k ids are not returned: truncation needs the logits.
    """
    _assert_ranks(parts.inside, key, position)
    greedy = _is_greedy(temperature)
    chosen = parts.block[..., None]
    noise = _token_noise(chosen, key, position, level)[..., 0, :]
    scores = parts.inside + jnp.where(greedy, 0.0, noise)
    place = jnp.argmax(scores, -1)[..., None].astype(jnp.int32)
    logprob = jnp.take_along_axis(parts.inside, place, -1)[..., 0] - parts.normaliser
    logprob = jnp.where(greedy[..., 0], 0.0, logprob)
    return Draw((chosen * BLOCK + place).squeeze(-1), logprob, None)


def rank(
    logits: jax.Array,
    key: Array,
    position: Array,
    temperature: Array | float,
    truncation: Truncation,
    count: int,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the `count` best tokens `[..., count]` int32 of one draw, best first; -1: none left.

    Rank 0 is `draw`'s token; together they are draws without replacement, which makes them siblings
    of a draft tree. Block scores S are given; a token's raw score z in a block whose best is Z
    becomes -log(exp(-S) - exp(-Z) + exp(-z)), a Gumbel truncated at S (Kool et al. 2019,
    "Stochastic beams and where to find them", section 4.3 and appendix B.3). At temperature 0: the
    largest logits. logits, key and position as for `draw`; axis 0 is rows of the layout.
    """
    _assert_ranks(logits, key, position)
    z = truncate(logits, temperature, truncation)[0]
    greedy = _is_greedy(temperature)
    noisy = jax.nn.logsumexp(blocks(z), -1) + block_noise(key, position, z.shape[-1])
    block_scores = jnp.where(greedy, jnp.max(blocks(z), -1), noisy)
    best, chosen = lax.top_k(block_scores, min(count, block_scores.shape[-1]))

    greedy = greedy[..., None]
    noise = _token_noise(chosen, key, position, 1)
    raw = inside(z, chosen) + jnp.where(greedy, 0.0, noise)
    first = jnp.max(raw, -1, keepdims=True)
    winner = jnp.arange(BLOCK) == jnp.argmax(raw, -1, keepdims=True)
    top = best[..., None]
    shift = top - raw + jnp.log(-jnp.expm1(-jnp.maximum(first - raw, 1e-7)))
    truncated = top - jnp.maximum(shift, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(shift)))
    # Rounding must not let a runner-up tie with its block's winner: rank 0 is the draw.
    truncated = jnp.where(winner, top, jnp.minimum(truncated, jnp.nextafter(top, -jnp.inf)))
    scores = jnp.where(greedy | (raw == -jnp.inf), raw, truncated)
    tokens = chosen[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    scores, tokens = (x.reshape(*x.shape[:-2], -1) for x in (scores, tokens))
    top_k = functools.partial(lax.top_k, k=min(count, scores.shape[-1]))
    if layout.mesh is not None and layout.mesh.size > 1:
        # By itself XLA would gather all rows on each device.
        rows = layout.fit((ROW_AXES,), scores.shape[:1])
        top_k = on_each(top_k, layout, rows, rows)
    scores, places = top_k(scores)
    ranked = jnp.take_along_axis(tokens, places, -1)
    return _fill(jnp.where(scores > -jnp.inf, ranked, -1), count)


def _assert_ranks(logits: jax.Array, key: Array, position: Array) -> None:
    """Raise AssertionError unless logits and key have one axis more than position."""
    chex.assert_rank([logits, key, position], [position.ndim + 1, position.ndim + 1, position.ndim])
    chex.assert_axis_dimension(key, -1, 2)


def _fill(tokens: Array, count: int) -> jax.Array:
    """Fill tokens `[..., c]` up with -1 to `[..., count]`."""
    missing = [(0, 0)] * (tokens.ndim - 1) + [(0, count - tokens.shape[-1])]
    return jnp.pad(tokens, missing, constant_values=-1)
