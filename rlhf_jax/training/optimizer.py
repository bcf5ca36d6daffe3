"""From gradients to steps: optimizers, learning rates, and the joint step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.models.families import weight_at
from rlhf_jax.runtime import to_host
from rlhf_jax.runtime.compilation import Execute, run_now
from rlhf_jax.runtime.shards import owners_of, place_parts
from rlhf_jax.training.gradients import Gradient, Learner
from rlhf_jax.types import Model, Trained

# By the values of training.schedule: from (rate, steps) to the rate by step.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "constant": lambda rate, steps: optax.constant_schedule(rate),
    "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
    "cosine": optax.cosine_decay_schedule,
}


def scheduled(
    learning_rate: float, warmup_steps: int = 0, schedule: str = "constant", steps: int = 0
) -> optax.ScalarOrSchedule:
    """Return the learning rate of each optimizer step, or the rate itself if constant.

    It rises linearly over `warmup_steps` and then stays, or falls to 0 over the rest of `steps`, by
    one of `SCHEDULES`.
    """
    if not warmup_steps and schedule == "constant":
        return learning_rate
    falls = SCHEDULES[schedule](learning_rate, max(1, steps - warmup_steps))
    rises = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([rises, falls], [warmup_steps])


def make_optimizer(
    learning_rate: optax.ScalarOrSchedule, *, max_grad_norm: float = 1.0, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Return AdamW after clipping by the global norm (Loshchilov and Hutter 2019).

    learning_rate: a number, or `scheduled`. Weight decay excludes norms and biases.
    """

    def decays(model: Model) -> Model:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: getattr(weight_at(path), "is_matrix", False), model
        )

    adamw = optax.adamw(learning_rate, weight_decay=weight_decay, mask=decays)
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


@jax.jit
def _norms_and_finite(gradients: tuple[Gradient, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Compute both for gradients on the same devices, with one flag for all."""
    norms = tuple(optax.global_norm(gradient.weights) for gradient in gradients)
    metrics = [number for gradient in gradients for number in gradient.metrics.values()]
    return norms, jnp.isfinite(jnp.stack([*norms, *metrics])).all()


def norms_and_finite(
    gradients: Sequence[Gradient], execute: Execute = run_now
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the global norm of each gradient, and on its devices whether all are finite.

    The norms are [] float32, before clipping; the flags are [] bool, over the metrics as well.
    Gradients may be on separate devices: flags then cross between devices, and nothing waits for
    them on the host unless they go to another process.
    """
    places = [jax.tree.leaves(one.weights)[0].sharding for one in gradients]
    # A shape without a placement has no sharding. One program requires one order of devices.
    if len({place and getattr(place, "mesh", place) for place in places}) == 1:
        norms, finite = execute(_norms_and_finite, tuple(gradients))
        return list(norms), [finite] * len(gradients)
    results = [execute(_norms_and_finite, (gradient,)) for gradient in gradients]
    norms = [norm for (norm,), _ in results]
    flags = [flag for _, flag in results]
    several = len({owners_of(place) for place in places if place}) > 1
    if several and isinstance(flags[0], jax.Array):  # for which the host waits
        all_finite = np.asarray(to_host.fetch(flags)).all()
        return norms, [place_parts(all_finite, flag.sharding) for flag in flags]

    def bring(flag: jax.Array, place: jax.sharding.Sharding) -> jax.Array:
        """Return a flag, or its shape, on the devices of another one."""
        if isinstance(flag, jax.ShapeDtypeStruct):
            return typed(jax.Array, flag.update(sharding=place))
        return jax.device_put(flag, place)

    brought = [[bring(flag, own.sharding) for flag in flags] for own in flags]
    return norms, [execute(all_of, there) for there in brought]


@jax.jit
def all_of(flags: list[jax.Array]) -> jax.Array:
    """Return whether all [] bool flags are true."""
    return jnp.stack(flags).all()


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def apply(
    model: Model,
    moments: optax.OptState,
    gradient: Gradient,
    finite: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Model, optax.OptState]:
    """Take one optimizer step in place; if not `finite` [] bool, nothing changes."""

    def step(model: Model, moments: optax.OptState) -> tuple[Any, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
            changes, new = optimizer.update(
                typed(optax.Updates, gradient.weights), moments, typed(optax.Params, model)
            )
        return optax.apply_updates(typed(optax.Params, model), changes), new

    def choose(*before: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), step(*before), before)

    def branch(*before: Any) -> Any:
        return jax.lax.cond(finite, step, lambda *kept: kept, *before)

    # XLA's partitioner for GPUs gathers all results of a branch, and on one GPU they exist twice.
    # On a CPU it is a select, with half of the weights and moments in addition.
    return jax.lax.platform_dependent(model, moments, cpu=branch, default=choose)


def take_step(
    learner: Learner,
    trained: Trained,
    gradient: Gradient,
    finite: jax.Array,
    execute: Execute = run_now,
) -> Trained:
    """Return a model after one optimizer step; the given one is donated."""
    model, moments = execute(
        apply, trained.weights, trained.moments, gradient, finite, optimizer=learner.optimizer
    )
    return dataclasses.replace(trained, weights=model, moments=moments)
