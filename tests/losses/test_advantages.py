"""Every estimator against a plain Python loop, and gae against rlax."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.losses import advantages
from rlhf_jax.losses.advantages import ESTIMATORS, EstimatorConfig
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages

GROUP = 3


def random_batch(seed=0, rows=6, slots=11):
    """Token rewards, values and the mask of responses, all longer than nothing, behind prompts."""
    rng = np.random.default_rng(seed)
    at = np.arange(slots)[None]
    start = rng.integers(1, 4, (rows, 1))
    mask = (at >= start) & (at < start + rng.integers(1, 8, (rows, 1)))
    rewards, values = rng.normal(size=(2, rows, slots)).astype(np.float32)
    return np.where(mask, rewards, 0), np.where(mask, values, 0), mask


def looped_gae(rewards, values, mask, discount, gae_lambda):
    """Sums of discounted temporal differences, each written out."""
    out = np.zeros(mask.shape)
    returns = np.zeros(mask.shape)
    for b in range(len(mask)):
        slots = np.nonzero(mask[b])[0]
        r = rewards[b, slots].astype(float)
        v = [*values[b, slots].astype(float), 0.0]
        deltas = [r[i] + discount * v[i + 1] - v[i] for i in range(len(slots))]
        for i, slot in enumerate(slots):
            out[b, slot] = sum(
                (discount * gae_lambda) ** (j - i) * deltas[j] for j in range(i, len(slots))
            )
            returns[b, slot] = out[b, slot] + v[i]
    return out, returns


def looped_groups(rewards, size, kind, deviation="sample"):
    """Of groups of rewards, some of which may be missing."""
    out = []
    for start in range(0, len(rewards), size):
        own = [float(r) for r in rewards[start : start + size]]
        group = [r for r in own if not math.isnan(r)]
        mean = sum(group) / len(group)
        divisor = len(group) - (deviation == "sample")
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / divisor)
        for i, r in enumerate(own):
            others = [other for j, other in enumerate(own) if j != i and not math.isnan(other)]
            if math.isnan(r):
                out.append(math.nan)
            elif kind == "grpo":
                out.append((r - mean) / std if std > 1e-6 else 0.0)
            elif kind == "dr_grpo":
                out.append(r - mean)
            else:
                out.append(r - sum(others) / len(others))
    return out


def looped_whitening(x, mask):
    inside = [float(number) for number in x[mask]]
    mean = sum(inside) / len(inside)
    std = math.sqrt(sum((number - mean) ** 2 for number in inside) / len(inside))
    return np.where(mask, (x - mean) / std, 0.0)


@pytest.mark.parametrize("discount, gae_lambda", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_loops(discount, gae_lambda):
    batch = random_batch()
    rewards, values, mask = map(jnp.asarray, batch)
    got = advantages.gae(rewards, values, mask, discount, gae_lambda)
    for mine, theirs in zip(got, looped_gae(*batch, discount, gae_lambda), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow  # for what it needs, `.[dev]`, not for its time
def test_gae_is_rlaxs():
    import rlax

    rewards, values, mask = random_batch(1)
    got, _ = advantages.gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask), 0.97, 0.9)
    for b in range(len(mask)):
        slots = np.nonzero(mask[b])[0]
        discounts = np.where(slots == slots[-1], 0.0, 0.97).astype(np.float32)
        known = np.append(values[b, slots], np.float32(0))
        want = rlax.truncated_generalized_advantage_estimation(
            rewards[b, slots], discounts, 0.9, known
        )
        np.testing.assert_allclose(got[b, slots], want, atol=1e-5)


def test_gae_skips_what_is_not_the_responses():
    """Tokens of a tool amid the response, and whatever lies under no mask."""
    rewards, values, mask = random_batch(2)
    mask[:, 5] = False
    broken = [jnp.where(mask, x, jnp.nan) for x in (rewards, values)]
    got, returns = advantages.gae(broken[0], broken[1], jnp.asarray(mask), 0.9, 0.8)
    want, wanted_returns = looped_gae(rewards, values, mask, 0.9, 0.8)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(returns, wanted_returns, atol=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@settings(max_examples=15, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_comparisons_within_groups_are_the_loops(kind, size, groups, seed):
    rewards = np.random.default_rng(seed).integers(0, 4, size * groups).astype(np.float32) / 4
    got = getattr(advantages, kind)(jnp.asarray(rewards), size)
    np.testing.assert_allclose(got, looped_groups(rewards, size, kind), atol=1e-5)


def test_the_deviation_of_a_group_is_a_samples_or_the_populations():
    """As torch.std and as numpy have it; TRL and verl take the first."""
    rewards = np.array([0.0, 1.0, 1.0, 4.0], np.float32)
    centred = rewards - 1.5
    for deviation, ddof in (("sample", 1), ("population", 0)):
        got = advantages.grpo(jnp.asarray(rewards), 4, deviation)
        np.testing.assert_allclose(got, centred / rewards.std(ddof=ddof), rtol=1e-6)
        config = EstimatorConfig(4, deviation)
        got, _ = ESTIMATORS["grpo"].estimate(rewards[:, None], None, np.ones((4, 1), bool), config)
        np.testing.assert_allclose(got[:, 0], centred / rewards.std(ddof=ddof), rtol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("deviation", ["sample", "population"])
def test_a_sample_without_a_reward_counts_in_no_group(kind, deviation):
    rewards = np.array([np.nan, 0, 1, 4, -3, np.nan, np.nan, 2], np.float32)
    options = (deviation,) if kind == "grpo" else ()
    got = getattr(advantages, kind)(jnp.asarray(rewards), 4, *options)
    np.testing.assert_allclose(got, looped_groups(rewards, 4, kind, deviation), atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_samples_without_a_reward_are_not_trained_on(name):
    """The others are trained on as if those had never been; nor is a single one compared."""
    rewards, values, mask = random_batch()
    sums = rewards.sum(axis=1)
    sums[[1, *range(GROUP + 1, 2 * GROUP)]] = np.nan
    chosen = ESTIMATORS[name]
    config = AdvantageConfig(name, EstimatorConfig(GROUP, discount=0.9), whiten=True)
    ended = np.ones(len(mask), bool)
    zeros = np.zeros(mask.shape, np.float32)
    given = values if chosen.needs_critic else None
    trained, got, returns, _ = compute_advantages(
        sums, ended, mask, zeros, zeros, given, np.float32(0), config
    )
    dropped = np.isnan(sums)
    dropped[GROUP] = chosen.compares_group
    np.testing.assert_array_equal(trained, mask & ~dropped[:, None])
    assert np.isfinite(got).all() and not np.asarray(got)[~np.asarray(trained)].any()
    if chosen.compares_group:
        few = np.delete(sums[:GROUP], 1)
        few /= sums[~np.isnan(sums)].std()
        kind = "dr_grpo" if name == "reinforce++-baseline" else name
        want = looped_groups(few, GROUP - 1, kind)
        kept = [row for row in range(GROUP) if row != 1]
        own = [float(np.asarray(got)[row, mask[row]][0]) for row in kept]
        if kind == name:
            np.testing.assert_allclose(own, want, atol=1e-5)
    if returns is not None:
        assert np.isfinite(returns).all()


def test_an_estimator_that_knows_nothing_of_missing_rewards_is_given_the_groups_mean(monkeypatch):
    """The samples without one are not trained on, and the others stay finite."""

    def from_the_best(rewards, samples_per_prompt):
        groups = rewards.reshape(-1, samples_per_prompt)
        return (groups - groups.max(axis=1, keepdims=True)).reshape(-1)

    toy = advantages.Estimator("toy", advantages.of_samples(from_the_best), compares_group=True)
    monkeypatch.setitem(ESTIMATORS, "toy", toy)
    rewards = np.array([-4, np.nan, -1, np.nan, np.nan, 2], np.float32)
    mask = np.ones((6, 2), bool)
    zeros = np.zeros(mask.shape, np.float32)
    config = AdvantageConfig("toy", EstimatorConfig(3))
    trained, got, _, _ = compute_advantages(
        rewards, np.ones(6, bool), mask, zeros, zeros, None, np.float32(0), config
    )
    np.testing.assert_array_equal(np.asarray(trained)[:, 0], [True, False, True] + [False] * 3)
    np.testing.assert_array_equal(np.asarray(got)[:, 0], [-3, 0, 0, 0, 0, 0])


def whole(name):
    """The table's estimator in float64 loops."""
    rewards, values, mask = random_batch()
    sums = rewards.sum(axis=1)
    spread = np.where(mask, 1.0, 0.0)
    if name == "gae":
        plain, returns = looped_gae(rewards, values, mask, 0.9, 0.8)
        return looped_whitening(plain, mask), returns
    if name == "reinforce++":
        return looped_whitening(looped_gae(rewards, 0 * values, mask, 0.9, 1.0)[0], mask), None
    if name == "reinforce++-baseline":
        return looped_whitening(
            np.array(looped_groups(sums, GROUP, "dr_grpo"))[:, None] * spread, mask
        ), None
    return np.array(looped_groups(sums, GROUP, name))[:, None] * spread, None


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_is_the_loops(name):
    rewards, values, mask = map(jnp.asarray, random_batch())
    chosen = ESTIMATORS[name]
    config = EstimatorConfig(samples_per_prompt=GROUP, discount=0.9, gae_lambda=0.8)
    got = chosen.estimate(rewards, values if chosen.needs_critic else None, mask, config)
    for mine, theirs in zip(got, whole(name), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == jnp.float32
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_changes_nothing(name):
    rewards, values, mask = random_batch()
    config = EstimatorConfig(samples_per_prompt=GROUP, discount=0.9)
    chosen = jax.jit(ESTIMATORS[name].estimate, static_argnums=3)
    want, _ = chosen(rewards, values, mask, config)
    wide = [np.pad(x, ((0, GROUP), (0, 4))) for x in (rewards, values, mask)]
    got, _ = chosen(*wide, config)
    np.testing.assert_allclose(got[: len(mask), : mask.shape[1]], want, atol=1e-6)
    assert not got[len(mask) :].any()


def test_equal_rewards_give_no_signal():
    rewards = jnp.full(6, 0.1, jnp.float32)
    mask = jnp.ones((6, 4), bool)
    assert not advantages.grpo(rewards, 3).any()
    token_rewards = jnp.zeros((6, 4)).at[:, -1].set(rewards)
    config = EstimatorConfig(samples_per_prompt=3)
    got, _ = ESTIMATORS["reinforce++-baseline"].estimate(token_rewards, None, mask, config)
    np.testing.assert_allclose(got, np.zeros((6, 4)), atol=1e-6)


@pytest.mark.parametrize(("deviation", "divided"), [(2e-6, True), (1e-6, False), (0.5e-6, False)])
def test_deviations_that_are_rounding_are_not_divided_by(deviation, divided):
    """The limit is 1e-6: rewards of float32 near 1 are rounded by 1e-7."""
    rewards = jnp.asarray([-deviation, deviation] * 2, jnp.float32)
    signs = np.array([-1, 1] * 2)
    whitened = advantages.whiten(rewards, jnp.ones(4, bool))
    np.testing.assert_allclose(whitened, signs * (1 if divided else deviation), rtol=1e-4)
    compared = advantages.grpo(rewards, 2, deviation="population")
    np.testing.assert_allclose(compared, signs * divided, rtol=1e-4)


@pytest.mark.parametrize("dropped", ["no reward", "no end", "nothing to compare"])
def test_the_kl_that_steers_is_of_the_samples_that_are_trained_on(dropped):
    rewards = np.arange(4, dtype=np.float32)
    ended = np.ones(4, bool)
    if dropped == "no end":
        ended[1] = False
    else:
        rewards[1] = np.nan
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]], bool)
    apart = np.array([[0.1, 0.2, 9], [3, 3, 3], [9, 0.5, 0.7], [0.4, 9, 9]], np.float32)
    zeros = np.zeros(mask.shape, np.float32)
    config = AdvantageConfig("grpo", EstimatorConfig(2), drop_overlong=True)
    if dropped != "nothing to compare":
        config = dataclasses.replace(config, estimator="reinforce++")
    given = rewards, ended, mask, apart, zeros, None, np.float32(0.1), config
    trained, _, _, kl = compute_advantages(*given)
    kept = [2, 3] if dropped == "nothing to compare" else [0, 2, 3]
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(trained).any(axis=1)), kept)
    assert kl == pytest.approx(np.mean([apart[row][mask[row]].sum() for row in kept]), rel=1e-6)


def test_where_nothing_is_trained_on_no_kl_is_measured():
    """Else an adaptive coefficient would fall; of a single sample it is that sample's."""
    mask = np.ones((4, 3), bool)
    near = np.zeros((4, 3), np.float32)
    config = AdvantageConfig("reinforce++", EstimatorConfig(2), kl_in_reward=True)
    for known in (3, 1, 0):
        rewards = [1.0] * known + [np.nan] * (4 - known)
        given = np.array(rewards, np.float32), np.ones(4, bool), mask, near, near - 0.5, None
        trained, _, _, kl = compute_advantages(*given, np.float32(0.1), config)
        assert np.asarray(trained).any(axis=1).sum() == known and kl is not None
        assert kl == pytest.approx(1.5) if known else np.isnan(kl)


@pytest.mark.parametrize(
    ("estimator", "in_reward"), [("k1", True), ("k2", True), ("k3", True), ("k3", False)]
)
def test_the_price_of_the_kl_is_a_part_of_the_reward_where_it_belongs_there(estimator, in_reward):
    """Token by token, from the reference; without one there is none."""
    rng = np.random.default_rng(4)
    _, _, mask = random_batch()
    rewards = rng.normal(size=len(mask)).astype(np.float32)
    now, reference = np.where(mask, rng.normal(-2, 1, (2, *mask.shape)), 0.0).astype(np.float32)
    ended = np.ones(len(mask), bool)
    config = AdvantageConfig(
        "dr_grpo", EstimatorConfig(GROUP), kl_estimator=estimator, kl_in_reward=in_reward
    )
    price = {
        "k1": lambda apart: apart,
        "k2": lambda apart: apart**2 / 2,
        "k3": lambda apart: math.exp(-apart) + apart - 1,
    }[estimator]
    for compared, coefficient in ((reference, 0.3 if in_reward else 0.0), (None, 0.0)):
        paid = [
            reward - coefficient * sum(price(float(one)) for one in (x - y)[own])
            for reward, x, y, own in zip(rewards, now, reference, mask, strict=True)
        ]
        _, got, _, kl = compute_advantages(
            rewards, ended, mask, now, compared, None, np.float32(0.3), config
        )
        wanted = np.array(looped_groups(paid, GROUP, "dr_grpo"))[:, None] * mask
        np.testing.assert_allclose(got, wanted, atol=1e-5)
        apart = 0.0 if compared is None else ((now - reference) * mask).sum(axis=1).mean()
        assert kl == pytest.approx(apart, rel=1e-5)


def test_groups_must_fit():
    with pytest.raises(ValueError, match="7 rewards do not fall into groups of 4"):
        advantages.dr_grpo(jnp.zeros(7), 4)
    with pytest.raises(ValueError, match="groups of two samples or more, not 1"):
        advantages.rloo(jnp.zeros(7), 1)


def test_responses_without_an_end_are_dropped_but_compared():
    mask = np.array([[0, 1, 1], [0, 1, 0]], bool)
    zeros = np.zeros(mask.shape, np.float32)
    config = AdvantageConfig("grpo", EstimatorConfig(samples_per_prompt=2), drop_overlong=True)
    given = np.array([0, 1], np.float32), np.array([True, False]), mask, zeros, zeros, None
    trained, got, _, _ = compute_advantages(*given, np.float32(0), config)
    np.testing.assert_array_equal(trained, [[0, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(got, [[0, -(0.5**0.5), -(0.5**0.5)], [0, 0, 0]], atol=1e-6)


def test_an_estimator_is_registered_once():
    with pytest.raises(ValueError, match="There is an estimator 'grpo' already"):
        advantages.register(ESTIMATORS["grpo"])


@pytest.mark.parametrize("name", [*ESTIMATORS])
def test_samples_that_were_not_drawn_change_nothing(name):
    """As where prompts have different numbers of samples: the places of the others are empty."""
    _, values, mask = random_batch(rows=4)
    rewards = np.array([1.0, 3.0, 2.0, 5.0], np.float32)

    def estimated(rewards, values, mask, count):
        config = AdvantageConfig(name, EstimatorConfig(samples_per_prompt=count))
        ended = np.ones(len(mask), bool)
        given = (rewards, ended, mask, None, None, values, np.float32(0.0), config)
        trained, advantages, returns, _ = compute_advantages(*given)
        return trained, advantages, np.zeros(mask.shape) if returns is None else returns

    places = np.array([0, 1, 4, 6])  # of eight
    source = np.array([0, 1, 0, 0, 2, 2, 3, 3])
    spread = np.full(8, np.nan, np.float32)
    spread[places] = rewards
    empty = mask[source] & np.isin(np.arange(8), places)[:, None]
    expected = estimated(rewards, values, mask, 2)
    found = estimated(spread, values[source], empty, 4)
    assert not np.asarray(found[0])[np.setdiff1d(np.arange(8), places)].any()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.asarray(other)[places], one, atol=1e-6)
        assert np.isfinite(np.asarray(other)[places]).all()
