"""Steps of the optimizers against AdamW in plain Python, and what is not finite."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.models.transformer import init
from rlhf_jax.runtime.compilation import run_now
from rlhf_jax.training import optimizer as module
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.training.optimizer import (
    apply,
    clip_by_norm,
    make_optimizer,
    norms_and_finite,
    scheduled,
)


class Weights(NamedTuple):
    """In place of a model."""

    embed: jax.Array
    norm: jax.Array


def weights(*numbers: float) -> Any:
    """The last number is the norm's."""
    given = np.array(numbers, np.float32)
    return Weights(jnp.asarray(given[:-1]), jnp.asarray(given[-1:]))


def flat(given: Any) -> list[float]:
    return [float(number) for leaf in given for number in leaf]


def looped_adamw(gradients, rates, limit, decay, start):
    """The weights after each step (Loshchilov and Hutter 2019, algorithm 2)."""
    now = list(start)
    first = [0.0] * len(start)
    second = [0.0] * len(start)
    taken = []
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        scale = min(1.0, limit / math.sqrt(sum(g * g for g in gradient)))
        for i, g in enumerate(gradient):
            first[i] = 0.9 * first[i] + 0.1 * g * scale
            second[i] = 0.999 * second[i] + 0.001 * (g * scale) ** 2
            mean = first[i] / (1 - 0.9**step)
            root = math.sqrt(second[i] / (1 - 0.999**step))
            decayed = decay * now[i] if i < len(start) - 1 else 0.0
            now[i] -= rate * (mean / (root + 1e-8) + decayed)
        taken.append(list(now))
    return taken


@pytest.mark.parametrize(
    ("options", "limit", "decay"),
    [({}, 1.0, 0.0), ({"max_grad_norm": 3.0, "weight_decay": 0.5}, 3.0, 0.5)],
)
def test_steps_are_those_of_plain_python(options, limit, decay):
    """By default the norm is limited to 1, and no weight decays."""
    given = [[3.0, -4.0, 1.0], [0.1, 0.2, -0.1], [-2.0, 0.0, 6.0]]
    start = [1.0, -2.0, 3.0]
    optimizer = make_optimizer(0.1, **options)
    now = weights(*start)
    state = optimizer.init(now)
    wanted = looped_adamw(given, [0.1] * len(given), limit, decay, start)
    for numbers, want in zip(given, wanted, strict=True):
        gradient = Gradient(weights(*numbers), {})
        now, state = apply(now, state, gradient, jnp.bool_(True), optimizer=optimizer)
        np.testing.assert_allclose(flat(now), want, rtol=1e-5)


SHARES = {  # of the rate, when so much of what follows the warm-up is done
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (1, 2), (4, 4), (5, 3)])
@pytest.mark.parametrize("schedule", SHARES)
def test_the_rate_rises_and_falls_step_by_step(schedule, warmup, steps):
    """Read off Adam's steps, which are the rate itself where every gradient is the same."""
    optimizer = make_optimizer(scheduled(0.1, warmup, schedule, steps))
    start = weights(*[0.0] * 3)
    state = optimizer.init(start)
    update = jax.jit(optimizer.update)
    for step in range(steps + 2):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(weights(*[0.2] * 3), state, start)
        done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        want = 0.1 * (step / warmup if step < warmup else SHARES[schedule](done))
        np.testing.assert_allclose(flat(updates), -want, atol=1e-5)


def test_weight_decay_spares_norms_and_biases(tiny):
    biased = dataclasses.replace(tiny, family="qwen2")
    shapes = jax.eval_shape(lambda key: init(key, biased), jax.random.key(0))
    model: Any = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    optimizer = make_optimizer(0.1, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, model)
    with jax.numpy_dtype_promotion("standard"):
        updates: Any = jax.jit(optimizer.update)(zeros, optimizer.init(model), model)[0]
    np.testing.assert_allclose(updates.embed, -0.05, rtol=1e-5)
    spared = (updates.norm, updates.layers["mlp_norm"], updates.layers["key_bias"])
    assert not any(leaf.any() for leaf in spared)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_optaxs(limit):
    gradient = weights(3.0, -4.0, 12.0)
    ours: Any = clip_by_norm(limit)
    theirs: Any = optax.clip_by_global_norm(limit)
    pair = [clip.update(gradient, clip.init(gradient))[0] for clip in (ours, theirs)]
    np.testing.assert_allclose(*map(flat, pair), rtol=1e-6)
    still, _ = ours.update(weights(0.0, 0.0), ours.init(gradient))
    assert flat(still) == [0.0, 0.0]


def gradient_of(metric: float, *numbers: float) -> Any:
    """Of a model that is a single array."""
    model: Any = jnp.asarray(numbers)
    return Gradient(model, {"loss": jnp.float32(metric)})


BROKEN = {  # the weights and the metric of a policy's gradient, the critic's being finite
    "nothing": (3.0, 1.0, True),
    "a weight is NaN": (math.nan, 1.0, False),
    "a weight is infinite": (-math.inf, 1.0, False),
    "a metric is NaN": (3.0, math.nan, False),
}


@pytest.mark.parametrize("places", [(0, 0), (0, 1), (None, None)], ids=str)
@pytest.mark.parametrize("case", BROKEN)
def test_all_are_told_whether_all_is_finite(case, places, monkeypatch):
    """Of policy and critic, wherever each of them lies; no host waits for it in one process.

    Where all lie together one program does it.
    """
    weight, metric, whole = BROKEN[case]
    monkeypatch.delattr("rlhf_jax.runtime.to_host.fetch")
    given = [gradient_of(metric, weight, 4.0, 12.0), gradient_of(2.0, 1.0, 2.0, 2.0)]
    if places != (None, None):
        pairs = zip(given, places, strict=True)
        given = [jax.device_put(one, jax.devices()[place]) for one, place in pairs]
    programs = []

    def execute(program, *arguments):
        programs.append(program.__name__)
        return run_now(program, *arguments)

    norms, finite = norms_and_finite(given, execute)
    assert programs == (
        ["_norms_and_finite"] * 2 + ["all_of"] * 2 if places == (0, 1) else ["_norms_and_finite"]
    )
    assert [flag.item() for flag in finite] == [whole, whole]
    assert norms[1].item() == pytest.approx(3.0)
    assert math.isnan(weight) or norms[0].item() == pytest.approx(math.hypot(weight, 4, 12))
    for one, flag in zip(given, finite, strict=True):
        assert flag.devices() == one.weights.devices()


def test_gradients_that_are_laid_out_otherwise_on_one_mesh_are_examined_by_one_program():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    given = [
        jax.device_put(gradient_of(1.0, 3.0, 4.0), jax.NamedSharding(mesh, jax.P())),
        Gradient(jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("data"))), {}),
    ]
    programs = []

    def execute(program, *arguments):
        programs.append(program.__name__)
        return run_now(program, *arguments)

    norms, _ = norms_and_finite(given, execute)
    assert programs == ["_norms_and_finite"] and [norm.item() for norm in norms] == [5.0, 2.0]


def test_between_processes_the_host_passes_on_whether_all_is_finite(monkeypatch):
    """Here each device stands for a process."""
    asked = []

    def fetch(flags):
        asked.append(len(flags))
        return [np.asarray(flag) for flag in flags]

    monkeypatch.setattr(module, "owners_of", lambda place: frozenset(place.device_set))
    monkeypatch.setattr("rlhf_jax.runtime.to_host.fetch", fetch)
    for number, whole in ((3.0, True), (math.nan, False)):
        pair = zip(jax.devices(), (number, 1.0), strict=False)
        given = [jax.device_put(gradient_of(0.0, x), device) for device, x in pair]
        assert [flag.item() for flag in norms_and_finite(given)[1]] == [whole, whole]
    assert asked == [2, 2]


def test_a_step_that_is_not_finite_leaves_all_as_it_is():
    optimizer = make_optimizer(scheduled(0.1, warmup_steps=2))
    state = optimizer.init(weights(1.0, 2.0))
    kept = jax.tree.map(np.asarray, state)
    gradient = Gradient(weights(math.nan, 1.0), {})
    now, state = apply(weights(1.0, 2.0), state, gradient, jnp.bool_(False), optimizer=optimizer)
    assert flat(now) == [1.0, 2.0]
    jax.tree.map(np.testing.assert_array_equal, state, kept)
