"""The update: a split of the work changes nothing, gradients are right, buffers are reused, nothing
is retraced.
"""

import dataclasses
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experiences import CONFIG, KL_WEIGHT, MANY, random_critic, random_experience
from learning import Optimizers, new_models, update

from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.losses.aggregate import AGGREGATES
from rlhf_jax.mesh import Layout, make_mesh, place_rows
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.sequences.minibatches import minibatches, with_shares
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training.gradients import accumulate
from rlhf_jax.training.learn import NonFiniteStep
from rlhf_jax.training.optimizer import apply, make_optimizer, norms_and_finite, scheduled
from rlhf_jax.types import Models

SGD = Optimizers(optax.sgd(1.0), optax.sgd(1.0))
ADAM = Optimizers(make_optimizer(1e-3), make_optimizer(1e-3))


@pytest.fixture
def small(tiny):
    return dataclasses.replace(tiny, vocab_size=64)


def new_state(model, optimizers, critic=None):
    """A state of copies."""
    model, critic = jax.tree.map(jnp.copy, (model, critic))
    if critic is None:
        optimizers = Optimizers(optimizers.policy)
    return new_models(model, optimizers, critic=critic), optimizers


def gradients(model, experience, config, critic=None):
    """One plain-SGD update's change of policy and critic, and its metrics."""
    state, optimizers = new_state(model, SGD, critic)
    state, metrics = update(state, experience, optimizers, config, KL_WEIGHT)
    moved = tuple(state[role].weights if role in state else None for role in ("policy", "critic"))
    return jax.tree.map(jnp.subtract, (model, critic), moved), metrics


def whole(experience, config=CONFIG, shards=1) -> PackedSequences:
    """The experience as the only micro-batch."""
    host = experience.on_host()
    weights = config.aggregate(host.mask, config.max_new_tokens)
    known = with_shares(host.with_columns(kl_weight=np.array(KL_WEIGHT, np.float32)), weights)
    tokens = host.mask.size
    (part,) = pack(known, Extent(len(host.mask), 8 * tokens, tokens), 64, shards)
    return part.batch


def share(loss, model, batch, settings):
    """A micro-batch's share of a loss."""
    hidden = read_packed(model, batch, settings.layout, settings.remat)
    return loss(model, hidden, batch, settings)[0]


def assert_close(got, want, rtol):
    """Every leaf within `rtol` of the largest entry of the wanted leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max())
        ),
        got,
        want,
    )


@pytest.mark.parametrize(
    "change, aggregate",
    [
        ({"microbatch_rows": 2, "chunk": 8}, "token_mean"),
        pytest.param({"microbatch_rows": 4}, "sequence_mean", marks=pytest.mark.slow),
        pytest.param(
            {"remat": False, "entropy_coefficient": 0.1}, "constant", marks=pytest.mark.slow
        ),
    ],
)
def test_how_the_work_is_split_changes_nothing(small, change, aggregate):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    entropy = {"entropy_coefficient": change.get("entropy_coefficient", 0.0)}
    config = dataclasses.replace(CONFIG, aggregate=AGGREGATES[aggregate], **entropy)
    want, metrics = gradients(model, experience, config, critic)
    got, other = gradients(model, experience, dataclasses.replace(config, **change), critic)
    assert_close(got, want, 1e-5)
    assert other.keys() == metrics.keys()
    for name in metrics.keys() - {"training/padding", "training/padding_flops"}:
        assert other[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name


def test_empty_rows_and_what_lies_past_a_row_change_nothing(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    config = dataclasses.replace(CONFIG, aggregate=AGGREGATES["sequence_mean"])
    experience = random_experience(model, critic)
    mask = np.asarray(experience.mask)
    length = 30 - np.argmax(mask[:, ::-1], axis=1)
    noisy = np.where(np.arange(30)[None] < length[:, None], experience.tokens, 9)
    rows = dataclasses.replace(experience, tokens=noisy.astype(np.int32))
    empty = jax.tree.map(np.zeros_like, experience)
    padded = jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, empty)
    assert_close(
        gradients(model, padded, config, critic)[0],
        gradients(model, experience, config, critic)[0],
        1e-5,
    )


def test_samples_that_are_not_trained_on_change_nothing(small):
    """Their rows are dropped by the mask alone, whatever else they hold."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    dropped = dataclasses.replace(experience, mask=jnp.asarray(experience.mask).at[4:].set(False))
    first = jax.tree.map(lambda leaf: leaf[:4], experience)
    few = dataclasses.replace(CONFIG, microbatch_rows=4)
    assert_close(
        gradients(model, dropped, CONFIG, critic)[0], gradients(model, first, few, critic)[0], 1e-5
    )


@pytest.mark.parametrize("loss", [POLICY_LOSS, CRITIC_LOSS])
def test_gradient_is_the_finite_difference(small, loss):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(
        init(jax.random.key(1), small), critic, rows=2, slots=16, top_k=True
    )
    batch = whole(experience)
    config = dataclasses.replace(CONFIG, entropy_coefficient=0.2)
    at = model if loss is POLICY_LOSS else jax.tree.map(lambda x: x * 1.1, critic)
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape) / 8, at)

    def along(step):
        moved = jax.tree.map(lambda x, d: x + step * d, at, direction)
        return share(loss, moved, batch, config)

    reverse = jax.jit(jax.grad(along))(jnp.float32(0))
    evaluate = jax.jit(along)
    step = 1e-3
    want = (evaluate(jnp.float32(step)) - evaluate(jnp.float32(-step))) / (2 * step)
    assert float(reverse) == pytest.approx(float(want), rel=1e-2)


@pytest.mark.parametrize("top_k", [False, True])
def test_first_minibatch_has_ratio_one(small, top_k):
    """And a critic that has not moved from its values."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic, top_k=top_k)
    _, metrics = gradients(model, experience, CONFIG, critic)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl/old"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio/clipped"] == metrics["critic/clipped"] == 0.0
    mask = np.asarray(experience.mask)
    values = np.asarray(experience.columns["values"])
    assert metrics["critic/mean"] == pytest.approx(values[mask].mean(), rel=1e-4)


def test_an_update_of_one_minibatch_finds_the_old_logprobs_itself(small):
    """And measures what inference would have: the KL of a sample, and the samplers' mismatch."""
    model = init(jax.random.key(0), small)
    given = random_experience(model, top_k=True)
    scored = np.asarray(given.columns["logprobs"])
    sampled = scored + np.float32(0.01) * np.asarray(given.mask)
    given = given.with_columns(sampled_logprobs=sampled)
    own = given.reading(*(given.columns.keys() - {"logprobs"}))
    (wanted, _), metrics = gradients(model, given, CONFIG)
    (found, _), others = gradients(model, own, CONFIG)
    assert_close(found, wanted, 1e-5)
    for name in metrics:
        assert others[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), name
    mask = np.asarray(given.mask)
    apart = np.where(mask, scored - np.asarray(given.columns["reference_logprobs"]), 0.0)
    assert others["kl/response"] == pytest.approx(apart.sum(axis=1).mean(), rel=1e-4, abs=1e-4)
    for name, value in mismatch(sampled, scored, mask).items():
        assert others[name] == pytest.approx(value, rel=1e-2, abs=1e-6), name
    with pytest.raises(ValueError, match="score the policy first"):
        gradients(model, own, MANY)


@pytest.mark.slow
def test_several_epochs_of_minibatches_improve_both_losses(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    optimizer = make_optimizer(scheduled(1e-3, warmup_steps=2), weight_decay=0.01)
    state, optimizers = new_state(model, Optimizers(optimizer, optimizer), critic)

    @jax.jit
    def losses(state):
        pairs = ((POLICY_LOSS, "policy"), (CRITIC_LOSS, "critic"))
        batch = whole(experience)
        return [share(loss, state[role].weights, batch, MANY) for loss, role in pairs]

    before = losses(state)
    heard = []
    state, metrics = update(state, experience, optimizers, MANY, KL_WEIGHT, observe=heard.append)
    assert all(new < old for new, old in zip(losses(state), before, strict=True))
    assert int(state["policy"].version) == 1 and metrics["ratio/max"] > 1.0
    assert len(heard) == 4 == metrics["training/minibatches_done"]
    assert all(parts.done == parts.of > 0 and parts.of % 2 == 0 for parts in heard)


def test_the_critics_update_is_its_own(small):
    """The policy's does not depend on there being one, nor the critic's on the KL weight."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    (alone, _), _ = gradients(model, experience, CONFIG)
    (beside, moved), metrics = gradients(model, experience, CONFIG, critic)
    jax.tree.map(np.testing.assert_array_equal, alone, beside)
    assert moved.head.any() and moved.embed.any() and metrics["critic/gradient_norm"] > 0
    state, optimizers = new_state(model, SGD, critic)
    state, _ = update(state, experience, optimizers, CONFIG, 0.0)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(jnp.subtract, critic, state["critic"].weights),
        moved,
    )


def test_the_critic_may_learn_alone_at_first(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    state, optimizers = new_state(model, SGD, critic)
    before: Any = jax.tree.map(np.asarray, state["policy"].weights)
    state, metrics = update(state, experience, optimizers, CONFIG, waits=1)
    jax.tree.map(np.testing.assert_array_equal, state["policy"].weights, before)
    assert metrics["critic/gradient_norm"] > 0 and "loss/policy" not in metrics
    state, metrics = update(state, experience, optimizers, CONFIG, waits=1)
    assert metrics["loss/policy"] != 0
    assert float(jnp.abs(state["policy"].weights.embed - before.embed).max())


def test_the_entropy_bonus_raises_the_entropy(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model)
    experience = experience.with_columns(advantages=jnp.zeros(experience.mask.shape))
    config = dataclasses.replace(CONFIG, entropy_coefficient=1.0)
    optimizers = Optimizers(ADAM.policy)
    state = new_models(model, optimizers)
    seen = []
    for _ in range(5):
        state, metrics = update(state, experience, optimizers, config)
        seen.append(metrics["entropy/mean"])
    assert seen == sorted(seen) and seen[-1] > seen[0] + 0.01


def test_the_rest_is_skipped_once_the_policy_is_far_from_the_old_one(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    far = Optimizers(make_optimizer(0.03), make_optimizer(1e-3))
    config = dataclasses.replace(CONFIG, epochs=4, minibatches=1, target_kl=1e-3)
    state, optimizers = new_state(model, far, critic)
    state, metrics = update(state, experience, optimizers, config)
    assert metrics["training/minibatches_done"] == 1
    once, _ = new_state(model, far, critic)
    once, _ = update(
        once, experience, optimizers, dataclasses.replace(config, epochs=1, target_kl=0.0)
    )
    jax.tree.map(np.testing.assert_array_equal, state, once)
    state, optimizers = new_state(model, far, critic)
    _, metrics = update(state, experience, optimizers, dataclasses.replace(config, target_kl=1e6))
    assert metrics["training/minibatches_done"] == 4


def test_a_step_that_is_not_finite_is_not_taken(small):
    """By neither model. The minibatch that went wrong is named, and the state in the error is as
    if it had not been; where it may be skipped, the update gives that state, and counts.
    """
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    rows = list(minibatches(8, MANY.minibatches, MANY.epochs, MANY.seed, 0))[1]
    for field, name in (("advantages", "loss/policy"), ("returns", "loss/value")):
        leaf = jnp.asarray(experience.columns[field])
        broken = experience.with_columns(**{field: leaf.at[rows[0], 5].set(jnp.nan)})
        state, optimizers = new_state(model, ADAM, critic)
        with pytest.raises(
            NonFiniteStep, match=f"{name} is nan in minibatch 2 of update 0"
        ) as error:
            update(state, broken, optimizers, MANY, KL_WEIGHT)
        kept = error.value.models
        assert np.isnan(error.value.batch.columns[field]).any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept))
        for one in kept.values():
            assert int(one.version) == 0 and int(cast(Any, one.moments)[1][0].count) == 2
        skipping = dataclasses.replace(MANY, max_skipped=2)
        state, _ = new_state(model, ADAM, critic)
        state, metrics = update(state, broken, optimizers, skipping, KL_WEIGHT)
        assert metrics["training/skipped"] == metrics["training/minibatches_done"] == 2
        assert all(map(np.isfinite, metrics.values())) and metrics["loss/policy"]
        for role, one in state.items():
            before = dataclasses.replace(one, version=one.version - 1)
            jax.tree.map(np.testing.assert_array_equal, before, kept[role])


@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_on_devices_of_their_own_policy_and_critic_skip_together(small, field):
    """And take a step together otherwise, the one that they take on one device."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    devices = jax.devices()
    layout = Layout(make_mesh(1, -1, 1, devices[:2]))
    other = Layout(make_mesh(1, -1, 1, devices[2:3]))
    apart = dataclasses.replace(CONFIG, layout=layout, max_skipped=1)

    def state_of_copies() -> Models:
        copies = jax.tree.map(jnp.copy, (model, critic))
        return new_models(copies[0], SGD, layout, copies[1], other)

    spoiled = jnp.asarray(experience.columns[field]).at[0, 5].set(jnp.nan)
    broken = experience.with_columns(**{field: spoiled})
    before = jax.tree.map(np.asarray, state_of_copies())
    state, metrics = update(state_of_copies(), broken, SGD, apart, critic_layout=other)
    assert metrics["training/skipped"] == 1
    for name in ("policy", "critic"):
        pair = (state[name].weights, before[name].weights)
        jax.tree.map(np.testing.assert_array_equal, *pair)

    together, optimizers = new_state(model, SGD, critic)
    together, _ = update(together, experience, optimizers, CONFIG)
    state, metrics = update(state_of_copies(), experience, SGD, apart, critic_layout=other)
    assert metrics["training/skipped"] == 0
    chex.assert_trees_all_close(
        jax.device_get([one.weights for one in state.values()]),
        jax.device_get([one.weights for one in together.values()]),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("shape", "rows"), [((3, 2, 1), 4), pytest.param((3, 1, 2), 8, marks=pytest.mark.slow)]
)
def test_six_devices_take_the_step_of_one_though_they_do_not_divide_the_rows(small, shape, rows):
    """Each row shard has one row or two at a time, and what is left over comes later."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    layout = Layout(make_mesh(*shape, devices=jax.devices()[2:]))
    together, optimizers = new_state(model, SGD, critic)
    together, wanted = update(together, experience, optimizers, CONFIG)
    placed = [jax.device_put(one, model_shardings(one, layout)) for one in (model, critic)]
    state = new_models(placed[0], SGD, layout, placed[1])
    own = dataclasses.replace(CONFIG, layout=layout, microbatch_rows=rows)
    state, metrics = update(state, experience, SGD, own)
    for one, other in zip(state.values(), together.values(), strict=True):
        assert_close(jax.device_get(one.weights), jax.device_get(other.weights), 1e-5)
    for name in ("loss/policy", "loss/value", "gradient/norm", "critic/gradient_norm"):
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name


def test_a_minibatch_that_is_not_finite_is_skipped_though_it_went_too_far(small):
    """With a target for the KL, whatever else is not finite."""
    model = init(jax.random.key(0), small)
    experience = random_experience(model, None)
    experience = experience.with_columns(advantages=jnp.nan * experience.columns["advantages"])
    settings = dataclasses.replace(CONFIG, max_skipped=9, minibatches=1, target_kl=1e-9)
    state, optimizers = new_state(model, ADAM)
    _, metrics = update(state, experience, optimizers, settings)
    assert metrics["training/minibatches_done"] == 0
    assert metrics["training/skipped"] == settings.epochs


def test_minibatches_skipped_before_count_in_the_row(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model, None)
    experience = experience.with_columns(advantages=jnp.nan * experience.columns["advantages"])
    settings = dataclasses.replace(CONFIG, max_skipped=3, minibatches=1, epochs=1)
    state, optimizers = new_state(model, ADAM)
    state, metrics = update(state, experience, optimizers, settings, skipped=2)
    assert metrics["training/skipped_in_row"] == 3 and "loss/policy" not in metrics
    with pytest.raises(NonFiniteStep, match=r"where (\d+) of \1 advantages are not; .* is 3"):
        update(state, experience, optimizers, settings, skipped=3)
    state, _ = new_state(model, ADAM)
    _, metrics = update(state, random_experience(model, None), optimizers, settings, skipped=3)
    assert metrics["training/skipped_in_row"] == 0


@pytest.mark.parametrize("loss", [POLICY_LOSS, CRITIC_LOSS])
def test_the_gradient_is_split_as_the_weights_are(small, loss):
    """From the first micro-batch on: each of eight devices holds an eighth of the sum."""
    layout = Layout(make_mesh(1, 8, 1))
    policy = init(jax.random.key(0), small)
    critic = random_critic(small)
    batch = place_rows(whole(random_experience(policy, critic), shards=8), layout)
    model = policy if loss is POLICY_LOSS else critic
    settings = dataclasses.replace(CONFIG, layout=layout)
    placed = jax.device_put(model, model_shardings(model, layout))
    gradient = accumulate(None, placed, batch, loss=loss, settings=settings)
    wanted = model_shardings(gradient.weights, layout)
    for leaf, place in zip(jax.tree.leaves(gradient.weights), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    assert not cast(Any, gradient.weights.layers)["down"].sharding.is_fully_replicated


def memory_of(program) -> Any:
    return program.memory_analysis()


def test_update_reuses_the_states_buffers(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    state, optimizers = new_state(model, ADAM, critic)
    settings = {"loss": POLICY_LOSS, "settings": CONFIG}
    policy = state["policy"]
    gradient = accumulate(None, policy.weights, whole(experience), **settings)
    _, (finite,) = norms_and_finite([gradient])
    step = apply.lower(
        policy.weights, policy.moments, gradient, finite, optimizer=optimizers.policy
    ).compile()
    kept = jax.tree.leaves((policy.weights, policy.moments))
    assert memory_of(step).alias_size_in_bytes >= sum(leaf.nbytes for leaf in kept)
    assert (
        memory_of(step).temp_size_in_bytes
        < sum(leaf.nbytes for leaf in jax.tree.leaves(gradient)) / 4
    )
    again = accumulate.lower(gradient, policy.weights, whole(experience), **settings).compile()
    assert memory_of(again).alias_size_in_bytes >= sum(
        leaf.nbytes for leaf in jax.tree.leaves(gradient)
    )
    old = jax.tree.leaves([(one.weights, one.moments) for one in state.values()])
    update(state, experience, optimizers, CONFIG)
    assert all(leaf.is_deleted() for leaf in old)


def test_later_updates_compile_nothing(small, compilations):
    """Where their shapes were seen before; also with another KL coefficient."""
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    state, optimizers = new_state(model, ADAM, critic)
    experiences = [
        random_experience(model, critic, seed=seed, longest=longest)
        for seed, longest in enumerate((30, 24, 17))
    ]
    settings = dataclasses.replace(MANY, epochs=1, minibatches=1)
    for experience in experiences:
        state, _ = update(state, experience, optimizers, settings, 0.1)
    with compilations() as seen:
        for index, experience in enumerate(experiences):
            state, _ = update(state, experience, optimizers, settings, 0.2 * index)
    assert not seen


@pytest.mark.slow
def test_compute_in_half_precision_keeps_float32_weights(small):
    model = init(jax.random.key(0), small)
    critic = random_critic(small)
    experience = random_experience(model, critic)
    want, _ = gradients(model, experience, CONFIG, critic)
    layout = Layout(dtype=jnp.dtype(jnp.bfloat16))
    half = dataclasses.replace(CONFIG, layout=layout, microbatch_rows=4)
    got, _ = gradients(model, experience, half, critic)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    assert_close(got, want, 0.1)
