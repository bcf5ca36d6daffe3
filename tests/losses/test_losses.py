"""Losses of policy and critic against plain Python loops in float64, and against rlax and finite
differences.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import packed_of

from rlhf_jax.algorithms.grpo import policy_gradient
from rlhf_jax.algorithms.ppo import clipped_values
from rlhf_jax.losses.aggregate import AGGREGATES
from rlhf_jax.losses.kl import KL, kl_k2
from rlhf_jax.losses.policy import LossTerms, ppo
from rlhf_jax.losses.value import explained_variance, value_loss
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.kinds import TokenTerms, is_maximum
from rlhf_jax.training.settings import TrainingSettings

DEFAULT = TrainingSettings(entropy_coefficient=0.1)


def summed(function, scores, entropy, batch, settings):
    """The sum of a loss's tokens by their weights, and its metrics."""
    losses, metrics = function(TokenTerms(scores, entropy, batch, settings))
    return jnp.sum(batch.columns["weights"] * losses), metrics


def policy_loss(logprobs, entropy, batch, settings=DEFAULT):
    return summed(policy_gradient, jnp.where(batch.mask, logprobs, 0.0), entropy, batch, settings)


def critic_loss(values, batch, settings=DEFAULT):
    return summed(clipped_values, values, None, batch, settings)


def with_columns(batch, **columns):
    return dataclasses.replace(batch, columns=batch.columns | columns)


def random_batch(seed=0, rows=3, slots=9, kl_weight=0.1, aggregate="token_mean") -> PackedSequences:
    rng = np.random.default_rng(seed)
    shape = (rows, slots)

    def normal(scale):
        return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)

    mask = rng.random(shape) < 0.6
    segments = jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1), jnp.int32)
    return packed_of(
        mask,
        segments,
        3,
        weights=jnp.asarray(AGGREGATES[aggregate](mask, 7)),
        sampled_logprobs=-2.0 + normal(0.5),
        logprobs=-2.0 + normal(0.5),
        reference_logprobs=-2.0 + normal(0.5),
        advantages=normal(1.0),
        values=normal(1.0),
        returns=normal(1.0),
        total_tokens=jnp.float32(mask.sum()),
        total_sequences=jnp.float32(rows),
        kl_weight=jnp.float32(kl_weight),
    )


def moved(batch: PackedSequences, seed=100):
    """Log-probs that differ from the old ones."""
    rng = np.random.default_rng(seed)
    return batch.columns["logprobs"] + jnp.asarray(rng.normal(scale=0.3, size=(3, 9)), jnp.float32)


def looped_weights(mask, kind):
    """Each token's weight, by hand; 7 tokens is the longest response."""
    rows = [int(row.sum()) for row in mask]
    used = [tokens for tokens in rows if tokens]
    by_row = {
        "token_mean": [1 / sum(rows)] * len(rows),
        "sequence_mean": [1 / tokens / len(used) if tokens else 0 for tokens in rows],
        "constant": [1 / (7 * len(used))] * len(rows),
    }
    return [
        [weight if real else 0.0 for real in row]
        for weight, row in zip(by_row[kind], mask, strict=True)
    ]


@pytest.mark.parametrize("kind", AGGREGATES)
def test_weights_are_the_loops(kind):
    mask = np.random.default_rng(3).random((5, 9)) < 0.5
    mask[2] = False
    mask[3] = np.arange(9) == 4  # a response of one token counts as one
    got = AGGREGATES[kind](mask, 7)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, looped_weights(mask, kind), rtol=1e-6)
    padded = AGGREGATES[kind](np.pad(mask, ((0, 2), (0, 3))), 7)
    np.testing.assert_array_equal(padded[:5, :9], got)
    assert not AGGREGATES[kind](np.zeros((2, 3), bool), 7).any()
    single = np.eye(2, 3, dtype=bool) & [[True], [False]]
    np.testing.assert_allclose(AGGREGATES[kind](single, 7), looped_weights(single, kind))


def looped_loss(logprobs, entropy, batch: PackedSequences, low, high, kl, entropy_weight):
    """Token by token: PPO's loss, the estimate, the entropy, and the means."""
    mask = np.asarray(batch.mask)
    columns = {name: np.asarray(column, float) for name, column in batch.columns.items()}
    weights = columns["weights"]
    old = columns["logprobs"]
    reference = columns["reference_logprobs"]
    advantages = columns["advantages"]
    logprobs = np.asarray(logprobs, float)
    loss = 0.0
    rows = []
    for b, t in zip(*np.nonzero(mask), strict=True):
        ratio = math.exp(logprobs[b, t] - old[b, t])
        bounded = min(max(ratio, 1 - low), 1 + high)
        policy = -min(ratio * advantages[b, t], bounded * advantages[b, t])
        d = reference[b, t] - logprobs[b, t]
        k3 = math.exp(d) - d - 1
        price = {"k2": d * d / 2, "k3": k3}[kl]
        loss += weights[b, t] * (
            policy + columns["kl_weight"] * price - entropy_weight * float(entropy[b, t])
        )
        rows.append(
            (
                policy,
                k3,
                ratio - 1 - math.log(ratio),
                ratio,
                ratio != bounded,
                -logprobs[b, t],
                entropy[b, t],
                -reference[b, t],
            )
        )
    names = (
        "loss/policy",
        "kl/mean",
        "kl/old",
        "ratio/mean",
        "ratio/clipped",
        "entropy/estimate",
        "entropy/mean",
        "reference/nats",
    )
    metrics = dict(zip(names, np.mean(rows, axis=0), strict=True))
    return loss, metrics | {"ratio/max": max(row[3] for row in rows)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.3)])
@pytest.mark.parametrize(
    "kl, aggregate", [("k3", "token_mean"), ("k2", "sequence_mean"), ("k3", "constant")]
)
def test_the_policys_loss_is_the_loops(seed, low, high, kl, aggregate):
    batch = random_batch(seed, aggregate=aggregate)
    logprobs = moved(batch, seed)
    entropy = jnp.abs(moved(batch, seed + 1))
    settings = TrainingSettings(
        clip_low=low, clip_high=high, kl_estimator=KL[kl], entropy_coefficient=0.3
    )
    loss, metrics = policy_loss(logprobs, entropy, batch, settings)
    want, wanted = looped_loss(logprobs, entropy, batch, low, high, kl, 0.3)
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_clip_bounds_what_a_ratio_can_gain():
    """By hand: ratios e^0.5 and e^-0.5, clip 0.2, both signs of the advantage."""
    old = jnp.zeros((1, 4))
    mask = jnp.ones((1, 4), bool)
    logprobs = jnp.asarray([[0.5, 0.5, -0.5, -0.5]])
    advantages = jnp.asarray([[1.0, -1.0, 1.0, -1.0]])
    got = ppo(LossTerms(logprobs, old, advantages, mask, jnp.zeros((1, 4), int), 1, 0.2, 0.2))
    np.testing.assert_allclose(got, [[-1.2, math.exp(0.5), -math.exp(-0.5), 0.8]], rtol=1e-6)


@pytest.mark.slow  # for what it needs, `.[dev]`, not for its time
def test_the_clipped_loss_is_rlaxs():
    import rlax

    batch = random_batch()
    logprobs = moved(batch)
    mask = batch.mask
    advantages = batch.columns["advantages"]
    old = jnp.asarray(batch.columns["logprobs"])
    ratios = jnp.exp(logprobs - old)
    want = rlax.clipped_surrogate_pg_loss(ratios[mask], advantages[mask], 0.2)
    segments = batch.segment_ids
    losses = ppo(LossTerms(logprobs, old, advantages, mask, segments, 3, 0.2, 0.2))
    assert float((batch.columns["weights"] * losses).sum()) == pytest.approx(float(want), rel=1e-5)


def test_the_critics_loss_is_the_loops():
    batch = random_batch(aggregate="sequence_mean")
    values = moved(batch)
    before = np.asarray(batch.columns["values"])
    returns = np.asarray(batch.columns["returns"])
    loss, metrics = critic_loss(values, batch)
    want = 0.0
    rows = []
    for b, t in zip(*np.nonzero(np.asarray(batch.mask)), strict=True):
        value = float(values[b, t])
        old = float(before[b, t])
        goal = float(returns[b, t])
        near = min(max(value, old - 0.2), old + 0.2)
        rows.append((0.5 * max((value - goal) ** 2, (near - goal) ** 2), value, near != value))
        want += float(batch.columns["weights"][b, t]) * rows[-1][0]
    assert float(loss) == pytest.approx(want, rel=1e-5)
    for name, value in zip(
        ("loss/value", "critic/mean", "critic/clipped"), np.mean(rows, axis=0), strict=True
    ):
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name


def test_what_lies_on_a_bound_is_not_clipped():
    """A ratio of 1 at a clip without width, a value as far from the old one as it may be."""
    batch = random_batch(kl_weight=0.0)
    for low, high, clipped in ((0.0, 0.0, 0.0), (-0.1, 0.2, 1.0), (0.2, -0.1, 1.0)):
        settings = dataclasses.replace(DEFAULT, clip_low=low, clip_high=high)
        _, metrics = policy_loss(batch.columns["logprobs"], None, batch, settings)
        assert float(metrics["ratio/clipped"]) == pytest.approx(clipped)
        assert "entropy/mean" not in metrics
    near = jnp.round(batch.columns["values"])
    batch = with_columns(batch, values=near)
    settings = dataclasses.replace(DEFAULT, critic_clip=0.25)
    for apart, clipped in ((0.25, 0.0), (-0.25, 0.0), (0.375, 1.0), (-0.375, 1.0)):
        _, metrics = critic_loss(near + apart, batch, settings)
        assert float(metrics["critic/clipped"]) == pytest.approx(clipped)


def test_the_largest_ratio_is_of_tokens_that_are_trained_on():
    """Below 1 where all have become less likely, whatever padding has."""
    batch = random_batch()
    assert not batch.mask.all()
    _, metrics = policy_loss(batch.columns["logprobs"] - 0.5, None, batch)
    assert float(metrics["ratio/max"]) == pytest.approx(math.exp(-0.5))


def test_a_value_that_is_masked_out_has_no_loss():
    batch = random_batch()
    mask = np.asarray(batch.mask)
    (before, returns) = (jnp.asarray(batch.columns[name]) for name in ("values", "returns"))
    losses = np.asarray(value_loss(moved(batch), before, returns, batch.mask, 0.2))
    assert (losses[mask] > 0).all() and not losses[~mask].any()


@pytest.mark.parametrize("referenced", [True, False])
def test_where_the_old_policy_is_that_of_now_its_distances_are_measured_here(referenced):
    """To the reference, which may be the old policy itself, and to what generation reported."""
    whole = random_batch()
    missing = {"logprobs"} if referenced else {"logprobs", "reference_logprobs"}
    kept = {name: column for name, column in whole.columns.items() if name not in missing}
    batch = dataclasses.replace(whole, columns=kept)
    rng = np.random.default_rng(8)
    now = -2.0 + rng.normal(scale=0.5, size=(3, 9)).astype(np.float32)
    _, metrics = policy_loss(jnp.asarray(now), None, batch)
    own = np.asarray(batch.mask)
    reference = np.asarray(whole.columns["reference_logprobs"]) if referenced else now
    to_reference = [float(x) for x in (now - reference)[own]]
    apart = [float(x) for x in (now - np.asarray(batch.columns["sampled_logprobs"]))[own]]
    wanted = {
        "kl/response": sum(to_reference) / len(now),
        "kl/mean": np.mean([math.exp(-x) + x - 1 for x in to_reference]),
        "kl/old": 0.0,
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "ratio/clipped": 0.0,
        "mismatch/kl": np.mean([math.exp(x) - x - 1 for x in apart]),
        "mismatch/mean": np.mean([abs(x) for x in apart]),
        "mismatch/max": max(abs(x) for x in apart),
    }
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert is_maximum(name) == (name in ("ratio/max", "mismatch/max"))


def test_a_clipped_value_gains_nothing_by_moving_on():
    """By hand: towards the return the gradient ends at the clip, away from it it does not."""
    mask = jnp.ones((1, 3), bool)
    old = jnp.zeros((1, 3))
    returns = jnp.asarray([[1.0, 1.0, 1.0]])
    values = jnp.asarray([[0.1, 0.5, -0.5]])
    got = jax.grad(lambda v: value_loss(v, old, returns, mask, 0.2).sum())(values)
    np.testing.assert_allclose(got, [[-0.9, 0.0, -1.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["policy", "value"])
def test_gradients_are_the_finite_differences(name):
    batch = random_batch(4)
    at = jnp.asarray(moved(batch, 5))
    entropy = jnp.zeros((3, 9))

    def loss(x):
        if name == "value":
            return critic_loss(x, batch)[0]
        return policy_loss(x, entropy + x * x, batch)[0]

    got = jax.grad(loss)(at)
    value = jax.jit(loss)
    step = 1e-3
    want = np.zeros(at.shape)
    for b, t in np.ndindex(*at.shape):
        high, low = (value(at.at[b, t].add(sign * step)) for sign in (1, -1))
        want[b, t] = (float(high) - float(low)) / (2 * step)
    np.testing.assert_allclose(got, want, atol=3e-4)
    assert np.abs(want).max() > 0.01


def test_masked_tokens_never_count():
    """Not even infinite ones: an empty row's numbers mean nothing."""
    batch = random_batch()
    mask = batch.mask

    def broken(x, value):
        return jnp.where(mask, x, value)

    values_off = {
        "logprobs": -jnp.inf,
        "reference_logprobs": jnp.nan,
        "advantages": jnp.nan,
        "values": jnp.nan,
        "returns": jnp.inf,
    }
    columns = batch.columns
    other = batch.with_columns(**{n: broken(columns[n], off) for n, off in values_off.items()})
    old = columns["logprobs"]
    values = moved(batch)
    entropy = jnp.abs(moved(batch))
    pairs = [
        (
            policy_loss(old, entropy, batch),
            policy_loss(broken(old, -jnp.inf), broken(entropy, jnp.nan), other),
        ),
        (critic_loss(values, batch), critic_loss(broken(values, jnp.inf), other)),
    ]
    for want, got in pairs:
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_token_mean_adds_up_over_parts():
    x = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    mask = jnp.arange(12).reshape(4, 3) % 2 == 0

    def mean(rows: slice) -> float:
        zeros = jnp.zeros(mask[rows].shape, jnp.int32)
        batch = packed_of(mask[rows], zeros, 1, total_tokens=jnp.float32(6))
        return float(TokenTerms(x[rows], None, batch, DEFAULT).mean(x[rows]))

    parts = mean(slice(0, 2)) + mean(slice(2, 4))
    assert parts == pytest.approx(mean(slice(0, 4))) == pytest.approx(5.0)


def test_a_baseline_of_reverse_kl_changes_no_mean_and_lowers_the_spread():
    """Of the gradients of single tokens, over a law of five tokens."""
    logits, teacher = (jax.random.normal(jax.random.key(seed), (5,)) * 2 for seed in (0, 1))
    teacher = jax.nn.log_softmax(teacher)

    def divergence(logits):
        now = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(now) * (now - teacher))

    def of_token(logits, token, baseline):
        return kl_k2(jax.nn.log_softmax(logits)[token], teacher[token] + baseline)

    law = jax.nn.softmax(logits)
    expected = jax.grad(divergence)(logits)
    spreads = []
    for baseline in (0.0, divergence(logits)):
        each = jnp.stack([jax.grad(of_token)(logits, token, baseline) for token in range(5)])
        np.testing.assert_allclose(law @ each, expected, atol=1e-5)
        spreads.append(float(law @ jnp.sum((each - expected) ** 2, axis=1)))
    assert spreads[1] < 0.8 * spreads[0]


def test_explained_variance_is_one_for_the_truth_and_zero_for_the_mean():
    rng = np.random.default_rng(6)
    returns = rng.normal(2.0, 1.0, (4, 5)).astype(np.float32)
    mask = rng.random((4, 5)) < 0.7
    inside = returns[mask].mean()
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(np.where(mask, inside, np.nan), returns, mask) == pytest.approx(
        0.0, abs=1e-6
    )
    assert explained_variance(returns - 3, returns, mask) == pytest.approx(1.0)
    assert explained_variance(-returns, returns, mask) < 0
    assert explained_variance(returns, np.ones_like(returns), mask) == 0.0
    assert explained_variance(returns, returns, np.zeros_like(mask)) == 0.0
