"""Which rows are trained on together, against plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from rlhf_jax.inference.packing import pack
from rlhf_jax.training.batching import groups_with_signal, micro_batch, minibatches, select
from rlhf_jax.types import Experience, Rollout


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


def experience(mask: np.ndarray) -> Experience:
    """Numbers that name their place."""
    rows, slots = mask.shape
    numbers = np.arange(rows * slots, dtype=np.float32).reshape(rows, slots)
    known = np.broadcast_to(np.arange(slots) > 0, mask.shape)
    length = np.full(rows, slots, np.int32)
    rollout = Rollout(numbers.astype(np.int32), known, numbers, length, np.arange(rows))
    return Experience(
        rollout,
        mask,
        logprobs=numbers + 100,
        reference_logprobs=None,
        rewards=numbers[:, 0],
        advantages=numbers + 200,
    )


@pytest.mark.parametrize("trained", [(5,), (1, 2, 3, 11), (1, 5, 9)])
def test_a_micro_batch_has_the_numbers_of_the_tokens_that_are_trained_on(trained):
    """Each once, and how many tokens and samples they are."""
    mask = np.isin(np.arange(12), trained).reshape(3, 4)
    given = experience(mask)
    weights = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
    (part,) = pack(given.rollout, mask, 3, length_bucket=4, row_shards=1)
    batch = micro_batch(given, weights, 0.25, part)
    assert batch.total == len(trained) and batch.kl_weight == 0.25
    assert batch.samples == len({token // 4 for token in trained})
    own = np.asarray(batch.mask)
    assert batch.reference_logprobs is batch.values is batch.returns is batch.support is None
    pairs = ((batch.sampled_logprobs, 0), (batch.logprobs, 100), (batch.advantages, 200))
    for numbers, more in pairs:
        assert sorted(np.asarray(numbers)[own] - more) == list(trained)
    np.testing.assert_allclose(sorted(np.asarray(batch.weights)[own]), np.array(trained) / 12)


def test_where_nothing_is_trained_on_means_are_over_one():
    """So that they are 0, and not NaN."""
    given = experience(np.broadcast_to(np.arange(4) > 0, (3, 4)))
    (part,) = pack(given.rollout, given.mask, 3, length_bucket=4, row_shards=1)
    nothing = dataclasses.replace(given, mask=np.zeros((3, 4), bool))
    batch = micro_batch(nothing, np.zeros((3, 4), np.float32), 0.0, part)
    assert batch.total == batch.samples == 1


def test_the_rows_of_a_minibatch_are_taken_of_everything():
    whole = experience(np.ones((3, 4), bool))
    taken = select(whole, np.array([2, 0]))
    np.testing.assert_array_equal(taken.advantages, np.asarray(whole.advantages)[[2, 0]])
    assert np.asarray(taken.rollout.sample_id).tolist() == [2, 0] and taken.values is None
