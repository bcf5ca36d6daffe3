"""One GRPO update: several epochs of minibatches, gradients accumulated over micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.inference.logprobs import CHUNK, token_logprobs
from rlhf_jax.mesh import model_shardings
from rlhf_jax.model.attention import causal
from rlhf_jax.model.transformer import cast, stack
from rlhf_jax.training.batching import micro_batches, minibatches, select
from rlhf_jax.training.losses import grpo_loss
from rlhf_jax.types import Array, Experience, Model, TrainState


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What an update does; static, so a change of it compiles anew."""

    epochs: int = 1
    minibatches: int = 1  # optimizer steps an epoch
    micro_rows: int = 8  # rows whose activations exist at one time
    bucket: int = 64  # token slots of a micro-batch are a multiple of this
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.04
    dtype: Any = jnp.float32  # of the computation; the weights are kept in float32
    remat: bool = True  # keep only each layer's input for the backward pass
    chunk: int = CHUNK  # tokens whose logits exist at one time
    seed: int = 0
    attend: Callable = causal


def make_optimizer(
    learning_rate: float, *, warmup_steps: int = 0, max_grad_norm: float = 1.0, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; the rate rises linearly over `warmup_steps` and then stays.

    Weight decay spares norms and biases (Loshchilov and Hutter 2019).
    """
    schedule = optax.linear_schedule(0.0, learning_rate, warmup_steps) if warmup_steps else learning_rate
    return optax.chain(
        clip_by_norm(max_grad_norm),
        optax.adamw(schedule, weight_decay=weight_decay, mask=_decays),
    )


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """g * min(1, limit / |g|) with |g| over all gradients (Pascanu et al. 2013).

    `optax.clip_by_global_norm` divides each entry: too dear for XLA to repeat in each of Adam's moments, so
    it stores a second copy of the gradients. A product is repeated, and nothing is stored.
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
    policy: Model, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh | None = None
) -> TrainState:
    """A state of `policy`, in float32 with stacked layers, split over the mesh as training wants it.

    `policy` is used up: a caller that keeps using the same weights, as a reference say, passes a copy.
    """

    def make(policy: Model) -> TrainState:
        policy = cast(stack(policy), jnp.float32)
        moments = optimizer.init(policy)  # pyright: ignore[reportArgumentType]
        return TrainState(policy=policy, optimizer=moments, step=jnp.zeros((), jnp.int32))

    shardings = None if mesh is None else model_shardings(jax.eval_shape(make, policy), mesh, "training")
    return jax.jit(make, donate_argnums=0, out_shardings=shardings)(policy)


def update(
    state: TrainState,
    experience: Experience,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    place: Callable[[Experience], Experience] = jax.device_put,
) -> tuple[TrainState, dict[str, float]]:
    """Train on one experience: `epochs` times `minibatches` optimizer steps. The given state is used up.

    A minibatch's loss is the mean over all its response tokens, so the result does not depend on `micro_rows`
    or `bucket`. `place` puts a micro-batch of host arrays on the device or, with shardings, on a mesh. `step`
    counts updates and, with the config's seed, orders the rows. The metrics, means over the minibatches
    (maxima for `.../max`), are read from the device once, at the end.
    """
    host = jax.tree.map(np.asarray, experience)
    history = []
    order = minibatches(len(host.rewards), config.minibatches, config.epochs, config.seed, int(state.step))
    for rows in order:
        total = np.float32(max(1, host.rollout.mask[rows].sum()))
        grads, metrics = None, []
        for part, slots in micro_batches(rows, host.rollout.length, config.micro_rows, config.bucket):
            grads, some = accumulate(grads, state.policy, place(select(host, part, slots)), total, config=config)
            metrics.append(some)
        state, norm = apply(state, grads, optimizer=optimizer)
        history.append((metrics, norm))
    return dataclasses.replace(state, step=state.step + 1), _summary(jax.device_get(history))


def loss(policy: Model, experience: Experience, total: Array, config: UpdateConfig) -> tuple[Array, dict]:
    """A micro-batch's share of its minibatch's loss, and metrics, as in `grpo_loss`."""
    rollout = experience.rollout
    logprobs = token_logprobs(
        policy,
        rollout.tokens,
        temperature=config.temperature,
        mask=rollout.mask,
        support=rollout.support,
        chunk=config.chunk,
        attend=config.attend,
        remat=config.remat,
    )
    return grpo_loss(
        logprobs,
        experience,
        total,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl_weight=config.kl_weight,
    )


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def accumulate(
    grads: Model | None, policy: Model, experience: Experience, total: Array, *, config: UpdateConfig
) -> tuple[Model, dict]:
    """`grads` plus the gradient of one micro-batch, both float32, and its metrics.

    `grads` is overwritten; it is None before the first micro-batch. The gradient is taken in the compute
    dtype, so that what exists beside the sum is no larger than that.
    """
    new, metrics = jax.grad(loss, has_aux=True)(cast(policy, config.dtype), experience, total, config)
    new = cast(new, jnp.float32)
    return (new if grads is None else jax.tree.map(jnp.add, grads, new)), metrics


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=0)
def apply(state: TrainState, grads: Model, *, optimizer: optax.GradientTransformation) -> tuple[TrainState, Array]:
    """One optimizer step, in place, and the global norm of the gradient before clipping."""
    policy: Any = state.policy  # optax's types know no dataclasses
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
        updates, moments = optimizer.update(grads, state.optimizer, policy)  # pyright: ignore[reportArgumentType]
    policy = optax.apply_updates(policy, updates)
    return dataclasses.replace(state, policy=policy, optimizer=moments), optax.global_norm(grads)


def _summary(history) -> dict[str, float]:
    """Micro-batches summed, minibatches averaged; maxima stay maxima."""
    names = history[0][0][0].keys()
    summary = {"gradient/norm": float(np.mean([norm for _, norm in history]))}
    for name in names:
        values = [[float(metrics[name]) for metrics in micro] for micro, _ in history]
        largest = name.endswith("/max")
        summary[name] = max(map(max, values)) if largest else float(np.mean([sum(v) for v in values]))
    return summary
