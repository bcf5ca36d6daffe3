"""One update of policy and critic: epochs of minibatches, gradients accumulated over
micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from rlhf_jax.inference.logprobs import CHUNK, token_law
from rlhf_jax.inference.values import token_values
from rlhf_jax.mesh import model_shardings
from rlhf_jax.model.attention import causal
from rlhf_jax.model.transformer import cast, stack
from rlhf_jax.training.batching import MicroBatch, micro_batches, minibatches, select
from rlhf_jax.training.kl import kl_k3
from rlhf_jax.training.losses import (
    explained_variance,
    summed_policy_loss,
    summed_value_loss,
    token_mean_weights,
)
from rlhf_jax.types import Array, Experience, Model, TrainState


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What an update does; static, so a change of it compiles anew."""

    epochs: int = 1
    minibatches: int = 1  # optimizer steps an epoch
    microbatch_rows: int = 8  # rows whose activations exist at one time
    bucket: int = 64  # token slots of a micro-batch are a multiple of this
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float = 0.2  # a value moves at most so far from what it was before the update
    aggregate: Callable = token_mean_weights  # one of AGGREGATES: how tokens are weighed
    response_slots: int = 1  # the longest response that may be, by which constant_weights divides
    # the divergence in the loss: of shaping.KL, but not k1, whose gradient has mean zero
    kl: Callable = kl_k3
    entropy_weight: float = 0.0
    # the rest is skipped once KL(old || now) of a minibatch exceeds it; 0 for never
    target_kl: float = 0.0
    dtype: Any = jnp.float32  # of the computation; the weights are kept in float32
    remat: bool = True  # keep only each layer's input for the backward pass
    chunk: int = CHUNK  # tokens whose logits exist at one time
    seed: int = 0
    attend: Callable = causal
    critic_attend: Callable = causal
    law: Callable | None = None  # log-probs without logits, where there is a kernel of them


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """What turns gradients into steps; without a critic its optimizer is None."""

    policy: optax.GradientTransformation
    critic: optax.GradientTransformation | None = None


@struct.dataclass
class Gradient:
    """Of a minibatch, summed over the micro-batches so far, with its metrics."""

    weights: Model  # float32
    metrics: dict[str, Array]


class NonFiniteUpdate(ValueError):
    """A loss or gradient was infinite or no number; `state` is finite, without the steps of such
    minibatches.
    """

    def __init__(self, message: str, state: TrainState):
        super().__init__(message)
        self.state = state


def make_optimizer(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    max_grad_norm: float = 1.0,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; the rate rises linearly over `warmup_steps` and then
    stays.

    Weight decay spares norms and biases (Loshchilov and Hutter 2019).
    """
    schedule = (
        optax.linear_schedule(0.0, learning_rate, warmup_steps) if warmup_steps else learning_rate
    )
    return optax.chain(
        clip_by_norm(max_grad_norm), optax.adamw(schedule, weight_decay=weight_decay, mask=_decays)
    )


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """g * min(1, limit / |g|) with |g| over all gradients (Pascanu et al. 2013).

    `optax.clip_by_global_norm` divides each entry: too dear for XLA to repeat in each of Adam's
    moments, so it stores a second copy of the gradients. A product is repeated, and nothing is
    stored.
    """

    def clip(grads, params):
        del params
        scale = jnp.minimum(1.0, limit / optax.global_norm(grads))
        return jax.tree.map(lambda leaf: leaf * scale, grads)

    return optax.stateless(clip)


def _decays(model: Model) -> Model:
    names = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name, model)
    return jax.tree.map(lambda name: not name.endswith(("norm", "bias")), names)


def init_train_state(
    policy: Model,
    optimizers: Optimizers,
    mesh: jax.sharding.Mesh | None = None,
    critic: Model | None = None,
) -> TrainState:
    """A state of `policy` and `critic`, in float32 with stacked layers, split over the mesh as
    training wants it.

    The models are used up: a caller that keeps using the same weights, as a reference say, passes a
    copy.
    """
    if (critic is None) != (optimizers.critic is None):
        raise ValueError("A critic and its optimizer come together; give both or neither.")

    def make(policy: Model, critic: Model | None) -> TrainState:
        policy, moments = _with_moments(policy, optimizers.policy)
        state = TrainState(policy=policy, optimizer=moments, step=jnp.zeros((), jnp.int32))
        if critic is None or optimizers.critic is None:
            return state
        critic, moments = _with_moments(critic, optimizers.critic)
        return dataclasses.replace(state, critic=critic, critic_optimizer=moments)

    shardings = (
        None
        if mesh is None
        else model_shardings(jax.eval_shape(make, policy, critic), mesh, "training")
    )
    return jax.jit(make, donate_argnums=(0, 1), out_shardings=shardings)(policy, critic)


def _with_moments(model: Model, optimizer: optax.GradientTransformation) -> tuple[Model, Any]:
    model = cast(stack(model), jnp.float32)
    return model, optimizer.init(typed(Any, model))


def update(
    state: TrainState,
    experience: Experience,
    optimizers: Optimizers,
    config: UpdateConfig,
    kl_weight: float = 0.0,
    place: Callable[[MicroBatch], MicroBatch] = jax.device_put,
    observe: Callable[[], None] = lambda: None,
) -> tuple[TrainState, dict[str, float]]:
    """Train on one experience: `epochs` times `minibatches` optimizer steps. The given state is
    used up.

    A minibatch's loss is a weighted sum over its tokens, so the result does not depend on
    `microbatch_rows` or `bucket`. Policy and critic take their steps one after the other, so their
    activations never coexist. `place` puts a micro-batch of host arrays on the device or, with
    shardings, on a mesh; `observe` is called before each minibatch. `step` counts updates and, with
    the config's seed, orders the rows. The metrics, means over the minibatches (maxima for
    `.../max`), are read from the device once, at the end (with `target_kl`, one of them after each
    minibatch); NonFiniteUpdate if one is not finite: such a step was not taken.
    """
    host = jax.tree.map(np.asarray, experience)
    order = minibatches(
        len(host.rewards), config.minibatches, config.epochs, config.seed, int(state.step)
    )
    # without a token there is nothing to learn
    order = [rows for rows in order if host.mask[rows].any()]
    history = []
    done = 0
    for rows in order:
        observe()
        parts = functools.partial(_parts, host, rows, kl_weight, config, place)
        gradient = _gradient(policy_objective, state.policy, parts(), config)
        if config.target_kl and float(gradient.metrics["kl/old"]) > config.target_kl:
            history.append(gradient.metrics)
            break
        policy, moments, norm = apply(
            state.policy, state.optimizer, gradient, optimizer=optimizers.policy
        )
        state = dataclasses.replace(state, policy=policy, optimizer=moments)
        history.append(gradient.metrics | {"gradient/norm": norm})
        del gradient  # its memory is the critic's now
        if optimizers.critic is not None:
            state, metrics = _critic_step(state, parts(), optimizers.critic, config)
            history[-1] |= metrics
        done += 1
    history = jax.device_get(history)
    _check_finite(history, state)
    metrics = NOTHING | _summary(history) | {"training/minibatches_done": float(done)}
    if host.values is not None:
        metrics["critic/explained_variance"] = explained_variance(
            host.values, host.returns, host.mask
        )
    return dataclasses.replace(state, step=state.step + 1), metrics


def policy_objective(
    policy: Model, batch: MicroBatch, config: UpdateConfig
) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of its minibatch's loss, and metrics, as in `summed_policy_loss`."""
    rollout = batch.experience.rollout
    logprobs, entropy = token_law(
        policy,
        rollout.tokens,
        temperature=config.temperature,
        entropy=config.entropy_weight != 0,
        mask=batch.experience.mask,
        support=rollout.support,
        chunk=config.chunk,
        attend=config.attend,
        remat=config.remat,
        law=config.law,
    )
    return summed_policy_loss(
        logprobs,
        entropy,
        batch,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl=config.kl,
        entropy_weight=config.entropy_weight,
    )


def critic_objective(
    critic: Model, batch: MicroBatch, config: UpdateConfig
) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of its minibatch's loss, and metrics, as in `summed_value_loss`."""
    experience = batch.experience
    values = token_values(
        critic,
        experience.rollout.tokens,
        mask=experience.mask,
        attend=config.critic_attend,
        remat=config.remat,
    )
    return summed_value_loss(values, batch, clip=config.value_clip)


# metrics of an update without a token
NOTHING = {"loss/policy": 0.0, "kl/mean": 0.0, "gradient/norm": 0.0}
Objective = Callable[[Model, MicroBatch, UpdateConfig], tuple[Array, dict[str, Array]]]


@functools.partial(jax.jit, static_argnames=("objective", "config"), donate_argnums=0)
def accumulate(
    total: Gradient | None,
    model: Model,
    batch: MicroBatch,
    *,
    objective: Objective,
    config: UpdateConfig,
) -> Gradient:
    """`total` plus the gradient of one micro-batch, both float32, and its metrics.

    `total` is overwritten; it is None before the first micro-batch. The gradient is taken in the
    compute dtype, so that what exists beside the sum is no larger than that.
    """
    weights, metrics = jax.grad(objective, has_aux=True)(cast(model, config.dtype), batch, config)
    new = Gradient(cast(weights, jnp.float32), metrics)
    if total is None:
        return new
    metrics = {name: _merge(name)(total.metrics[name], value) for name, value in metrics.items()}
    return Gradient(jax.tree.map(jnp.add, total.weights, new.weights), metrics)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def apply(
    model: Model, moments: Any, gradient: Gradient, *, optimizer: optax.GradientTransformation
) -> tuple[Model, Any, Array]:
    """One optimizer step, in place, and the global norm of the gradient before clipping.

    Where the norm or a metric is not finite, model and moments stay as they are.
    """
    norm = optax.global_norm(gradient.weights)
    finite = jnp.isfinite(jnp.stack([norm, *gradient.metrics.values()])).all()

    def step():
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
            changes, new = optimizer.update(
                typed(Any, gradient.weights), moments, typed(Any, model)
            )
        return optax.apply_updates(typed(Any, model), changes), new

    # A branch, not a choice leaf by leaf: XLA would store new moments and weights beside the old
    # ones to choose from.
    model, moments = jax.lax.cond(finite, step, lambda: (model, moments))
    return model, moments, norm


def _parts(
    host: Experience, rows: np.ndarray, kl_weight: float, config: UpdateConfig, place: Callable
) -> Iterator[MicroBatch]:
    """A minibatch's micro-batches, each placed when it is asked for."""
    batch = select(host, rows, host.mask.shape[1])
    weights = config.aggregate(batch.mask, config.response_slots)
    total = np.float32(max(1, batch.mask.sum()))
    for part, slots in micro_batches(
        np.arange(len(rows)), batch.rollout.length, config.microbatch_rows, config.bucket
    ):
        yield place(
            MicroBatch(
                select(batch, part, slots), weights[part, :slots], total, np.float32(kl_weight)
            )
        )


def _gradient(
    objective: Objective, model: Model, parts: Iterable[MicroBatch], config: UpdateConfig
) -> Gradient:
    total = None
    for batch in parts:
        total = accumulate(total, model, batch, objective=objective, config=config)
    assert total is not None
    return total


def _critic_step(
    state: TrainState,
    parts: Iterable[MicroBatch],
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
) -> tuple[TrainState, dict[str, Array]]:
    critic = typed(Model, state.critic)
    gradient = _gradient(critic_objective, critic, parts, config)
    critic, moments, norm = apply(critic, state.critic_optimizer, gradient, optimizer=optimizer)
    state = dataclasses.replace(state, critic=critic, critic_optimizer=moments)
    return state, gradient.metrics | {"critic/gradient_norm": norm}


def _merge(name: str) -> Callable[[Array, Array], Array]:
    """How a metric of two micro-batches becomes one."""
    return jnp.maximum if name.endswith("/max") else jnp.add


def _check_finite(history: list[dict[str, Any]], state: TrainState) -> None:
    """Raise NonFiniteUpdate for the first number that is not, of the metrics of each minibatch."""
    for index, metrics in enumerate(history):
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            # a loss says more than what follows
            name = min(broken, key=lambda name: not name.startswith("loss/"))
            raise NonFiniteUpdate(
                f"{name} is {float(metrics[name])} in minibatch {index + 1} of update"
                f" {int(state.step)}; its step was"
                " not taken: look for a reward out of scale, or lower the learning rate.",
                state,
            )


def _summary(history: list[dict[str, Any]]) -> dict[str, float]:
    """Minibatches averaged; maxima stay maxima. The last minibatch of a skipped update lacks
    some.
    """
    names = dict.fromkeys(name for metrics in history for name in metrics)
    found = {
        name: [float(metrics[name]) for metrics in history if name in metrics] for name in names
    }
    return {
        name: max(v) if name.endswith("/max") else float(np.mean(v)) for name, v in found.items()
    }
