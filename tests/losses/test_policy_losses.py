"""The losses of the policy, against loops and limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.config import default
from rlhf_jax.config.derived import aggregate_name
from rlhf_jax.losses.aggregate import AGGREGATES
from rlhf_jax.losses.kl import KL
from rlhf_jax.losses.policy import LOSSES, LossTerms

LOW, HIGH = 0.2, 0.3
DUAL_CLIP = 3.0  # c of Ye et al. 2020, table 2
SAMPLES = 3


def random_terms(seed=0, apart=0.5) -> LossTerms:
    rng = np.random.default_rng(seed)
    shape = (2, 12)
    old = rng.normal(-2, 1, shape)
    mask = rng.random(shape) < 0.8
    owner = np.sort(rng.integers(0, SAMPLES, shape), axis=1)
    of_sample = rng.normal(size=(2, SAMPLES))
    advantages = np.take_along_axis(of_sample, owner, axis=1)
    now = np.where(mask, old + rng.normal(0, apart, shape), 0.0)
    numbers = (now, np.where(mask, old, 0.0), advantages)
    now, old, advantages = (jnp.asarray(x, jnp.float32) for x in numbers)
    return LossTerms(now, old, advantages, jnp.asarray(mask), owner, SAMPLES, LOW, HIGH)


def summed(name: str, terms: LossTerms):
    """The sum over the mask, and its gradient by the log-probs."""

    def total(logprobs):
        return jnp.where(terms.mask, LOSSES[name](terms._replace(logprobs=logprobs)), 0.0).sum()

    value, slope = jax.value_and_grad(total)(terms.logprobs)
    return float(value), np.asarray(slope)


def looped(name: str, terms: LossTerms) -> float:
    """The same in Python, token by token."""
    total = 0.0
    for shard, token in np.argwhere(terms.mask):
        own = np.asarray(terms.mask[shard]) & (
            terms.segment_ids[shard] == terms.segment_ids[shard, token]
        )
        apart = np.asarray(terms.logprobs[shard] - terms.old_logprobs[shard], np.float64)
        log_ratio = apart[own].mean() if name == "gspo" else apart[token]
        ratio = np.exp(log_ratio)
        clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
        advantage = float(terms.advantages[shard, token])
        logprob = float(terms.logprobs[shard, token])
        if name == "cispo":
            gain = clipped * advantage * logprob
        elif name == "reinforce":
            gain = advantage * logprob
        else:
            gain = min(ratio * advantage, clipped * advantage)
            if name == "dual_clip" and advantage < 0:
                gain = max(gain, DUAL_CLIP * advantage)
        total -= gain
    return float(total)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_the_loops(name, seed):
    terms = random_terms(seed, apart=1.0)
    assert summed(name, terms)[0] == pytest.approx(looped(name, terms), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_policy_all_have_the_gradient_of_the_policys_score(name):
    """-A for each token, whatever the loss: there they are one algorithm."""
    terms = random_terms()
    terms = terms._replace(logprobs=terms.old_logprobs)
    _, slope = summed(name, terms)
    np.testing.assert_allclose(slope, -np.where(terms.mask, terms.advantages, 0.0), atol=1e-6)


def test_gspos_gradient_is_of_the_samples_own_ratio():
    """Within the clip, d/dlogp of s(sample) A summed over its tokens is s A for each."""
    terms = random_terms(apart=0.05)
    _, slope = summed("gspo", terms)
    of_sample = jnp.exp(terms.sample_means(terms.logprobs - terms.old_logprobs))
    want = -np.where(terms.mask, of_sample * terms.advantages, 0.0)
    np.testing.assert_allclose(slope, want, rtol=1e-5, atol=1e-6)


def test_the_mean_of_a_sample_is_of_its_own_tokens():
    """Of one token, of several, of none; what is masked out counts in none."""
    x = jnp.asarray([[3.0, 5.0, 9.0, 1.0, 2.0, 7.0]])
    mask = jnp.asarray([[1, 1, 0, 1, 1, 1]], bool)
    owner = jnp.asarray([[0, 2, 2, 2, 3, 3]])
    terms = LossTerms(x, x, x, mask, owner, 5, LOW, HIGH)
    np.testing.assert_allclose(terms.sample_means(x), [[3.0, 3.0, 3.0, 3.0, 4.5, 4.5]])
    np.testing.assert_array_equal(terms._replace(old_logprobs=0 * x).ratios[0, 2], 1.0)


def test_cispo_keeps_the_gradient_that_ppo_clips():
    terms = random_terms(apart=2.0)
    lost = (summed("ppo", terms)[1] == 0) & np.asarray(terms.mask)
    assert lost.any() and (summed("cispo", terms)[1][lost] != 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_out_changes_nothing(name):
    terms = random_terms()
    spoiled = jnp.where(terms.mask, terms.advantages, 1e6)
    assert summed(name, terms)[0] == summed(name, terms._replace(advantages=spoiled))[0]


@pytest.mark.parametrize(
    ("loss", "estimator", "asked", "name"),
    [
        ("ppo", "grpo", "auto", "token_mean"),
        ("gspo", "grpo", "auto", "sequence_mean"),
        ("ppo", "dr_grpo", "auto", "constant"),
        ("gspo", "dr_grpo", "auto", "sequence_mean"),
        ("cispo", "rloo", "auto", "token_mean"),
        ("gspo", "dr_grpo", "token_mean", "token_mean"),
    ],
)
def test_the_algorithm_brings_how_tokens_are_summed(loss, estimator, asked, name):
    config = default()
    config.training.aggregate = asked
    config.algorithm.update(loss=loss, estimator=estimator)
    assert aggregate_name(config) == name


def test_gspo_as_configured_is_the_papers_objective():
    """Zheng et al. 2025, eq. 5: the mean over samples of min(s A, clip(s) A), each of one ratio."""
    rng = np.random.default_rng(0)
    lengths = (2, 9, 5)
    apart = [rng.normal(0, 0.3, length) for length in lengths]
    advantages = rng.normal(size=3)
    ratios = np.array([np.exp(one.mean()) for one in apart])
    clipped = np.clip(ratios, 1 - LOW, 1 + HIGH)
    want = -np.minimum(ratios * advantages, clipped * advantages).mean()

    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    now = np.zeros(mask.shape, np.float32)
    now[mask] = np.concatenate(apart)
    of_token = np.where(mask, advantages[:, None], 0.0)
    owner = np.zeros(mask.shape, int)
    logprobs, old, gains = (jnp.asarray(x, jnp.float32) for x in (now, 0 * now, of_token))
    terms = LossTerms(logprobs, old, gains, jnp.asarray(mask), owner, 1, LOW, HIGH)
    config = default()
    config.algorithm.loss = "gspo"
    weights = AGGREGATES[aggregate_name(config)](mask, 9)
    assert float((weights * LOSSES["gspo"](terms)).sum()) == pytest.approx(want, rel=1e-5)


def one_term(apart: float) -> LossTerms:
    """Of one token whose log-ratio is `apart`."""
    one = jnp.ones((1, 1), jnp.float32)
    number = jnp.zeros((1, 1), jnp.int32)
    return LossTerms(apart * one, 0 * one, one, one > 0, number, 1, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_out_of_all_bounds_is_a_finite_loss(name, advantage):
    def loss(apart):
        given = one_term(1.0)
        given = given._replace(logprobs=apart, advantages=advantage * given.advantages)
        return LOSSES[name](given).sum()

    for apart in (-1e4, -100.0, 100.0, 1e4):
        value, slope = jax.value_and_grad(loss)(jnp.full((1, 1), apart))
        assert jnp.isfinite(value) and jnp.isfinite(slope).all(), apart


def test_only_what_exp_is_given_is_bounded():
    """Ratios within are what they were, bit for bit; a ratio of 1 is 1, and has its gradient."""
    for apart in (-19.0, -0.1, 0.0, 1e-7, 3.0):
        np.testing.assert_array_equal(one_term(apart).ratios, jnp.exp(jnp.full((1, 1), apart)))
    assert one_term(0.0).ratios.item() == 1.0
    assert jax.grad(lambda x: one_term(x).ratios.sum())(0.0) == 1.0
    assert one_term(50.0).ratios.item() == pytest.approx(np.exp(20.0), rel=1e-6)
    far = jnp.full((1, 1), -100.0)
    assert KL["k3"](far, 0 * far).item() == pytest.approx(np.expm1(20.0) - 100.0, rel=1e-6)
    assert KL["k1"](far, 0 * far).item() == -100.0 and KL["k2"](far, 0 * far).item() == 5000.0


def test_a_loss_of_a_file_is_a_function(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("NUMBER = 3\n\ndef flat(terms):\n    return terms.advantages\n")
    assert float(LOSSES[f"{own}:flat"](one_term(0.5))[0, 0]) == 1.0
    with pytest.raises(ValueError, match=r"own\.py:NUMBER' is no function of rlhf_jax\.LossTerms"):
        LOSSES[f"{own}:NUMBER"]
