"""One update of policy and critic: epochs of minibatches, cut into micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.inference.logprobs import packed_logprobs
from rlhf_jax.inference.packing import pack, padding_share
from rlhf_jax.inference.values import packed_values
from rlhf_jax.mesh import ONE_DEVICE, Layout, model_shardings, pin_weights, place_rows
from rlhf_jax.model.transformer import cast, stack
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.runtime.compilation import Execute, compile_only, run_now
from rlhf_jax.training.batching import MicroBatch, micro_batch, minibatches, select
from rlhf_jax.training.losses import explained_variance, summed_policy_loss, summed_value_loss
from rlhf_jax.training.optimizer import Gradient, Optimizers, apply, examine_all
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Experience, Model, TrainState

LossFunction = Callable[
    [Model, MicroBatch, TrainingSettings], tuple[jax.Array, dict[str, jax.Array]]
]


class NonFiniteStep(ValueError):
    """Report that minibatches had numbers that are not finite, more in a row than may be skipped.

    `experience` is the batch that was to be learned from. `state` is finite: it lacks the steps of
    the minibatches that went wrong.
    """

    def __init__(self, message: str, experience: Experience, state: TrainState):
        super().__init__(message)
        self.experience = experience
        self.state = state


def init_train_state(
    policy: Model,
    optimizers: Optimizers,
    layout: Layout = ONE_DEVICE,
    critic: Model | None = None,
    critic_layout: Layout | None = None,
) -> TrainState:
    """Return a state of `policy` and `critic`, in float32 with stacked layers.

    Each lies as its layout says, the critic as the policy where it has none. The models are used
    up: a caller that goes on with the same weights, as a reference say, passes a copy. ValueError
    where there is a critic or its optimizer, but not both.
    """
    if (critic is None) != (optimizers.critic is None):
        raise ValueError("A critic and its optimizer come together; give both or neither.")

    def with_moments(
        model: Model, optimizer: optax.GradientTransformation
    ) -> tuple[Model, optax.OptState]:
        model = cast(stack(model), jnp.float32)
        return model, optimizer.init(typed(optax.Params, model))

    def make(policy: Model) -> TrainState:
        policy, moments = with_moments(policy, optimizers.policy)
        return TrainState(policy=policy, optimizer=moments, step=jnp.zeros((), jnp.int32))

    def placed(make: Callable, model: Model, layout: Layout) -> Any:
        """Make something of a model, which is used up, as the layout says."""
        shardings = None
        if layout.mesh is not None:
            shardings = model_shardings(jax.eval_shape(make, model), layout)
        return jax.jit(make, donate_argnums=0, out_shardings=shardings)(model)

    state: TrainState = placed(make, policy, layout)
    if critic is None or optimizers.critic is None:
        return state
    make_critic = functools.partial(with_moments, optimizer=optimizers.critic)
    critic, moments = placed(make_critic, critic, critic_layout or layout)
    return dataclasses.replace(state, critic=critic, critic_optimizer=moments)


def update(
    state: TrainState,
    experience: Experience,
    optimizers: Optimizers,
    settings: TrainingSettings,
    kl_weight: float = 0.0,
    observe: Callable[[PhaseParts], None] = lambda parts: None,
    skipped: int = 0,
) -> tuple[TrainState, dict[str, float]]:
    """Train on one experience: `epochs` times `minibatches` optimizer steps.

    The given state is used up. A minibatch's loss is a weighted sum over its tokens, so the result
    does not depend on `microbatch_rows` or `length_bucket`. Gradients of policy and critic are
    taken one after the other, so their activations never coexist. `kl_weight` is that of the
    divergence in the loss. `observe` is called before each minibatch, with its micro-batches.
    `step` counts updates and, with the seed, orders the rows. In the first `critic_steps_alone`
    updates the policy stays as it is.

    A minibatch of which a number is not finite, the policy's or the critic's, is skipped: neither
    takes a step. NonFiniteStep where more than `max_skipped` come in a row, of which `skipped` came
    before this update. The metrics, means over the other minibatches (maxima for `.../max`), are
    read from the device once, at the end; with `target_kl`, one of them after each minibatch.
    """
    host = jax.tree.map(np.asarray, experience)
    parts_of_epoch = (len(host.rewards), settings.minibatches)
    step = int(state.step)
    order = minibatches(*parts_of_epoch, settings.epochs, seed=settings.seed, step=step)
    if host.logprobs is None and settings.epochs * settings.minibatches > 1:
        raise ValueError(
            "Several minibatches need the log-probs from before the update; score the policy first."
        )
    history = []
    padding = []
    done = 0
    for rows in [rows for rows in order if host.mask[rows].any()]:
        minibatch = select(host, rows)
        parts, share = _micro_batches(minibatch, kl_weight, settings)
        padding.append(share)
        observe(progress := PhaseParts(len(parts) * (1 if optimizers.critic is None else 2)))
        of_policy = of_critic = None
        if step >= settings.critic_steps_alone:
            policy = ("policy_training", policy_objective, state.policy)
            of_policy = _sum_gradients(*policy, parts, settings, progress)
            if settings.target_kl:
                told = jax.device_get(of_policy.metrics)
                if told["kl/old"] > settings.target_kl and np.isfinite([*told.values()]).all():
                    history.append(told)
                    break
        if optimizers.critic is not None:
            critic = typed(Model, state.critic)
            own = settings.of_critic
            if own != settings:
                parts, _ = _micro_batches(minibatch, kl_weight, own)
            learner = ("critic_training", critic_objective, critic)
            of_critic = _sum_gradients(*learner, parts, own, progress)
        state, metrics = _take_steps(state, of_policy, of_critic, optimizers)
        history.append(metrics)
        done += 1

    metrics = _means(jax.device_get(history), experience, state, settings.max_skipped, skipped)
    metrics["training/minibatches_done"] = done - metrics["training/skipped"]
    metrics["training/padding"] = float(np.mean(padding)) if padding else 0.0
    if host.values is not None:
        explained = explained_variance(host.values, host.returns, host.mask)
        metrics |= {"critic/explained_variance": explained} if math.isfinite(explained) else {}
    return dataclasses.replace(state, step=state.step + 1), metrics


def compile_update(
    state: TrainState, experience: Experience, optimizers: Optimizers, settings: TrainingSettings
) -> None:
    """Compile what the first minibatch of `update` runs, and run nothing."""
    of_step = (settings.minibatches, 1)
    samples = len(experience.rewards)
    rows = next(minibatches(samples, *of_step, seed=settings.seed, step=int(state.step)))
    minibatch = select(experience, rows)
    learners: list[tuple[str, LossFunction, Model, Any, optax.GradientTransformation]] = [
        ("policy_training", policy_objective, state.policy, state.optimizer, optimizers.policy)
    ]
    if optimizers.critic is not None:
        critic = typed(Model, state.critic)
        moments = state.critic_optimizer
        learners.append(("critic_training", critic_objective, critic, moments, optimizers.critic))
    gradients = []
    for call, objective, model, _, _ in learners:
        own = settings if objective is policy_objective else settings.of_critic
        parts, _ = _micro_batches(minibatch, 0.0, own)
        gradients.append(_sum_gradients(call, objective, model, parts, own, execute=compile_only))
    _, finite = examine_all(gradients, compile_only)
    for (_, _, model, moments, optimizer), gradient, flag in zip(
        learners, gradients, finite, strict=True
    ):
        compile_only(apply, model, moments, gradient, flag, optimizer=optimizer)


def policy_objective(
    policy: Model, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a micro-batch's share of the policy's loss, and metrics: see `summed_policy_loss`."""
    logprobs, entropy = packed_logprobs(
        policy,
        batch.packed,
        batch.support,
        temperature=settings.temperature,
        entropy=settings.entropy_coefficient != 0,
        chunk=settings.chunk,
        layout=settings.layout,
        remat=settings.remat,
    )
    return summed_policy_loss(
        logprobs,
        entropy,
        batch,
        loss=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_estimator=settings.kl_estimator,
        entropy_coefficient=settings.entropy_coefficient,
    )


def critic_objective(
    critic: Model, batch: MicroBatch, settings: TrainingSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a micro-batch's share of the critic's loss, and metrics: see `summed_value_loss`."""
    values = packed_values(critic, batch.packed, layout=settings.layout, remat=settings.remat)
    return summed_value_loss(values, batch, clip=settings.critic_clip)


@functools.partial(jax.jit, static_argnames=("objective", "settings"), donate_argnums=0)
def accumulate(
    total: Gradient | None,
    model: Model,
    batch: MicroBatch,
    *,
    objective: LossFunction,
    settings: TrainingSettings,
) -> Gradient:
    """Return `total` plus the gradient of one micro-batch, both float32, and the metrics so far.

    `total` is overwritten; it is None before the first micro-batch. The gradient is taken in the
    compute dtype, so that what exists beside the sum is no larger than that.
    """
    weights, metrics = jax.grad(objective, has_aux=True)(
        cast(model, settings.layout.dtype), batch, settings
    )
    # Pinned, or XLA keeps the whole sum on every device.
    weights = pin_weights(cast(weights, jnp.float32), settings.layout)
    if total is None:
        return Gradient(weights, metrics)
    merged = {
        name: (jnp.maximum if name.endswith("/max") else jnp.add)(total.metrics[name], value)
        for name, value in metrics.items()
    }
    return Gradient(jax.tree.map(jnp.add, total.weights, weights), merged)


def _take_steps(
    state: TrainState,
    of_policy: Gradient | None,
    of_critic: Gradient | None,
    optimizers: Optimizers,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take a minibatch's steps of policy and critic, or none where a number is not finite.

    Returns the state and all metrics, norms included. A model without a gradient stays as it is.
    """
    given = [gradient for gradient in (of_policy, of_critic) if gradient is not None]
    norms, finite = examine_all(given)
    metrics: dict[str, jax.Array] = {}
    if of_policy is not None:
        policy, moments = apply(
            state.policy, state.optimizer, of_policy, finite[0], optimizer=optimizers.policy
        )
        state = dataclasses.replace(state, policy=policy, optimizer=moments)
        metrics |= of_policy.metrics | {"gradient/norm": norms[0]}
    if of_critic is not None:
        critic, moments = apply(
            typed(Model, state.critic),
            state.critic_optimizer,
            of_critic,
            finite[-1],
            optimizer=typed(optax.GradientTransformation, optimizers.critic),
        )
        state = dataclasses.replace(state, critic=critic, critic_optimizer=moments)
        metrics |= of_critic.metrics | {"critic/gradient_norm": norms[-1]}
    return state, metrics


def _micro_batches(
    minibatch: Experience, kl_weight: float, settings: TrainingSettings
) -> tuple[list[MicroBatch], float]:
    """Return the micro-batches of a minibatch, all of the host, and the share of padding."""
    weights = settings.aggregate(np.asarray(minibatch.mask), settings.max_new_tokens)
    packed = pack(
        minibatch.rollout,
        minibatch.mask,
        settings.microbatch_rows,
        settings.length_bucket,
        settings.layout.row_shards,
    )
    parts = [micro_batch(minibatch, weights, kl_weight, part) for part in packed]
    return parts, padding_share(packed)


def _sum_gradients(
    call: str,
    objective: LossFunction,
    model: Model,
    parts: list[MicroBatch],
    settings: TrainingSettings,
    progress: PhaseParts | None = None,
    execute: Execute = run_now,
) -> Gradient:
    """Return the gradient of a minibatch of host arrays, of at least one micro-batch.

    Each micro-batch is placed when the one before it is summed, and noted in `progress` as one of
    the call.
    """
    total = None
    for part in parts:
        began = time.perf_counter()
        placed = place_rows(part, settings.layout)
        total = execute(accumulate, total, model, placed, objective=objective, settings=settings)
        if progress is not None:  # a copy, for the sum itself is used up by the next
            told = jnp.copy(next(iter(total.metrics.values())))
            progress.hand(call, began, told, part.packed)
    assert total is not None
    return total


def _means(
    history: list[dict[str, Any]],
    experience: Experience,
    state: TrainState,
    max_skipped: int,
    in_row: int,
) -> dict[str, float]:
    """Return each metric's mean over the minibatches that have it, or its maximum for `.../max`.

    Minibatches with a number that is not finite were skipped, and are only counted; `in_row` were
    skipped before. NonFiniteStep where more than `max_skipped` come in a row. Without a minibatch a
    few metrics are 0.
    """
    taken = []
    for index, metrics in enumerate(history):
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        in_row = in_row + 1 if broken else 0
        if not broken:
            taken.append(metrics)
        elif in_row > max_skipped:
            # A loss says more than what follows from it.
            name = min(broken, key=lambda name: not name.startswith("loss/"))
            raise NonFiniteStep(
                f"{name} is {float(metrics[name])} in minibatch {index + 1} of update"
                f" {int(state.step)}{_not_finite(experience)}; its step was not taken, and"
                f" training.max_skipped is {max_skipped}: look for a reward out of scale, or lower"
                " the learning rate and go on with checkpoint.allow_changes=True.",
                experience,
                state,
            )
    means = {"loss/policy": 0.0, "kl/mean": 0.0, "gradient/norm": 0.0}
    for name in dict.fromkeys(name for metrics in taken for name in metrics):
        values = [float(metrics[name]) for metrics in taken if name in metrics]
        means[name] = max(values) if name.endswith("/max") else float(np.mean(values))
    skipped = float(len(history) - len(taken))
    return means | {"training/skipped": skipped, "training/skipped_in_row": float(in_row)}


def _not_finite(experience: Experience) -> str:
    """Say how many numbers of which kind are not finite, of those that a loss reads."""
    told = ""
    for name in ("logprobs", "reference_logprobs", "values", "advantages"):
        numbers = getattr(experience, name)
        bad = 0 if numbers is None else int((~np.isfinite(numbers[experience.mask])).sum())
        if bad:
            told += (
                f", where {bad} of {int(experience.mask.sum())} {name.replace('_', ' ')} are not"
            )
    return told
