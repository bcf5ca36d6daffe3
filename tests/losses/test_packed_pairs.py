"""Losses of packed pairs and labelled answers are those of the sums that equations read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import packed_of

from rlhf_jax.algorithms.dpo import DPOOptions, preferred
from rlhf_jax.algorithms.kto import KTOOptions, baseline, desirable
from rlhf_jax.algorithms.reward_model import RewardModelOptions, preferred_reward, whole_texts
from rlhf_jax.algorithms.sft import negative_log_likelihood
from rlhf_jax.config import default
from rlhf_jax.losses.preference import PREFERENCE_LOSSES, Pairs, kto
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training.kinds import GroupTerms, Share, TokenTerms
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array

GROUPS = 5


def in_pairs(*signs: float) -> Sequences:
    """Two answers of one to six tokens to each of some prompts, with log-probs at random."""
    random = np.random.default_rng(2)
    begin = random.integers(2, 6, GROUPS).repeat(2)
    end = begin + random.integers(1, 7, 2 * GROUPS)
    tokens = random.integers(0, 9, (2 * GROUPS, 12), np.int32)
    place = np.arange(12)
    tokens[1::2] = np.where(place < begin[1::2, None], tokens[::2], tokens[1::2])
    mask = (place >= begin[:, None]) & (place < end[:, None])
    groups = np.arange(GROUPS, dtype=np.int32).repeat(2)
    return Sequences(tokens, mask, groups).with_columns(
        preference=np.resize(np.array(signs, np.float32), 2 * GROUPS),
        logprobs=-2 * random.random(mask.shape, np.float32) - 0.1,
        reference_logprobs=-2 * random.random(mask.shape, np.float32) - 0.1,
    )


def loss_of(
    function: Callable[[GroupTerms], Share], batch: Sequences, scores: Array, options: object
) -> float:
    """The loss of a batch in several lines, by the scores [B, T] of its tokens."""
    settings = TrainingSettings(options=options)
    known = with_shares(batch, np.zeros(batch.mask.shape, np.float32))
    parts = pack(known, Extent(2), 4, 1, whole_groups=True)
    assert len(parts) > 1
    terms = [GroupTerms(jnp.asarray(one.take(scores)), one.batch, settings) for one in parts]
    return float(sum(one.mean(function(one)[0]) for one in terms))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_of_pairs_reads_their_sums_and_tokens(name):
    batch = in_pairs(1, -1)
    options = DPOOptions(loss=name, beta=0.3, label_smoothing=0.1, margin=0.7)
    columns = batch.columns
    policy, reference = (columns[key] for key in ("logprobs", "reference_logprobs"))
    sums = [np.where(batch.mask, x, 0.0).sum(axis=1) for x in (policy, reference, batch.mask)]
    pairs = Pairs(*(jnp.asarray(one[side::2]) for one in sums for side in (0, 1)))
    wanted = PREFERENCE_LOSSES[name](pairs, options).mean()
    assert loss_of(preferred, batch, policy, options) == pytest.approx(float(wanted), rel=1e-5)


def test_kto_measures_gains_from_those_of_mismatched_answers():
    """The second answer of each row is another row's: it gives the baseline, and no gradient."""
    batch = in_pairs(1, 0, -1, 0)
    options = KTOOptions(beta=0.3, desirable_weight=2.0)
    columns = batch.columns
    differences = columns["logprobs"] - columns["reference_logprobs"]
    gains = np.where(batch.mask, differences, 0.0).sum(axis=1)
    for sign in (1.0, -1.0):  # of the mismatched gains: a baseline is at least 0
        shifted = np.where(columns["preference"] == 0, sign, 0.0)[:, None]
        moved = batch.with_columns(logprobs=(columns["logprobs"] + shifted).astype(np.float32))
        known, metrics = baseline(moved, default("kto"))
        mean = np.mean(gains[1::2] + sign * batch.mask[1::2].sum(axis=1))
        assert metrics["preference/baseline"] == pytest.approx(max(0.0, mean), rel=1e-5)
        assert not known.mask[1::2].any() and known.mask[::2].any(axis=1).all()
        own = jnp.asarray(columns["preference"][::2])
        weights = np.where(own > 0, 2.0, 1.0)
        wanted = np.mean(weights * kto(jnp.asarray(gains[::2]), own, jnp.array(max(0, mean)), 0.3))
        found = loss_of(desirable, known, moved.columns["logprobs"], options)
        assert found == pytest.approx(float(wanted), rel=1e-5)


def test_a_reward_models_pair_has_a_margin_and_rewards_around_zero():
    batch, _ = whole_texts(in_pairs(1, -1), default("reward_model"))
    rewards = np.random.default_rng(3).normal(size=batch.mask.shape)
    ends = batch.mask.shape[1] - 1 - np.argmax(batch.mask[:, ::-1], axis=1)
    chosen, rejected = np.take_along_axis(rewards, ends[:, None], axis=1).reshape(-1, 2).T
    options = RewardModelOptions(margin=0.7, centering=0.1)

    def wanted(margins):
        return np.log1p(np.exp(margins - (chosen - rejected))) + 0.1 * (chosen + rejected) ** 2

    found = loss_of(preferred_reward, batch, rewards, options)
    assert found == pytest.approx(wanted(0.7).mean(), rel=1e-5)
    own = np.arange(GROUPS, dtype=np.float32)
    rows = np.stack([own, 9 * own], axis=1).ravel()  # the chosen answer's counts
    found = loss_of(preferred_reward, batch.with_columns(margin=rows), rewards, options)
    assert found == pytest.approx(wanted(0.7 + own).mean(), rel=1e-5)


def test_sft_is_the_mean_cost_of_a_token_in_float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        scores = -np.random.default_rng(4).random((2, 7))
        mask = np.arange(7) < np.array([[4], [6]])
        batch = packed_of(mask, np.zeros((2, 7), np.int32), 1)
        batch = batch.with_columns(total_tokens=np.array(10, np.float32))

        def loss(scores):
            return negative_log_likelihood(TokenTerms(scores, None, batch, TrainingSettings()))[1][
                "loss/policy"
            ]

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(scores))
        np.testing.assert_allclose(value, -scores[mask].mean(), rtol=1e-12)
        np.testing.assert_allclose(gradient, np.where(mask, -0.1, 0.0), rtol=1e-12)
