"""Losses that compare the sequences of a group, and columns that are as they were declared."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from learning import sequences_of
from samples import in_groups, spread

from rlhf_jax.inference.logprobs import token_logprobs
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training.kinds import GroupLoss
from rlhf_jax.training.settings import TrainingSettings

GROUP = 4
SETTINGS = TrainingSettings(remat=False, chunk=16)


@pytest.mark.parametrize("row_shards", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 5, 12])
def test_whole_groups_are_in_one_line(row_shards, rows):
    """Even where a group has more sequences than there is room for."""
    given = in_groups(50)
    packed = pack(given, Extent(rows), 4, row_shards, whole_groups=True)
    seen: list[int] = []
    for part in packed:
        batch = part.batch
        for line, rewards in zip(batch.groups, batch.columns["rewards"], strict=True):
            for number in set(line[line >= 0].tolist()):
                own = np.isin(np.asarray(given.columns["rewards"]), rewards[line == number])
                (group,) = set(np.asarray(given.group)[own].tolist())
                seen.append(group)
                trained = np.asarray(given.mask).any(axis=1) & (given.group == group)
                np.testing.assert_array_equal(own, trained)
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.parametrize(("rows", "row_shards"), [(12, 1), (4, 1), (6, 2)])
def test_a_loss_of_groups_is_the_loops_however_they_are_packed(tiny, rows, row_shards):
    model = init(jax.random.key(0), tiny)
    given = in_groups(tiny.vocab_size)
    loss = GroupLoss(spread)
    weights = np.zeros(given.mask.shape, np.float32)
    known = with_shares(given, weights)

    @functools.partial(jax.jit, static_argnames="settings")
    def share(model, batch, settings):
        return loss(model, read_packed(model, batch, settings.layout), batch, settings)

    parts = pack(known, Extent(rows), 4, row_shards, whole_groups=True)
    shares = [share(model, part.batch, SETTINGS) for part in parts]
    found = float(sum(value for value, _ in shares))

    mask = np.asarray(given.mask)
    logprobs = np.asarray(token_logprobs(model, given.tokens, temperature=1.0, mask=mask), float)
    losses = []
    for group in range(3):
        own = [row for row in np.flatnonzero(mask.any(axis=1)) if row // GROUP == group]
        sums = [logprobs[row].sum() * float(given.columns["rewards"][row]) for row in own]
        losses.append(np.exp(np.mean(sums) / 100))
    assert found == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(sum(metrics["loss/group"] for _, metrics in shares)) == pytest.approx(found)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"logprob": np.zeros((2, 3), np.float32)}, "no column 'logprob'"),
        ({"logprobs": np.zeros((2, 4), np.float32)}, r"float32\[2, 3\]; it is float32\[2, 4"),
        ({"logprobs": np.zeros((2, 3), np.int32)}, r"must be float32\[2, 3\]; it is int32"),
        ({"rewards": np.zeros((2, 3), np.float32)}, r"must be float32\[2\]"),
        ({"top_k_ids": np.zeros((2, 3), np.int32)}, r"must be int32\[2, 3\] and one more axis"),
        ({"kl_weight": np.zeros(1, np.float32)}, r"must be float32\[\]"),
    ],
)
def test_a_column_is_as_it_was_declared(columns, said):
    given = sequences_of(np.zeros((2, 3), np.int32), np.zeros((2, 3), bool))
    with pytest.raises(ValueError, match=said):
        given.with_columns(**columns)
    own = {"second_values": np.zeros((2, 3), np.float32)}  # of a further model that scores
    assert given.with_columns(**own).take(np.array([1])).columns["second_values"].shape == (1, 3)
