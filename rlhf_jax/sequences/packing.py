"""Packing: sequences are put into a few lines of tokens, each prompt once, on the host.

What a model computes of a token outside attention knows nothing of sequences, so lines are filled
without padding between them; only attention takes its rows apart (`model.packed`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from rlhf_jax.mesh import rows_of_shard
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Packed:
    """Hold packed sequences of host arrays, and where their predicted tokens come from."""

    batch: PackedSequences
    source: np.ndarray  # [S, W] int64, of [B * T] tokens; 0 where masked out
    real_tokens: int  # of `batch.tokens`, without padding

    def take(self, array: Array) -> np.ndarray:
        """Return an array [B, T, ...] at the predicted tokens: [S, W, ...], 0 elsewhere."""
        flat = np.asarray(array)
        flat = flat.reshape(-1, *flat.shape[2:])
        mask = self.batch.mask.reshape(*self.source.shape, *(1,) * (flat.ndim - 1))
        return np.where(mask, flat[self.source], np.zeros((), flat.dtype))


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Hold what is read of one sample: all tokens before the last one that is predicted."""

    row: int
    prompt: int  # samples of the same prompt have the same number
    predicted: np.ndarray  # where the predicted tokens are, [n] int

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens before the first predicted one."""
        return int(self.predicted[0])

    @property
    def tokens(self) -> int:
        """Count the tokens, prompt included."""
        return int(self.predicted[-1])


def pack(
    batch: Sequences, rows: int, length_bucket: int, row_shards: int, *, whole_groups: bool = False
) -> list[Packed]:
    """Pack host arrays: the sequences of which tokens are predicted, with all their columns.

    A shard has at most the slots that its share of `rows` sequences of the longest length has
    (`rows_of_shard`). Sequences of like length go together, as attention pads them to the longest.
    Then they are dealt to row shards by prompt or by length, whichever leaves the fullest with
    fewer tokens. With `whole_groups` those of a group are in one line, which may then have more.
    """
    slots = batch.tokens.shape[1]
    budget = rows_of_shard(rows, row_shards) * slots
    samples = sorted(_samples(batch), key=lambda one: -one.tokens)
    packed = []
    while samples:
        longest = min(bucket(samples[0].tokens, length_bucket, 3), slots)
        most = budget // longest
        if whole_groups:
            shares, samples = _deal_groups(samples, batch.group, row_shards, most)
        else:
            shares = _deal(samples[: most * row_shards], row_shards, most)
            samples = samples[most * row_shards :]
        fullest = max(map(len, shares))
        of_shard = min(max(most, fullest), bucket(fullest, 1, 2))
        packed.append(_lay_out(batch, shares, (of_shard, longest), length_bucket))
    return packed


def unpack(found: Sequence[tuple[Packed, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
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


def _samples(batch: Sequences) -> list[_Sample]:
    """Return the sequences of which something is predicted."""
    numbers: dict[bytes, int] = {}
    found = []
    for row in np.flatnonzero(batch.mask.any(axis=1)):
        predicted = np.flatnonzero(batch.mask[row])
        prompt = batch.tokens[row, : predicted[0]].tobytes()
        number = numbers.setdefault(prompt, len(numbers))
        found.append(_Sample(int(row), number, predicted))
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


def _deal_groups(
    samples: list[_Sample], group: Array, row_shards: int, most: int
) -> tuple[list[list[_Sample]], list[_Sample]]:
    """Give row shards whole groups, and return what is left for later lines.

    A line has at most `most` samples, or one group that has more.
    """
    groups: dict[int, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(int(group[sample.row]), []).append(sample)
    shares: list[list[_Sample]] = [[] for _ in range(row_shards)]
    left = []
    for own in groups.values():
        share = min(shares, key=_tokens)
        if share and len(share) + len(own) > most:
            left += own
        else:
            share += own
    return shares, sorted(left, key=lambda one: -one.tokens)


def _tokens(samples: list[_Sample]) -> int:
    """Count the tokens of samples, each prompt once."""
    prompts = {one.prompt: one.prompt_tokens for one in samples}
    return sum(prompts.values()) + sum(one.tokens - one.prompt_tokens for one in samples)


def _lay_out(
    batch: Sequences, shares: list[list[_Sample]], rows: tuple[int, int], length_bucket: int
) -> Packed:
    """Lay out each shard's line: `rows` are its sequences and their longest length."""
    slots = rows[0] * rows[1]
    line = min(slots, bucket(max(map(_tokens, shares)), length_bucket, 4))
    wanted = max(sum(len(one.predicted) for one in share) for share in shares)
    count = min(slots, bucket(wanted, length_bucket, 4))
    shape = (len(shares), line)
    packed = PackedSequences(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        sequences=np.zeros((len(shares), *rows), np.int32),
        slot=np.zeros(shape, np.int32),
        predict_from=np.zeros((len(shares), count), np.int32),
        targets=np.zeros((len(shares), count), np.int32),
        mask=np.zeros((len(shares), count), bool),
        segment_ids=np.zeros((len(shares), count), np.int32),
        groups=np.full((len(shares), rows[0]), -1, np.int32),
    )
    source = np.zeros((len(shares), count), np.int64)
    for shard, share in enumerate(shares):
        _fill_line(batch, share, packed, source, shard)
    laid = Packed(packed, source, sum(map(_tokens, shares)))
    columns = {name: _laid(laid, name, column, shares) for name, column in batch.columns.items()}
    return dataclasses.replace(laid, batch=packed.with_columns(**columns))


def _laid(laid: Packed, name: str, column: Array, shares: list[list[_Sample]]) -> Array:
    """Return a column as packed sequences have it."""
    per = declaration(name).per
    if per == "batch":
        return column
    if per == "token":
        return laid.take(column)
    found = np.zeros((*laid.batch.sequences.shape[:2], *column.shape[1:]), column.dtype)
    for shard, share in enumerate(shares):
        found[shard, : len(share)] = column[[one.row for one in share]]
    return found


def _fill_line(
    batch: Sequences, share: list[_Sample], packed: PackedSequences, source: np.ndarray, shard: int
) -> None:
    """Write one shard's sequences into the arrays of the packed ones."""
    slots = batch.tokens.shape[1]
    longest = packed.sequences.shape[2]
    prompts: dict[int, int] = {}  # where in the line each begins
    numbers: dict[int, int] = {}  # of the line's groups
    used = 0
    wanted = 0
    for place, one in enumerate(share):
        group = int(batch.group[one.row])
        packed.groups[shard, place] = numbers.setdefault(group, len(numbers))
        # The prompt is laid out with the first of its samples.
        fresh = 0 if one.prompt not in prompts else one.prompt_tokens
        start = prompts.setdefault(one.prompt, used)
        position = np.arange(one.tokens)
        where = position + np.where(position < one.prompt_tokens, start, used - fresh)
        new = slice(used, used + one.tokens - fresh)
        packed.tokens[shard, new] = batch.tokens[one.row, fresh : one.tokens]
        packed.positions[shard, new] = position[fresh:]
        packed.slot[shard, new] = place * longest + position[fresh:]
        packed.sequences[shard, place, : one.tokens] = where

        told = slice(wanted, wanted + len(one.predicted))
        packed.predict_from[shard, told] = where[one.predicted - 1]
        packed.targets[shard, told] = batch.tokens[one.row, one.predicted]
        packed.mask[shard, told] = True
        packed.segment_ids[shard, told] = place
        source[shard, told] = one.row * slots + one.predicted
        used = new.stop
        wanted = told.stop
