"""Which rows are trained on together, against plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from learning import sequences_of

from rlhf_jax.losses.advantages import groups_with_signal
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.minibatches import minibatches, with_shares
from rlhf_jax.sequences.packing import Extent, pack


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ((0.1, 0.1, 0.1), False),
        ((0.0, 0.0, 1.0), True),
        ((-1.0, -2.0, -1.0), True),
        ((0.0, 1e-6, 0.0), False),  # no more than rounding
        ((0.0, 1.2e-6, 0.0), True),
        ((math.nan, 1.0, 1.0), False),
        ((math.nan, 0.0, 1.0), True),
        ((math.nan, -3.0, math.nan), False),
        ((math.nan, math.nan, math.nan), False),
    ],
)
def test_a_prompt_has_a_signal_where_known_rewards_differ(rewards, signal):
    others = (0.0, 0.5, 1.0)
    given = np.array([*others, *rewards, *others], np.float32)
    assert groups_with_signal(given, 3).tolist() == [True, signal, True]
    assert not groups_with_signal(given, 1).any()


@pytest.mark.parametrize(("batch", "count", "epochs"), [(12, 3, 2), (4, 1, 3), (4, 4, 1)])
def test_minibatches_are_replayable_permutations(batch, count, epochs):
    def drawn(seed=5, step=7):
        return [rows.tolist() for rows in minibatches(batch, count, epochs, seed=seed, step=step)]

    first = drawn()
    assert first == drawn()
    assert [len(rows) for rows in first] == [batch // count] * count * epochs
    whole = itertools.chain.from_iterable(first)
    shuffled = [list(itertools.islice(whole, batch)) for _ in range(epochs)]
    assert all(sorted(rows) == list(range(batch)) for rows in shuffled)
    assert len(set(map(tuple, shuffled))) == epochs, "each epoch is shuffled anew"
    assert first != drawn(step=8) and first != drawn(seed=6)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 rows cannot be split into 3 equal minibatches"):
        next(minibatches(10, 3, 1, 0, 0))


def known_batch(mask: np.ndarray) -> Sequences:
    """Numbers that name their place."""
    numbers = np.arange(mask.size, dtype=np.float32).reshape(mask.shape)
    known = sequences_of(
        numbers.astype(np.int32),
        mask,
        sampled_logprobs=numbers,
        logprobs=numbers + 100,
        rewards=numbers[:, 0],
        advantages=numbers + 200,
    )
    return dataclasses.replace(known, group=np.array([0, 0, 1], np.int32))


@pytest.mark.parametrize("trained", [(5,), (1, 2, 3, 11), (1, 5, 9)])
def test_a_micro_batch_has_the_numbers_of_the_tokens_that_are_trained_on(trained):
    """Each once, and how many tokens, sequences and groups they are."""
    mask = np.isin(np.arange(12), trained).reshape(3, 4)
    weights = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
    given = with_shares(known_batch(mask), weights)
    parts = [part.batch for part in pack(given, Extent(3), block=4, row_shards=1)]
    columns = parts[0].columns
    rows = {token // 4 for token in trained}
    assert columns["total_tokens"] == len(trained)
    assert columns["total_sequences"] == len(rows)
    assert columns["total_groups"] == len({int(given.group[row]) for row in rows})

    def told(name: str) -> np.ndarray:
        return np.sort(np.concatenate([part.columns[name][part.mask] for part in parts]))

    for name, more in (("sampled_logprobs", 0), ("logprobs", 100), ("advantages", 200)):
        assert (told(name) - more).tolist() == list(trained)
    np.testing.assert_allclose(told("weights"), np.array(trained) / 12)


def test_where_nothing_is_trained_on_means_are_over_one():
    """So that they are 0, and not NaN."""
    nothing = np.zeros((3, 4), bool)
    columns = with_shares(known_batch(nothing), np.zeros((3, 4), np.float32)).columns
    assert columns["total_tokens"] == columns["total_sequences"] == columns["total_groups"] == 1


def test_the_rows_of_a_minibatch_are_taken_of_everything():
    """But what is known of the whole batch stays."""
    ones = np.ones((3, 4), bool)
    whole = with_shares(known_batch(ones), ones.astype(np.float32))
    rows = np.array([2, 0])
    taken = whole.take(rows)
    np.testing.assert_array_equal(taken.tokens, np.asarray(whole.tokens)[rows])
    np.testing.assert_array_equal(taken.group, np.asarray(whole.group)[rows])
    for name, column in whole.columns.items():
        wanted = column if np.ndim(column) == 0 else np.asarray(column)[rows]
        np.testing.assert_array_equal(taken.columns[name], wanted)
