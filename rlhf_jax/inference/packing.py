"""Packing: samples are put into a few lines of tokens, each prompt once, on the host.

What a model computes of a token outside attention knows nothing of samples, so lines are filled
without padding between them; only attention takes its rows apart (`model.packed`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from rlhf_jax.mesh import rows_of_shard
from rlhf_jax.types import Array, PackedBatch, Rollout


@dataclasses.dataclass(frozen=True)
class Packed:
    """Hold a batch of host arrays, and where its predicted tokens come from."""

    batch: PackedBatch
    source: np.ndarray  # [S, W] int64, of a rollout's [B * T] tokens; 0 where masked out
    real_tokens: int  # of `batch.tokens`, without padding

    def take(self, array: Array | None) -> np.ndarray | None:
        """Return what an array [B, T, ...] says of the predicted tokens: [S, W, ...], 0 elsewhere.

        None stays None.
        """
        if array is None:
            return None
        flat = np.asarray(array)
        flat = flat.reshape(-1, *flat.shape[2:])
        mask = self.batch.mask.reshape(*self.source.shape, *(1,) * (flat.ndim - 1))
        return np.where(mask, flat[self.source], np.zeros((), flat.dtype))


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Hold what is read of one sample: all tokens before the last one that is predicted."""

    row: int
    prompt: int  # samples of the same prompt have the same number
    prompt_tokens: int
    tokens: int  # prompt included
    predicted: np.ndarray  # where the predicted tokens are, [n] int


def pack(
    rollout: Rollout, mask: Array, rows: int, length_bucket: int, row_shards: int
) -> list[Packed]:
    """Pack the samples of which tokens are predicted, those under the mask [B, T] bool.

    A shard has at most the slots that its share of `rows` samples of the longest length has
    (`rows_of_shard`). Samples of like length go together, as attention pads them to the longest.
    Then they are dealt to row shards by prompt or by length, whichever leaves the fullest with
    fewer tokens. Arrays are of the host.
    """
    budget = rows_of_shard(rows, row_shards) * rollout.tokens.shape[1]
    samples = sorted(_samples(rollout, np.asarray(mask)), key=lambda one: -one.tokens)
    packed = []
    while samples:
        longest = min(bucket(samples[0].tokens, length_bucket, 3), rollout.tokens.shape[1])
        most = budget // longest
        shares = _deal(samples[: most * row_shards], row_shards, most)
        of_shard = min(most, bucket(max(map(len, shares)), 1, 2))
        packed.append(_lay_out(rollout, shares, (of_shard, longest), length_bucket))
        samples = samples[most * row_shards :]
    return packed


def unpack(found: Sequence[tuple[Packed, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    """Return numbers [S, W] of batches as an array [B, T] float32, 0 where nothing was said."""
    array = np.zeros(shape, np.float32)
    for packed, numbers in found:
        mask = packed.batch.mask
        array.put(packed.source[mask], numbers[mask])
    return array


def padding_share(packed: Sequence[Packed]) -> float:
    """Return the share of the tokens of batches that are padding."""
    computed = sum(one.batch.tokens.size for one in packed)
    return 1.0 - sum(one.real_tokens for one in packed) / computed if computed else 0.0


def bucket(count: int, unit: int, bits: int) -> int:
    """Return the next multiple of `unit` whose number of units has at most `bits` binary digits.

    So sizes are few, and at most 1 / 2^(bits - 1) of one is padding, where it is above
    2^bits units.
    """
    units = max(1, -(-count // unit))
    step = 1 << max(0, (units - 1).bit_length() - bits)
    return -(-units // step) * step * unit


def _samples(rollout: Rollout, mask: np.ndarray) -> list[_Sample]:
    """Return the samples of which something is predicted."""
    numbers: dict[bytes, int] = {}
    found = []
    for row in np.flatnonzero(mask.any(axis=1)):
        predicted = np.flatnonzero(mask[row])
        prompt_tokens = int(rollout.mask[row].argmax())
        prompt = rollout.tokens[row, :prompt_tokens].tobytes()
        number = numbers.setdefault(prompt, len(numbers))
        found.append(_Sample(int(row), number, prompt_tokens, int(predicted[-1]), predicted))
    return found


def _deal(samples: list[_Sample], row_shards: int, most: int) -> list[list[_Sample]]:
    """Give each row shard its samples, at most so many."""
    # There and back, so that who gets the longest sample gets the shortest.
    turn = [*range(row_shards), *reversed(range(row_shards))]
    by_length: list[list[_Sample]] = [[] for _ in range(row_shards)]
    for index, sample in enumerate(samples):
        by_length[turn[index % len(turn)]].append(sample)

    by_prompt = sorted(samples, key=lambda one: (one.prompt, one.row))
    cut = functools.partial(_runs, by_prompt, most=most)
    fullest = max(map(_tokens, by_length))
    enough = bisect.bisect_left(
        range(fullest + 1),
        True,
        lo=-(-_tokens(samples) // row_shards),  # as even as can be
        key=lambda capacity: len(cut(capacity)) <= row_shards,
    )
    if enough > fullest:
        return by_length
    runs = cut(enough)
    return runs + [[] for _ in range(row_shards - len(runs))]


def _runs(samples: list[_Sample], capacity: int, most: int) -> list[list[_Sample]]:
    """Cut samples in order into runs of at most `most`, each of at most `capacity` tokens.

    A sample that has more by itself is a run of its own.
    """
    runs: list[list[_Sample]] = []
    used = 0
    for sample in samples:
        known = bool(runs) and runs[-1][-1].prompt == sample.prompt
        used += sample.tokens - known * sample.prompt_tokens
        if not runs or used > capacity or len(runs[-1]) == most:
            runs.append([])
            used = sample.tokens
        runs[-1].append(sample)
    return runs


def _tokens(samples: list[_Sample]) -> int:
    """Count the tokens of samples, each prompt once."""
    prompts = {one.prompt: one.prompt_tokens for one in samples}
    return sum(prompts.values()) + sum(one.tokens - one.prompt_tokens for one in samples)


def _lay_out(
    rollout: Rollout, shares: list[list[_Sample]], rows: tuple[int, int], length_bucket: int
) -> Packed:
    """Lay out each shard's line: `rows` are its samples and their longest length."""
    slots = rows[0] * rows[1]
    line = min(slots, bucket(max(map(_tokens, shares)), length_bucket, 4))
    wanted = max(sum(len(one.predicted) for one in share) for share in shares)
    count = min(slots, bucket(wanted, length_bucket, 4))
    shape = (len(shares), line)
    batch = PackedBatch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        samples=np.zeros((len(shares), *rows), np.int32),
        home=np.zeros(shape, np.int32),
        before=np.zeros((len(shares), count), np.int32),
        targets=np.zeros((len(shares), count), np.int32),
        mask=np.zeros((len(shares), count), bool),
        owner=np.zeros((len(shares), count), np.int32),
    )
    source = np.zeros((len(shares), count), np.int64)
    for shard, share in enumerate(shares):
        _fill_line(rollout, share, batch, source, shard)
    return Packed(batch, source, sum(map(_tokens, shares)))


def _fill_line(
    rollout: Rollout, share: list[_Sample], batch: PackedBatch, source: np.ndarray, shard: int
) -> None:
    """Write one shard's samples into the arrays of its batch."""
    slots = rollout.tokens.shape[1]
    longest = batch.samples.shape[2]
    prompts: dict[int, int] = {}  # where in the line each begins
    used = 0
    wanted = 0
    for place, one in enumerate(share):
        # The prompt is laid out with the first of its samples.
        fresh = 0 if one.prompt not in prompts else one.prompt_tokens
        start = prompts.setdefault(one.prompt, used)
        position = np.arange(one.tokens)
        where = position + np.where(position < one.prompt_tokens, start, used - fresh)
        new = slice(used, used + one.tokens - fresh)
        batch.tokens[shard, new] = rollout.tokens[one.row, fresh : one.tokens]
        batch.positions[shard, new] = position[fresh:]
        batch.home[shard, new] = place * longest + position[fresh:]
        batch.samples[shard, place, : one.tokens] = where

        told = slice(wanted, wanted + len(one.predicted))
        batch.before[shard, told] = where[one.predicted - 1]
        batch.targets[shard, told] = rollout.tokens[one.row, one.predicted]
        batch.mask[shard, told] = True
        batch.owner[shard, told] = place
        source[shard, told] = one.row * slots + one.predicted
        used = new.stop
        wanted = told.stop
