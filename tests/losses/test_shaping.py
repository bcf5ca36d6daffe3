"""KL estimates, token rewards and scales against plain Python loops, and values against their
definition.
"""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import sequences_of

from rlhf_jax.algorithms.grpo import advantage_config
from rlhf_jax.config import default
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.losses import kl as divergence
from rlhf_jax.losses.advantages import EstimatorConfig, whiten
from rlhf_jax.models.transformer import forward, init
from rlhf_jax.rewards.samples import penalise_and_clip
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.setup.models import critic_of
from rlhf_jax.training.experience import AdvantageConfig

LAW = np.array([0.5, 0.3, 0.2])
REFERENCE = np.array([0.2, 0.2, 0.6])


def random_mask(rng, rows=4, slots=10) -> np.ndarray:
    """Responses of 1 to 6 tokens behind prompts of 2 or more, and one row without."""
    at = np.arange(slots)[None]
    start = rng.integers(2, 4, (rows, 1))
    mask = (at >= start) & (at < start + rng.integers(1, 7, (rows, 1)))
    mask[-1] = False
    return mask


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_estimates_average_to_the_divergence(name):
    estimates = divergence.KL[name](
        *(jnp.log(jnp.asarray(law, jnp.float32)) for law in (LAW, REFERENCE))
    )
    assert float((LAW * estimates).sum()) == pytest.approx(
        (LAW * np.log(LAW / REFERENCE)).sum(), rel=1e-5
    )


def test_estimates_by_hand():
    now = jnp.array([[-1.0, -2.0]], jnp.float32)
    reference = jnp.array([[-1.5, -1.0]], jnp.float32)
    np.testing.assert_allclose(divergence.kl_k1(now, reference), [[0.5, -1.0]])
    np.testing.assert_allclose(divergence.kl_k2(now, reference), [[0.125, 0.5]])
    np.testing.assert_allclose(
        divergence.kl_k3(now, reference), [[math.exp(-0.5) - 0.5, math.e - 2]], rtol=1e-6
    )


def test_k2s_mean_gradient_is_the_divergences():
    scores = jnp.log(jnp.array(LAW, jnp.float32))
    reference = jnp.log(jnp.array(REFERENCE, jnp.float32))

    def exact(scores):
        logprobs = jax.nn.log_softmax(scores)
        return (jnp.exp(logprobs) * (logprobs - reference)).sum()

    def estimate(scores, estimator):
        return (
            jnp.array(LAW, jnp.float32) * estimator(jax.nn.log_softmax(scores), reference)
        ).sum()

    np.testing.assert_allclose(
        jax.grad(estimate)(scores, divergence.kl_k2), jax.grad(exact)(scores), atol=1e-6
    )
    np.testing.assert_allclose(jax.grad(estimate)(scores, divergence.kl_k1), np.zeros(3), atol=1e-6)


def test_token_rewards_are_the_loops():
    rng = np.random.default_rng(0)
    mask = random_mask(rng)
    rewards = rng.normal(size=4).astype(np.float32)
    kl = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
    want = np.zeros(mask.shape)
    for b, t in zip(*np.nonzero(mask), strict=True):
        want[b, t] = -0.3 * kl[b, t] + (rewards[b] if not mask[b, t + 1 :].any() else 0.0)
    got = divergence.token_rewards(rewards, jnp.asarray(kl), jnp.asarray(mask), 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_sees_only_what_the_mask_names(shift_mean):
    rng = np.random.default_rng(1)
    mask = random_mask(rng)
    x = np.where(mask, rng.normal(3.0, 2.0, mask.shape), np.inf).astype(np.float32)
    inside = x[mask].astype(float)
    want = np.zeros(mask.shape)
    want[mask] = (inside - inside.mean() * shift_mean) / inside.std()
    np.testing.assert_allclose(
        whiten(jnp.asarray(x), jnp.asarray(mask), shift_mean), want, atol=1e-5
    )


def test_equal_numbers_are_not_blown_up():
    x = jnp.full(7, 0.1, jnp.float32)
    all_of_them = jnp.ones(7, bool)
    np.testing.assert_allclose(whiten(x, all_of_them), np.zeros(7), atol=1e-6)
    np.testing.assert_allclose(whiten(x, all_of_them, shift_mean=False), x)
    assert not whiten(x, ~all_of_them).any()
    single = jnp.arange(7) == 3
    np.testing.assert_array_equal(whiten(x, single), np.zeros(7))
    np.testing.assert_array_equal(whiten(x, single, shift_mean=False), np.where(single, x, 0))


def test_rewards_are_clipped_and_a_missing_end_is_paid_for():
    rewards = np.array([-3.0, 0.5, 2.0], np.float32)
    ended = np.array([True, False, True])
    clipped = penalise_and_clip(rewards, ended, missing_end=0.0, clip=1.0)
    np.testing.assert_array_equal(clipped, np.array([-1.0, 0.5, 1.0], np.float32))
    paid = penalise_and_clip(rewards, ended, missing_end=0.25, clip=0.0)
    np.testing.assert_array_equal(paid, np.array([-3.0, 0.25, 2.0], np.float32))
    assert clipped.dtype == paid.dtype == np.float32


PLAIN = AdvantageConfig("grpo", EstimatorConfig(4))
SETTINGS = [  # a key, a value, and what follows from it
    ("algorithm.estimator", "rloo", {"estimator": "rloo"}),
    ("generation.samples_per_prompt", 7, {"estimation": EstimatorConfig(7)}),
    ("algorithm.deviation", "population", {"estimation": EstimatorConfig(4, "population")}),
    ("algorithm.discount", 0.5, {"estimation": EstimatorConfig(4, discount=0.5)}),
    ("algorithm.gae_lambda", 0.5, {"estimation": EstimatorConfig(4, gae_lambda=0.5)}),
    ("kl.estimator", "k1", {"kl_estimator": "k1"}),
    ("kl.place", "reward", {"kl_in_reward": True}),
    ("reward.whiten", True, {"whiten": True}),
    ("training.drop_overlong", True, {"drop_overlong": True}),
]


@pytest.mark.parametrize(("key", "value", "follows"), SETTINGS)
def test_each_key_of_a_config_changes_what_it_names(key, value, follows):
    """And the defaults of both are the same."""
    config = default()
    config.generation.samples_per_prompt = 4
    assert advantage_config(config) == PLAIN
    config.update_from_flattened_dict({key: value})
    assert advantage_config(config) == dataclasses.replace(PLAIN, **follows)


@pytest.mark.parametrize("kl, wanted", [(6.0, 0.1), (6.6, 0.101), (60.0, 0.102), (0.0, 0.098)])
def test_the_kl_coefficient_follows_the_target(kl, wanted):
    assert divergence.adapt_kl(0.1, kl, target=6.0, samples=100, horizon=1000) == pytest.approx(
        wanted
    )
    assert divergence.adapt_kl(0.1, kl, target=0.0, samples=100, horizon=1000) == 0.1


def test_the_kl_coefficient_settles():
    """Where the divergence falls as its price rises, the target is reached and kept."""
    coefficient = 0.01
    for _ in range(2000):
        coefficient = divergence.adapt_kl(
            coefficient, 1.0 / coefficient, target=5.0, samples=64, horizon=1000
        )
    assert 1.0 / coefficient == pytest.approx(5.0, rel=1e-3)


@pytest.fixture
def critic(tiny):
    model = critic_of(init(jax.random.key(0), tiny))
    head = jax.random.normal(jax.random.key(1), (32, 1))
    return dataclasses.replace(model, head=head)


def random_batch(rows=4, slots=12) -> Sequences:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 320, (rows, slots)).astype(np.int32)
    mask = random_mask(rng, rows, slots)
    return sequences_of(tokens, mask)


def test_a_value_reads_the_token_before(critic):
    rollout = random_batch()
    positions = jnp.broadcast_to(jnp.arange(12), rollout.tokens.shape)
    hidden, _ = forward(critic, rollout.tokens, positions)
    want = np.zeros(rollout.mask.shape)
    for b, t in zip(*np.nonzero(rollout.mask), strict=True):
        want[b, t] = np.asarray(hidden[b, t - 1], float) @ np.asarray(critic.head[:, 0], float)
    got = score_sequences(critic, rollout, rows=4)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_value_does_not_know_its_token_or_any_later(critic):
    rollout = random_batch()
    row, slot = (int(found[0]) for found in np.nonzero(rollout.mask))
    later = jnp.asarray(rollout.tokens).at[row, slot:].add(1)
    before, after = (
        score_sequences(critic, dataclasses.replace(rollout, tokens=tokens), rows=4)
        for tokens in (rollout.tokens, later)
    )
    assert float(before[row, slot]) == float(after[row, slot])
    assert float(before[row, slot + 1]) != float(after[row, slot + 1])


def test_values_do_not_depend_on_how_many_rows_go_together(critic):
    rollout = random_batch()
    want = score_sequences(critic, rollout, rows=4)
    for rows in (1, 2, 3):
        np.testing.assert_allclose(score_sequences(critic, rollout, rows=rows), want, atol=1e-5)


def test_a_new_critic_knows_nothing_and_shares_nothing(tiny):
    policy = init(jax.random.key(0), tiny)
    critic = critic_of(policy)
    assert critic.config.scalar_head and not critic.config.tied
    assert not score_sequences(critic, random_batch(), rows=4).any()
    jax.tree.map(np.testing.assert_array_equal, critic.layers, policy.layers)
    jax.jit(lambda model: model, donate_argnums=0)(policy)
    assert cast(jax.Array, policy.embed).is_deleted()
    assert not cast(jax.Array, critic.embed).is_deleted()
