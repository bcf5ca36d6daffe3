"""Pack sequences with shared prompts into lines of fixed length, on the host.

Outside attention a model treats tokens independently, so lines are filled without padding between
sequences, and attention keeps samples apart (`model.packed_attention`). A line has one of two
lengths, whatever the lengths of samples, so a run has few programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf_jax.mesh import rows_of_shard
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.types import Array

# Lines are a third and a sixteenth of a minibatch of the longest samples, if a micro-batch has room
# for these: longer lines leave more of the last one empty, and shorter ones repeat prompts.
LONG = 3
SHORT = 16
GROUPS = 8  # A short line has room for a whole group if there are at least this many.
# It is as long as the longest sample if that is this many prompts long: few are as long, so finer
# lines save more than repeated prompts cost.
PROMPTS = 8
PARTS = 8  # Blocks of a line are equal; whole eighths are cut off where its length requires it.


@dataclasses.dataclass(frozen=True)
class Extent:
    """Hold the maximum size of sequences packed at a time, over all shards.

    Lines depend only on it, so they do not vary with the lengths of samples.
    """

    rows: int  # the longest sequences that a micro-batch has room for
    tokens: int = 0  # most tokens in total, each prompt once; 0 if unknown
    group_tokens: int = 0  # most tokens of a group, its prompt once; 0 without groups
    prompt_tokens: int = 0  # most tokens of a prompt; 0 if unknown


@dataclasses.dataclass(frozen=True)
class Packed:
    """Hold packed sequences of host arrays, and the sources of their predicted tokens."""

    batch: PackedSequences
    source: np.ndarray  # [S, W] int64, of [B * T] tokens; 0 where masked out
    needed_tokens: int  # of `batch.tokens`, without padding and repeated prompts
    needed_pairs: int  # of them, pairs of a token and one that it sees

    def take(self, array: Array) -> np.ndarray:
        """Return an array [B, T, ...] at the predicted tokens: [S, W, ...], 0 elsewhere."""
        flat = np.asarray(array)
        flat = flat.reshape(-1, *flat.shape[2:])
        mask = self.batch.mask.reshape(*self.source.shape, *(1,) * (flat.ndim - 1))
        return np.where(mask, flat[self.source], np.zeros((), flat.dtype))


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Hold the tokens of one sample that are read: all before the last predicted one."""

    row: int
    prompt: int  # samples of the same prompt have the same number
    predicted: np.ndarray  # the indices of the predicted tokens, [n] int

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens before the first predicted one."""
        return int(self.predicted[0])

    @property
    def own_tokens(self) -> int:
        """Count the tokens after the prompt."""
        return int(self.predicted[-1]) - self.prompt_tokens


@dataclasses.dataclass
class _Line:
    """Hold the samples of a line while it is filled."""

    length: int
    samples: list[_Sample] = dataclasses.field(default_factory=list)


def pack(
    batch: Sequences, extent: Extent, block: int, row_shards: int, *, whole_groups: bool = False
) -> list[Packed]:
    """Pack host arrays: sequences with predicted tokens, with all their columns.

    Each row shard has a line of a micro-batch, of one of `line_lengths`. Of the possible fillings
    the one with the fewest tokens is used. Samples of a prompt are together if there is room, else
    the prompt is repeated. With `whole_groups` those of a group are in one line.
    """
    samples = _samples(batch)
    if not samples:
        return []
    groups: dict[int, list[_Sample]] = {}
    for one in samples:
        groups.setdefault(int(batch.group[one.row]) if whole_groups else one.prompt, []).append(one)
    longest = batch.tokens.shape[1]
    indivisible = 0
    if whole_groups:
        most = extent.group_tokens or max(map(len, groups.values())) * longest
        # It may be more if members of a group have different prompts.
        indivisible = max(most, *(max(_room(own)) for own in groups.values()))
    lengths = line_lengths(extent, longest, block, row_shards, indivisible)
    in_order = sorted(groups.values(), key=lambda own: -_tokens(own))
    lines = _fill(in_order, lengths, row_shards, whole_groups)
    known: set[int] = set()
    packed = []
    for length in reversed(lengths):
        own = [line.samples for line in lines if line.length == length]
        for start in range(0, len(own), row_shards):
            shares = own[start : start + row_shards]
            shares += [[]] * (row_shards - len(shares))
            packed.append(_lay_out(batch, shares, length, block, known))
    return packed


def line_lengths(
    extent: Extent, longest: int, block: int, row_shards: int, indivisible: int = 0
) -> tuple[int, ...]:
    """Return the lengths of lines, one or two, the shorter one first.

    longest: most tokens of a sequence; indivisible: most tokens that must be in one line. A long
    line has room for whole groups of the largest size, since it can hold no part of one; its
    remainder goes into short ones. A line has whole blocks of at most `block` tokens.
    """
    least = max(longest, indivisible)
    unit = indivisible or 1
    most = rows_of_shard(extent.rows, row_shards) * longest
    expected = (extent.tokens or most * LONG * row_shards) // row_shards
    units = min(most // unit, -(-expected // (LONG * unit)))
    most = _whole_blocks(max(least, units * unit), block)
    if not 0 < extent.prompt_tokens * PROMPTS <= longest:
        group = extent.group_tokens if extent.group_tokens * GROUPS <= expected else 0
        least = max(least, group, expected // SHORT)
    short = _whole_blocks(least, block)
    return (short, most) if short < most else (most,)


def unpack(
    packed_numbers: Sequence[tuple[Packed, np.ndarray]], shape: tuple[int, ...]
) -> np.ndarray:
    """Return values [S, W] of batches as an array [B, T] float32, 0 if there is none."""
    array = np.zeros(shape, np.float32)
    for packed, numbers in packed_numbers:
        mask = packed.batch.mask
        array.put(packed.source[mask], numbers[mask])
    return array


def padding_share(packed: Sequence[Packed]) -> float:
    """Return the share of the tokens of batches that are padding or repeated prompts."""
    computed = sum(one.batch.tokens.size for one in packed)
    return 1.0 - sum(one.needed_tokens for one in packed) / computed if computed else 0.0


def _whole_blocks(tokens: int, block: int) -> int:
    """Return the smallest valid length of a line with at least this many tokens."""
    blocks = -(-tokens // block)
    part = max(1, block // PARTS)
    return blocks * min(block, -(-tokens // (blocks * part)) * part)


def _samples(batch: Sequences) -> list[_Sample]:
    """Return the sequences with predicted tokens."""
    numbers: dict[bytes, int] = {}
    samples = []
    for row in np.flatnonzero(batch.mask.any(axis=1)):
        predicted = np.flatnonzero(batch.mask[row])
        prompt = batch.tokens[row, : predicted[0]].tobytes()
        number = numbers.setdefault(prompt, len(numbers))
        samples.append(_Sample(int(row), number, predicted))
    return samples


def _tokens(samples: Sequence[_Sample]) -> int:
    """Count the tokens of samples, each prompt once."""
    prompts = {one.prompt: one.prompt_tokens for one in samples}
    return sum(prompts.values()) + sum(one.own_tokens for one in samples)


def _room(samples: Sequence[_Sample]) -> list[int]:
    """Count the tokens of samples, each prompt once, and the predicted ones."""
    return [_tokens(samples), sum(len(one.predicted) for one in samples)]


def _fill(
    groups: list[list[_Sample]], lengths: tuple[int, ...], row_shards: int, whole_groups: bool
) -> list[_Line]:
    """Fill lines with groups of samples, the largest first, with the fewest tokens in total.

    With two lengths, as many of the long ones come first as are filled, or one more or less.
    """
    longest = lengths[-1] * row_shards
    filled = sum(map(_tokens, groups)) // longest
    counts = {max(0, filled + more) for more in (1, 0, -1)} if len(lengths) > 1 else {0}

    def computed(lines: list[_Line]) -> int:
        """Count the tokens if each row shard has its share of these lines."""
        each = [sum(line.length == length for line in lines) for length in lengths]
        return sum(-(-n // row_shards) * own for n, own in zip(each, lengths, strict=True))

    ways = [
        _first_fit(groups, lengths, count * row_shards, whole_groups)
        for count in sorted(counts, reverse=True)
    ]
    return min(ways, key=computed)


def _first_fit(
    groups: list[list[_Sample]], lengths: tuple[int, ...], count: int, whole_groups: bool
) -> list[_Line]:
    """Put each group into the first line with room, of `count` long ones and of new ones.

    A group that fits nowhere is split if it may be.
    """
    lines = [_Line(lengths[-1]) for _ in range(count)]
    # The room of each line, in tokens and predicted tokens.
    free = np.full((len(lines), 2), lengths[-1])
    for group in groups:
        rest = sorted(group, key=lambda one: -one.own_tokens)
        while rest:
            least = _room(rest)
            whole = whole_groups or (free >= least).all(axis=1).any()
            if not whole:
                least = _room(rest[:1])
            fits = (free >= least).all(axis=1)
            if not fits.any():
                length = next(own for own in lengths if own >= max(least))
                lines.append(_Line(length))
                free = np.concatenate([free, [[length, length]]])
                continue
            place = int(fits.argmax())
            taken = rest if whole else _that_fit(rest, free[place])
            lines[place].samples += taken
            free[place] -= _room(taken)
            rows = {one.row for one in taken}
            rest = [one for one in rest if one.row not in rows]
    return [line for line in lines if line.samples]


def _that_fit(samples: list[_Sample], free: np.ndarray) -> list[_Sample]:
    """Return the samples of one prompt that fit into a line, in order."""
    tokens, predicted = free.tolist()
    tokens -= samples[0].prompt_tokens
    fitting = []
    for one in samples:
        if one.own_tokens <= tokens and len(one.predicted) <= predicted:
            fitting.append(one)
            tokens -= one.own_tokens
            predicted -= len(one.predicted)
    return fitting


def _lay_out(
    batch: Sequences, shares: list[list[_Sample]], length: int, block: int, known: set[int]
) -> Packed:
    """Lay out the line of each shard; known: the prompts read so far, extended here."""
    shape = (len(shares), length)
    packed = PackedSequences(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.full((*shape, 2), -1, np.int32),
        pairs=np.full((len(shares), pair_count(length, block), 2), -1, np.int32),
        predict_from=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        segment_ids=np.zeros(shape, np.int32),
        groups=np.full(shape, -1, np.int32),
    )
    source = np.zeros(shape, np.int64)
    for shard, share in enumerate(shares):
        _fill_line(batch, share, packed, source, shard)
        pairs = live_pairs(np.asarray(packed.segments[shard]), block)
        packed.pairs[shard, : len(pairs)] = pairs
    read = {one.prompt: one.prompt_tokens for share in shares for one in share}
    own = [(one.own_tokens, one.prompt_tokens) for share in shares for one in share]
    # A prompt is needed once, and sees nothing before it.
    own += [(tokens, 0) for prompt, tokens in read.items() if prompt not in known]
    known.update(read)
    needed = sum(tokens for tokens, _ in own)
    pairs = sum(tokens * before + tokens * (tokens + 1) // 2 for tokens, before in own)
    laid = Packed(packed, source, needed, pairs)
    columns = {name: _laid(laid, name, column, shares) for name, column in batch.columns.items()}
    return dataclasses.replace(laid, batch=packed.with_columns(**columns))


def _laid(laid: Packed, name: str, column: Array, shares: list[list[_Sample]]) -> Array:
    """Return a column in packed form."""
    per = declaration(name).per
    if per == "batch":
        return column
    if per == "token":
        return laid.take(column)
    column_laid = np.zeros((*laid.batch.groups.shape, *column.shape[1:]), column.dtype)
    for shard, share in enumerate(shares):
        column_laid[shard, : len(share)] = column[[one.row for one in share]]
    return column_laid


def _fill_line(
    batch: Sequences, share: list[_Sample], packed: PackedSequences, source: np.ndarray, shard: int
) -> None:
    """Write one shard's sequences into the packed arrays."""
    slots = batch.tokens.shape[1]
    prompts: dict[int, tuple[int, int]] = {}  # by prompt, its start in the line and its segment
    numbers: dict[int, int] = {}  # of the line's groups
    used = 0
    segments = 0
    wanted = 0

    def lay(one: _Sample, first: int, tokens: int, prompt: int) -> None:
        """Lay out tokens of a sample as a new segment."""
        nonlocal used, segments
        new = slice(used, used + tokens)
        packed.tokens[shard, new] = batch.tokens[one.row, first : first + tokens]
        packed.positions[shard, new] = np.arange(first, first + tokens)
        packed.segments[shard, new] = segments, prompt
        used += tokens
        segments += 1

    for place, one in enumerate(share):
        packed.groups[shard, place] = numbers.setdefault(int(batch.group[one.row]), len(numbers))
        if one.prompt not in prompts:
            prompts[one.prompt] = used, segments
            lay(one, 0, one.prompt_tokens, segments)
        start, prompt = prompts[one.prompt]
        own = used - one.prompt_tokens
        lay(one, one.prompt_tokens, one.own_tokens, prompt)

        predicted = slice(wanted, wanted + len(one.predicted))
        before = one.predicted - 1
        packed.predict_from[shard, predicted] = before + np.where(
            before < one.prompt_tokens, start, own
        )
        packed.targets[shard, predicted] = batch.tokens[one.row, one.predicted]
        packed.mask[shard, predicted] = True
        packed.segment_ids[shard, predicted] = place
        source[shard, predicted] = one.row * slots + one.predicted
        wanted = predicted.stop


def pair_count(length: int, block: int) -> int:
    """Count the block pairs of a line with the keys not after the queries."""
    blocks = -(-length // block)
    return blocks * (blocks + 1) // 2


def live_pairs(segments: np.ndarray, block: int) -> np.ndarray:
    """Return the block pairs of a line [C, 2] in which some token sees another: [n, 2]."""
    size = len(segments) // -(-len(segments) // block)
    used = int((segments[:, 0] >= 0).sum())
    # Each segment is contiguous; segments are numbered in the order of the line.
    starts = np.flatnonzero(np.diff(segments[:used, 0], prepend=-1))
    stops = np.append(starts[1:], used)
    first = starts // size
    last = (stops - 1) // size
    place = {int(segments[start, 0]): n for n, start in enumerate(starts)}
    live = np.zeros((len(segments) // size,) * 2, bool)
    for n, start in enumerate(starts):
        own = slice(first[n], last[n] + 1)
        prompt = place[int(segments[start, 1])]
        live[own, own] = True
        live[own, first[prompt] : last[prompt] + 1] = True
    return np.argwhere(np.tril(live))
