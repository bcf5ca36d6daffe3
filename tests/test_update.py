"""The update: a split of the work changes nothing, gradients are right, buffers are reused, nothing is
retraced.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.inference.logprobs import score_rollout
from rlhf_jax.model.transformer import init
from rlhf_jax.training.batching import micro_batches, minibatches
from rlhf_jax.training.update import (
    UpdateConfig,
    accumulate,
    apply,
    clip_by_norm,
    init_train_state,
    loss,
    make_optimizer,
    update,
)
from rlhf_jax.types import Experience, Rollout

CONFIG = UpdateConfig(micro_rows=8, bucket=8, chunk=32, kl_weight=0.1)


@pytest.fixture
def small(tiny):
    return dataclasses.replace(tiny, vocab_size=64)


def random_experience(model, rows=8, slots=30, seed=0, longest=None) -> Experience:
    """Rows of 8 tokens up to `longest`, scored under `model`; the reference differs a little."""
    rng = np.random.default_rng(seed)
    length = rng.integers(8, (longest or slots) + 1, rows).astype(np.int32)
    length[0] = longest or slots
    at = np.arange(slots)[None]
    mask = (at >= 4) & (at < length[:, None])
    tokens = np.where(at < length[:, None], rng.integers(0, 64, (rows, slots)), 0).astype(np.int32)
    zeros = np.zeros((rows, slots), np.float32)
    arrays = (tokens, mask, zeros, length, np.arange(rows, dtype=np.uint32))
    rollout = Rollout(*map(jnp.asarray, arrays))
    logprobs = np.asarray(score_rollout(model, rollout, temperature=1.0, rows=rows))
    reference = np.where(mask, logprobs + rng.normal(scale=0.2, size=mask.shape), 0.0).astype(np.float32)
    advantages = np.where(mask, rng.normal(size=(rows, 1)), 0.0).astype(np.float32)
    arrays = (logprobs, reference, np.zeros(rows, np.float32), advantages)
    return Experience(rollout, *map(jnp.asarray, arrays))


def gradient(model, experience, config):
    """One plain-SGD update's change of the weights, and its metrics."""
    state = init_train_state(jax.tree.map(jnp.copy, model), optax.sgd(1.0))
    state, metrics = update(state, experience, SGD, config)
    return jax.tree.map(jnp.subtract, model, state.policy), metrics


SGD = optax.sgd(1.0)


def assert_close(got, want, rtol):
    """Every leaf within `rtol` of the largest entry of the wanted leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max())),
        got,
        want,
    )


@pytest.mark.parametrize(
    "change", [{"micro_rows": 2, "chunk": 8}, {"micro_rows": 4, "bucket": 64}, {"bucket": 30, "remat": False}]
)
def test_how_the_work_is_split_changes_nothing(small, change):
    model = init(jax.random.key(0), small)
    experience = random_experience(model)
    want, metrics = gradient(model, experience, CONFIG)
    got, other = gradient(model, experience, dataclasses.replace(CONFIG, **change))
    assert_close(got, want, 1e-5)
    for name in metrics:
        assert other[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name


def test_loss_of_short_slots_is_the_padded_one(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model, slots=40, longest=20)
    other = init(jax.random.key(1), small)
    losses = [
        gradient(other, experience, dataclasses.replace(CONFIG, bucket=bucket))[1]["loss/policy"] for bucket in (40, 8)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_empty_rows_and_what_lies_past_a_row_change_nothing(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model)
    rollout = experience.rollout
    noisy = np.where(np.arange(30)[None] < rollout.length[:, None], rollout.tokens, 9).astype(np.int32)
    rows = dataclasses.replace(experience, rollout=dataclasses.replace(rollout, tokens=noisy))
    empty = jax.tree.map(np.zeros_like, experience)
    padded = jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, empty)
    want, _ = gradient(model, experience, CONFIG)
    got, _ = gradient(model, padded, CONFIG)
    assert_close(got, want, 1e-5)


def test_gradient_is_the_finite_difference(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(init(jax.random.key(1), small), rows=2, slots=16)
    total = jnp.float32(experience.rollout.mask.sum())
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), model)

    def at(step):
        return loss(jax.tree.map(lambda x, d: x + step * d, model, direction), experience, total, CONFIG)[0]

    got = jax.jvp(at, (jnp.float32(0),), (jnp.float32(1),))[1]
    reverse = jax.grad(at)(jnp.float32(0))
    evaluate, step = jax.jit(at), 1e-3
    want = (evaluate(jnp.float32(step)) - evaluate(jnp.float32(-step))) / (2 * step)
    assert float(got) == pytest.approx(float(reverse), rel=1e-4)
    assert float(reverse) == pytest.approx(float(want), rel=1e-2)


def test_first_minibatch_has_ratio_one(small):
    model = init(jax.random.key(0), small)
    _, metrics = gradient(model, random_experience(model), CONFIG)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/clipped"] == 0.0


def test_several_epochs_of_minibatches_improve_the_loss(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model)
    optimizer = make_optimizer(1e-3, warmup_steps=2, weight_decay=0.01)
    state = init_train_state(jax.tree.map(jnp.copy, model), optimizer)
    config = dataclasses.replace(CONFIG, epochs=3, minibatches=2, micro_rows=2)
    before, _ = loss(state.policy, experience, jnp.float32(experience.rollout.mask.sum()), config)
    state, metrics = update(state, experience, optimizer, config)
    after, _ = loss(state.policy, experience, jnp.float32(experience.rollout.mask.sum()), config)
    assert after < before
    assert int(state.step) == 1 and metrics["ratio/max"] > 1.0


def memory_of(program) -> Any:
    return program.memory_analysis()


def test_update_reuses_the_states_buffers(small):
    model = init(jax.random.key(0), small)
    optimizer = make_optimizer(1e-3)
    experience = random_experience(model)
    state = init_train_state(model, optimizer)
    grads, _ = accumulate(None, state.policy, experience, jnp.float32(100), config=CONFIG)
    step = apply.lower(state, grads, optimizer=optimizer).compile()
    assert memory_of(step).alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory_of(step).temp_size_in_bytes < sum(leaf.nbytes for leaf in jax.tree.leaves(grads)) / 4
    again = accumulate.lower(grads, state.policy, experience, jnp.float32(100), config=CONFIG).compile()
    assert memory_of(again).alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(grads))
    old = jax.tree.leaves((state.policy, state.optimizer))
    update(state, experience, optimizer, CONFIG)
    assert all(leaf.is_deleted() for leaf in old)


def test_later_updates_compile_nothing(small, compilations):
    model = init(jax.random.key(0), small)
    optimizer = make_optimizer(1e-3)
    state = init_train_state(jax.tree.map(jnp.copy, model), optimizer)
    config = dataclasses.replace(CONFIG, minibatches=2, micro_rows=2, bucket=32)
    experiences = [random_experience(model, seed=seed, longest=longest) for seed, longest in enumerate((30, 24, 17))]
    state, _ = update(state, experiences[0], optimizer, config)
    with compilations() as seen:
        for experience in experiences:
            state, _ = update(state, experience, optimizer, config)
    assert not seen


def test_compute_in_half_precision_keeps_float32_weights(small):
    model = init(jax.random.key(0), small)
    experience = random_experience(model)
    want, _ = gradient(model, experience, CONFIG)
    got, _ = gradient(model, experience, dataclasses.replace(CONFIG, dtype=jnp.bfloat16, micro_rows=4))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    assert_close(got, want, 0.1)


def test_weight_decay_spares_norms_and_biases(small):
    model: Any = init(jax.random.key(0), dataclasses.replace(small, qkv_bias=True))
    optimizer = make_optimizer(0.1, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, model)
    with jax.numpy_dtype_promotion("standard"):
        updates: Any = optimizer.update(zeros, optimizer.init(model), model)[0]
    np.testing.assert_allclose(updates.embed, -0.05 * model.embed, rtol=1e-5)
    assert not updates.norm.any() and not updates.layers.mlp_norm.any() and not updates.layers.key_bias.any()


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_optaxs(small, limit):
    grads = init(jax.random.key(0), small)
    ours: Any = clip_by_norm(limit)
    theirs: Any = optax.clip_by_global_norm(limit)
    pair = [clip.update(grads, clip.init(grads))[0] for clip in (ours, theirs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *pair)
    still, _ = ours.update(jax.tree.map(jnp.zeros_like, grads), ours.init(grads))
    assert not any(leaf.any() for leaf in jax.tree.leaves(still))


def test_minibatches_are_replayable_permutations():
    first = [rows.tolist() for rows in minibatches(12, 3, 2, seed=5, step=7)]
    assert first == [rows.tolist() for rows in minibatches(12, 3, 2, seed=5, step=7)]
    assert first != [rows.tolist() for rows in minibatches(12, 3, 2, seed=5, step=8)]
    assert sorted(np.concatenate(first[:3])) == sorted(np.concatenate(first[3:])) == list(range(12))


def test_micro_batches_hold_rows_of_like_length():
    length = np.array([9, 30, 16, 3, 17, 8])
    parts = list(micro_batches(np.arange(6), length, 2, 8))
    assert [(sorted(length[rows].tolist()), slots) for rows, slots in parts] == [
        ([3, 8], 8),
        ([9, 16], 16),
        ([17, 30], 32),
    ]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 rows cannot be split into 3 equal minibatches"):
        next(minibatches(10, 3, 1, 0, 0))
    with pytest.raises(ValueError, match="minibatch of 6 rows cannot be split into micro-batches of 4"):
        next(micro_batches(np.arange(6), np.arange(6), 4, 8))
