"""Packed lines: each token is there once and reads its own text; little of a line is padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from learning import sequences_of
from samples import PROMPTS, SLOTS, drawn, grouped, seen_by

from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.packing import Extent, Packed, pack, padding_share, unpack


def assert_reads_its_own_text(given: Sequences, packed: list[Packed]) -> None:
    """Each predicted token is there once, and what is read before it is its sample's text."""
    mask = np.asarray(given.mask)
    told = []
    for part in packed:
        batch = part.batch
        for shard, line in enumerate(batch.tokens):
            seen = seen_by(np.asarray(batch.segments[shard]))
            for place in np.flatnonzero(batch.mask[shard]):
                row, last = divmod(int(part.source[shard, place]), mask.shape[1])
                told.append((row, last))
                read = np.flatnonzero(seen[batch.predict_from[shard, place]])
                np.testing.assert_array_equal(line[read], given.tokens[row, :last])
                np.testing.assert_array_equal(batch.positions[shard, read], np.arange(last))
                assert batch.targets[shard, place] == given.tokens[row, last]
    assert sorted(told) == list(zip(*(axis.tolist() for axis in np.nonzero(mask)), strict=True))


@pytest.mark.parametrize("row_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_each_token_is_there_once_and_comes_back_to_its_place(row_shards, rows):
    given = grouped(50)
    mask = np.array(given.mask)
    mask[5] = False  # a sample that is not trained on is not read
    sequences = dataclasses.replace(given, mask=mask)
    packed = pack(sequences, Extent(rows), block=4, row_shards=row_shards)
    assert_reads_its_own_text(sequences, packed)
    told = [(part, np.asarray(part.batch.columns["sampled_logprobs"])) for part in packed]
    again = unpack(told, (len(mask), SLOTS))
    np.testing.assert_array_equal(again, np.where(mask, given.columns["sampled_logprobs"], 0.0))
    ids = [np.asarray(part.batch.columns["sample_ids"])[part.batch.groups >= 0] for part in packed]
    trained = np.flatnonzero(mask.any(axis=1))
    np.testing.assert_array_equal(np.sort(np.concatenate(ids)), trained)
    for part in packed:
        np.testing.assert_array_equal(part.take(given.tokens), part.batch.targets)
        assert part.batch.tokens.shape[1] <= max(1, rows // row_shards) * SLOTS + 3
    # Copies of a prompt are not needed.
    needed = sum(PROMPTS) + mask.sum() - mask.any(axis=1).sum()
    assert sum(part.needed_tokens for part in packed) == needed
    computed = sum(part.batch.tokens.size for part in packed)
    assert padding_share(packed) == 1 - needed / computed
    assert padding_share([]) == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_reads_its_own_text(seed):
    """Though prompts begin alike, begin others, or differ in the last token alone."""
    random = np.random.default_rng(seed)
    rows = 8
    prompt = random.integers(1, 4, rows)[:, None]
    length = prompt[:, 0] + random.integers(1, 4, rows)
    place = np.arange(7)
    known = place < length[:, None]
    tokens = np.where(known, random.integers(0, 2, (rows, 7)), 0).astype(np.int32)
    sequences = sequences_of(tokens, known & (place >= prompt))
    assert_reads_its_own_text(sequences, pack(sequences, Extent(rows), block=2, row_shards=2))


@pytest.mark.parametrize("block", [2, 8, 64])
def test_pairs_are_the_blocks_of_which_a_token_sees_another(block):
    for part in pack(grouped(50), Extent(12), block, row_shards=2):
        for segments, pairs in zip(part.batch.segments, part.batch.pairs, strict=True):
            size = len(segments) // -(-len(segments) // block)
            blocks = seen_by(segments).reshape(len(segments) // size, size, -1, size)
            np.testing.assert_array_equal(
                pairs[pairs[:, 0] >= 0], np.argwhere(blocks.any(axis=(1, 3)))
            )


@pytest.mark.parametrize(
    "prompt, longest, typical, most",
    [
        (50, 32, 16, 1.15),
        (100, 100, 50, 1.14),
        (150, 300, 150, 1.1),
        (1000, 100, 50, 1.2),
        (100, 1000, 500, 1.1),
        (200, 4096, 400, 1.15),  # lengths with a long tail
    ],
)
@pytest.mark.parametrize("rows", [8, 64])
def test_a_run_has_two_lengths_of_lines_and_computes_little_in_vain(
    rows, prompt, longest, typical, most
):
    """Whatever the lengths of samples, of 8 prompts with 8 each."""
    extent = Extent(rows, 8 * prompt + 64 * longest, prompt + 8 * longest, prompt)
    lengths = set()
    shares = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        responses = np.minimum(longest, np.exp(random.normal(np.log(typical), 0.7, 64)) + 1)
        batch = drawn(prompt, responses.astype(int), 8, longest)
        packed = pack(batch, extent, 128, row_shards=1)
        lengths |= {part.batch.tokens.shape[1] for part in packed}
        shares.append(1 / (1 - padding_share(packed)))
    assert len(lengths) <= 2
    assert np.mean(shares) <= most
