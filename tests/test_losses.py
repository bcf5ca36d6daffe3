"""Advantages and losses against plain Python loops in float64."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.training.advantages import group_advantages
from rlhf_jax.training.losses import grpo_loss, kl_k3, policy_loss, token_mean
from rlhf_jax.types import Experience, Rollout


def looped_advantages(rewards, size):
    out = []
    for start in range(0, len(rewards), size):
        group = [float(r) for r in rewards[start : start + size]]
        mean = sum(group) / size
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / size)
        out += [(r - mean) / std if std > 1e-6 else 0.0 for r in group]
    return out


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_group_advantages_are_the_loops(size, groups, seed):
    rewards = np.random.default_rng(seed).integers(0, 4, size * groups).astype(np.float32) / 4
    got = group_advantages(jnp.asarray(rewards), size)
    np.testing.assert_allclose(got, looped_advantages(rewards, size), atol=1e-5)


def test_equal_rewards_teach_nothing():
    assert not group_advantages(jnp.full(6, 0.1, jnp.float32), 3).any()


def test_groups_must_fit():
    with pytest.raises(ValueError, match="7 rewards do not fall into groups of 4"):
        group_advantages(jnp.zeros(7), 4)


def random_experience(seed=0, rows=3, slots=9) -> Experience:
    rng = np.random.default_rng(seed)
    shape = (rows, slots)

    def normal(scale):
        return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)

    rollout = Rollout(
        tokens=jnp.zeros(shape, jnp.int32),
        mask=jnp.asarray(rng.random(shape) < 0.6),
        logprobs=jnp.zeros(shape, jnp.float32),
        length=jnp.full(rows, slots, jnp.int32),
        sample_id=jnp.arange(rows, dtype=jnp.uint32),
    )
    old, reference = -2.0 + normal(0.5), -2.0 + normal(0.5)
    return Experience(rollout, old, reference, jnp.zeros(rows, jnp.float32), normal(1.0))


def looped_loss(logprobs, experience, low, high, weight):
    """Token by token: PPO's loss and k3, and the means."""
    mask = np.asarray(experience.rollout.mask)
    old, reference = np.asarray(experience.logprobs, float), np.asarray(experience.reference_logprobs, float)
    advantages, logprobs = np.asarray(experience.advantages, float), np.asarray(logprobs, float)
    policy = kl = clipped = 0.0
    ratios = []
    for b, t in zip(*np.nonzero(mask), strict=True):
        ratio = math.exp(logprobs[b, t] - old[b, t])
        bounded = min(max(ratio, 1 - low), 1 + high)
        policy -= min(ratio * advantages[b, t], bounded * advantages[b, t])
        difference = reference[b, t] - logprobs[b, t]
        kl += math.exp(difference) - difference - 1
        clipped += ratio != bounded
        ratios.append(ratio)
    count = len(ratios)
    metrics = {
        "loss/policy": policy / count,
        "kl/mean": kl / count,
        "ratio/mean": sum(ratios) / count,
        "ratio/clipped": clipped / count,
        "ratio/max": max([*ratios, 1.0]),
        "entropy/estimate": -logprobs[mask].mean(),
    }
    return metrics["loss/policy"] + weight * metrics["kl/mean"], metrics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.3)])
def test_grpo_loss_is_the_loops(seed, low, high):
    experience = random_experience(seed)
    rng = np.random.default_rng(seed + 100)
    logprobs = experience.logprobs + jnp.asarray(rng.normal(scale=0.3, size=(3, 9)), jnp.float32)
    total = jnp.asarray(experience.rollout.mask.sum(), jnp.float32)
    loss, metrics = grpo_loss(logprobs, experience, total, clip_low=low, clip_high=high, kl_weight=0.1)
    want, wanted = looped_loss(logprobs, experience, low, high, 0.1)
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_clip_bounds_what_a_ratio_can_gain():
    """By hand: ratios e^0.5 and e^-0.5, clip 0.2, both signs of the advantage."""
    old, mask = jnp.zeros((1, 4)), jnp.ones((1, 4), bool)
    logprobs, advantages = jnp.asarray([[0.5, 0.5, -0.5, -0.5]]), jnp.asarray([[1.0, -1.0, 1.0, -1.0]])
    got = policy_loss(logprobs, old, advantages, mask, 0.2, 0.2)
    np.testing.assert_allclose(got, [[-1.2, math.exp(0.5), -math.exp(-0.5), 0.8]], rtol=1e-6)


def test_k3_averages_to_the_divergence():
    law, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    estimates = kl_k3(jnp.log(jnp.asarray(law, jnp.float32)), jnp.log(jnp.asarray(reference, jnp.float32)))
    assert (estimates >= 0).all()
    assert float((law * estimates).sum()) == pytest.approx((law * np.log(law / reference)).sum(), rel=1e-5)


def test_masked_tokens_never_count():
    """Not even infinite ones: an empty row's numbers mean nothing."""
    experience = random_experience()
    mask = experience.rollout.mask
    total = jnp.asarray(mask.sum(), jnp.float32)
    settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.1}
    want = grpo_loss(experience.logprobs, experience, total, **settings)
    broken = dataclasses.replace(
        experience,
        logprobs=jnp.where(mask, experience.logprobs, -jnp.inf),
        reference_logprobs=jnp.where(mask, experience.reference_logprobs, jnp.nan),
        advantages=jnp.where(mask, experience.advantages, jnp.nan),
    )
    got = grpo_loss(jnp.where(mask, experience.logprobs, -jnp.inf), broken, total, **settings)
    assert float(got[0]) == float(want[0])
    assert {k: float(v) for k, v in got[1].items()} == {k: float(v) for k, v in want[1].items()}


def test_token_mean_adds_up_over_parts():
    x, mask = jnp.arange(12, dtype=jnp.float32).reshape(4, 3), jnp.arange(12).reshape(4, 3) % 2 == 0
    total = jnp.float32(6)
    parts = sum(float(token_mean(x[i : i + 2], mask[i : i + 2], total)) for i in (0, 2))
    assert parts == pytest.approx(float(token_mean(x, mask, total))) == pytest.approx(5.0)
