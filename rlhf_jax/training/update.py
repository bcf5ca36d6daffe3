"""One update of policy and critic: epochs of minibatches, cut into micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rlhf_jax.inference.logprobs import packed_logprobs
from rlhf_jax.inference.packing import pack, padding_share
from rlhf_jax.inference.values import packed_values
from rlhf_jax.mesh import ONE_DEVICE, Layout, model_shardings, pin_weights, place_rows
from rlhf_jax.model.transformer import cast, stack
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.runtime.compilation import Execute, call, compile_only
from rlhf_jax.training.batching import MicroBatch, micro_batch, minibatches, select
from rlhf_jax.training.losses import explained_variance, summed_policy_loss, summed_value_loss
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Experience, Model, TrainState


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """Hold what turns gradients into steps; without a critic its optimizer is None."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation | None = None


@struct.dataclass
class Gradient:
    """Hold the gradient of a minibatch, summed over the micro-batches so far, and its metrics."""

    weights: Model  # float32
    metrics: dict[str, jax.Array]


LossFunction = Callable[
    [Model, MicroBatch, TrainingSettings], tuple[jax.Array, dict[str, jax.Array]]
]


# By the names that training.schedule may have: of (rate, steps), the rate by step.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "constant": lambda rate, steps: optax.constant_schedule(rate),
    "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
    "cosine": optax.cosine_decay_schedule,
}


class NonFiniteStep(ValueError):
    """Report a number that is not finite, in a step that was therefore not taken.

    `experience` is the batch that was to be learned from. `state`, where an update has begun, is
    finite: it lacks the steps of the minibatches that went wrong.
    """

    def __init__(self, message: str, experience: Experience, state: TrainState | None = None):
        super().__init__(message)
        self.experience = experience
        self.state = state


def make_optimizer(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    schedule: str = "constant",
    steps: int = 0,
    max_grad_norm: float = 1.0,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Return AdamW after clipping by the global norm (Loshchilov and Hutter 2019).

    The rate rises linearly over `warmup_steps` and then stays, or falls to 0 over what is left of
    `steps`, by one of `SCHEDULES`. Decay of weights spares norms and biases.
    """

    def decays(model: Model) -> Model:
        names = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name, model)
        return jax.tree.map(lambda name: not name.endswith(("norm", "bias")), names)

    rate = learning_rate
    if warmup_steps or schedule != "constant":
        falls = SCHEDULES[schedule](learning_rate, max(1, steps - warmup_steps))
        rises = optax.linear_schedule(0.0, learning_rate, max(1, warmup_steps))
        rate = optax.join_schedules([rises, falls], [warmup_steps])
    adamw = optax.adamw(rate, weight_decay=weight_decay, mask=decays)
    return optax.chain(clip_by_norm(max_grad_norm), adamw)


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """Return the transformation g * min(1, limit / |g|), with |g| over all gradients.

    (Pascanu et al. 2013.) `optax.clip_by_global_norm` divides each entry. That is too costly for
    XLA to repeat in each of Adam's moments, so it stores a second copy of the gradients. A product
    is repeated, and nothing is stored.
    """

    def clip(grads, params):
        del params
        scale = jnp.minimum(1.0, limit / optax.global_norm(grads))
        return jax.tree.map(lambda leaf: leaf * scale, grads)

    return optax.stateless(clip)


def init_train_state(
    policy: Model, optimizers: Optimizers, layout: Layout = ONE_DEVICE, critic: Model | None = None
) -> TrainState:
    """Return a state of `policy` and `critic`, in float32 with stacked layers.

    It lies as the layout says. The models are used up: a caller that goes on
    with the same weights, as a reference say, passes a copy. ValueError where there is a critic or
    its optimizer, but not both.
    """
    if (critic is None) != (optimizers.critic is None):
        raise ValueError("A critic and its optimizer come together; give both or neither.")

    def with_moments(
        model: Model, optimizer: optax.GradientTransformation
    ) -> tuple[Model, optax.OptState]:
        model = cast(stack(model), jnp.float32)
        return model, optimizer.init(typed(optax.Params, model))

    def make(policy: Model, critic: Model | None) -> TrainState:
        policy, moments = with_moments(policy, optimizers.policy)
        state = TrainState(policy=policy, optimizer=moments, step=jnp.zeros((), jnp.int32))
        if critic is None or optimizers.critic is None:
            return state
        critic, moments = with_moments(critic, optimizers.critic)
        return dataclasses.replace(state, critic=critic, critic_optimizer=moments)

    shardings = None
    if layout.mesh is not None:
        shardings = model_shardings(jax.eval_shape(make, policy, critic), layout)
    return jax.jit(make, donate_argnums=(0, 1), out_shardings=shardings)(policy, critic)


def update(
    state: TrainState,
    experience: Experience,
    optimizers: Optimizers,
    settings: TrainingSettings,
    kl_weight: float = 0.0,
    observe: Callable[[PhaseParts], None] = lambda parts: None,
) -> tuple[TrainState, dict[str, float]]:
    """Train on one experience: `epochs` times `minibatches` optimizer steps.

    The given state is used up. A minibatch's loss is a weighted sum over its tokens, so the result
    does not depend on `microbatch_rows` or `length_bucket`. Policy and critic take their steps one
    after the other, so their activations never coexist. `kl_weight` is that of the divergence in
    the loss. `observe` is called before each minibatch, with its micro-batches. `step` counts
    updates and, with the seed, orders the rows. In the first `critic_steps_alone` updates the
    policy stays as it is.

    The metrics, means over the minibatches (maxima for `.../max`), are read from the device once,
    at the end; with `target_kl`, one of them after each minibatch. NonFiniteStep if one is not
    finite: such a step was not taken.
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
        parts, share = _micro_batches(select(host, rows), kl_weight, settings)
        padding.append(share)
        observe(progress := PhaseParts(len(parts) * (1 if optimizers.critic is None else 2)))
        history.append({})
        if step >= settings.critic_steps_alone:
            gradient = _sum_gradients(policy_objective, state.policy, parts, settings, progress)
            history[-1] |= gradient.metrics
            if settings.target_kl and float(gradient.metrics["kl/old"]) > settings.target_kl:
                break
            policy, moments, norm = apply(
                state.policy, state.optimizer, gradient, optimizer=optimizers.policy
            )
            state = dataclasses.replace(state, policy=policy, optimizer=moments)
            history[-1] |= {"gradient/norm": norm}
            del gradient  # The critic needs its memory.

        if optimizers.critic is not None:
            critic = typed(Model, state.critic)
            gradient = _sum_gradients(critic_objective, critic, parts, settings, progress)
            critic, moments, norm = apply(
                critic, state.critic_optimizer, gradient, optimizer=optimizers.critic
            )
            state = dataclasses.replace(state, critic=critic, critic_optimizer=moments)
            history[-1] |= gradient.metrics | {"critic/gradient_norm": norm}
            del gradient  # So does the policy.
        done += 1

    metrics = _means(jax.device_get(history), experience, state)
    metrics["training/minibatches_done"] = float(done)
    metrics["training/padding"] = float(np.mean(padding)) if padding else 0.0
    if host.values is not None:
        metrics["critic/explained_variance"] = explained_variance(
            host.values, host.returns, host.mask
        )
    return dataclasses.replace(state, step=state.step + 1), metrics


def compile_update(
    state: TrainState, experience: Experience, optimizers: Optimizers, settings: TrainingSettings
) -> None:
    """Compile what the first minibatch of `update` runs, and run nothing."""
    of_step = (settings.minibatches, 1)
    samples = len(experience.rewards)
    rows = next(minibatches(samples, *of_step, seed=settings.seed, step=int(state.step)))
    parts, _ = _micro_batches(select(experience, rows), 0.0, settings)
    learners: list[tuple[LossFunction, Model, Any, optax.GradientTransformation]] = [
        (policy_objective, state.policy, state.optimizer, optimizers.policy)
    ]
    if optimizers.critic is not None:
        critic = typed(Model, state.critic)
        learners.append((critic_objective, critic, state.critic_optimizer, optimizers.critic))
    for objective, model, moments, optimizer in learners:
        gradient = _sum_gradients(objective, model, parts, settings, execute=compile_only)
        compile_only(apply, model, moments, gradient, optimizer=optimizer)


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


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def apply(
    model: Model,
    moments: optax.OptState,
    gradient: Gradient,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Model, optax.OptState, jax.Array]:
    """Take one optimizer step in place; return also the gradient's global norm before clipping.

    The norm is [] float32. Where it or a metric is not finite, model and moments stay as they are.
    """
    norm = optax.global_norm(gradient.weights)
    finite = jnp.isfinite(jnp.stack([norm, *gradient.metrics.values()])).all()

    def step():
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
            changes, new = optimizer.update(
                typed(optax.Updates, gradient.weights), moments, typed(optax.Params, model)
            )
        return optax.apply_updates(typed(optax.Params, model), changes), new

    # A branch, not a choice leaf by leaf: XLA would store new moments and weights beside the old
    # ones to choose from.
    model, moments = jax.lax.cond(finite, step, lambda: (model, moments))
    return model, moments, norm


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
    objective: LossFunction,
    model: Model,
    parts: list[MicroBatch],
    settings: TrainingSettings,
    progress: PhaseParts | None = None,
    execute: Execute = call,
) -> Gradient:
    """Return the gradient of a minibatch of host arrays, of at least one micro-batch.

    Each micro-batch is placed when the one before it is summed, and noted in `progress`.
    """
    total = None
    for part in parts:
        placed = place_rows(part, settings.layout)
        total = execute(accumulate, total, model, placed, objective=objective, settings=settings)
        if progress is not None:  # a copy, for the sum itself is used up by the next
            progress.handed.append(jnp.copy(next(iter(total.metrics.values()))))
    assert total is not None
    return total


def _means(
    history: list[dict[str, Any]], experience: Experience, state: TrainState
) -> dict[str, float]:
    """Return each metric's mean over the minibatches that have it, or its maximum for `.../max`.

    NonFiniteStep for the first one that is not finite. Without a minibatch a few metrics are 0.
    """
    for index, metrics in enumerate(history):
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            # A loss says more than what follows from it.
            name = min(broken, key=lambda name: not name.startswith("loss/"))
            raise NonFiniteStep(
                f"{name} is {float(metrics[name])} in minibatch {index + 1} of update"
                f" {int(state.step)}; its step was"
                " not taken: look for a reward out of scale, or lower the learning rate.",
                experience,
                state,
            )
    means = {"loss/policy": 0.0, "kl/mean": 0.0, "gradient/norm": 0.0}
    for name in dict.fromkeys(name for metrics in history for name in metrics):
        values = [float(metrics[name]) for metrics in history if name in metrics]
        means[name] = max(values) if name.endswith("/max") else float(np.mean(values))
    return means
