"""One update of policy and critic: epochs of minibatches, cut into micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.inference.packing import pack, padding_share
from rlhf_jax.mesh import ONE_DEVICE, Layout, for_all_to_read, model_shardings, place_rows
from rlhf_jax.model.transformer import cast, stack
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.runtime import to_host
from rlhf_jax.runtime.compilation import Execute, compile_only, run_now
from rlhf_jax.runtime.shards import counted_up, place_parts
from rlhf_jax.training.batching import MicroBatch, micro_batch, minibatches, select
from rlhf_jax.training.gradients import (
    Gradient,
    Learner,
    accumulate,
    critic_learner,
    no_gradient,
    policy_learner,
)
from rlhf_jax.training.losses import explained_variance, is_maximum
from rlhf_jax.training.optimizer import Optimizers, apply, examine_all
from rlhf_jax.training.pipelined import measure_stages, sum_pipelined
from rlhf_jax.training.schedules import FusedSchedule, schedule_of
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Experience, Model, TrainState


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
    if layout.mesh is not None:
        step = place_parts(np.zeros((), np.int32), for_all_to_read(layout))
        state = dataclasses.replace(state, step=step)
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
    stage_times: Mapping[str, StageTimes] | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Train on one experience: `epochs` times `minibatches` optimizer steps.

    The given state is used up. A minibatch's loss is a weighted sum over its tokens, so the result
    does not depend on `microbatch_rows` or `length_bucket`. Gradients of policy and critic are
    taken one after the other, so their activations never coexist, or by pipelines at once where
    their layouts are pipelined. `kl_weight` is that of the divergence in the loss. `observe` is
    called before each minibatch, with its micro-batches. `step` counts updates and, with the seed,
    orders the rows. In the first `critic_steps_alone` updates the policy stays as it is.

    A minibatch of which a number is not finite, the policy's or the critic's, is skipped: neither
    takes a step. NonFiniteStep where more than `max_skipped` come in a row, of which `skipped` came
    before this update. The metrics, means over the other minibatches (maxima for `.../max`), are
    read from the device once, at the end; with `target_kl`, one of them after each minibatch.
    `stage_times` is what `measure_update` found, of pipelines.
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
    planned = []
    padding = []
    done = 0
    for rows in [rows for rows in order if host.mask[rows].any()]:
        learners = learners_of(state, optimizers, settings)
        if step < settings.critic_steps_alone:
            learners = learners[1:]
        batches, share = _micro_batches(select(host, rows), kl_weight, learners)
        padding.append(share)
        observe(progress := PhaseParts(sum(map(len, batches))))
        fused = _fused_schedule(learners, batches, stage_times or {})
        planned += [fused.metrics()] if fused else []
        found: dict[str, Gradient] = {}
        moved = False
        gradients = _gradients(learners, batches, fused, progress)
        for learner, gradient in zip(learners, gradients, strict=True):
            found[learner.call] = gradient
            if moved := _has_moved(learner, gradient):
                break
        del gradient  # else it would stay beside the next minibatch's
        if moved:
            history.append(found["policy_training"].metrics)
            break
        state, metrics = _take_steps(state, found, optimizers)
        history.append(metrics)
        done += 1

    metrics = _means(to_host.fetch(history), experience, state, settings.max_skipped, skipped)
    if planned:
        metrics |= {name: float(np.mean([own[name] for own in planned])) for name in planned[0]}
    metrics["training/minibatches_done"] = done - metrics["training/skipped"]
    metrics["training/padding"] = float(np.mean(padding)) if padding else 0.0
    if host.values is not None:
        explained = explained_variance(host.values, host.returns, host.mask)
        metrics |= {"critic/explained_variance": explained} if math.isfinite(explained) else {}
    return dataclasses.replace(state, step=counted_up(state.step)), metrics


def compile_update(
    state: TrainState, experience: Experience, optimizers: Optimizers, settings: TrainingSettings
) -> None:
    """Compile what the first minibatch of `update` runs, if any trains, and run nothing."""
    learners, batches = _first_minibatch(state, experience, optimizers, settings)
    if not learners:
        return
    fused = _fused_schedule(learners, batches, times={})
    gradients = list(_gradients(learners, batches, fused, execute=compile_only))
    _, finite = examine_all(gradients, compile_only)
    taken: list[Any] = [(state.policy, state.optimizer, optimizers.policy)]
    if optimizers.critic is not None:
        taken.append((typed(Model, state.critic), state.critic_optimizer, optimizers.critic))
    for (model, moments, optimizer), gradient, flag in zip(taken, gradients, finite, strict=True):
        compile_only(apply, model, moments, gradient, flag, optimizer=optimizer)


def measure_update(
    state: TrainState, experience: Experience, optimizers: Optimizers, settings: TrainingSettings
) -> dict[str, StageTimes]:
    """Return by call what stages of pipelines take, of the first micro-batch of an experience.

    Where nothing is pipelined there is nothing to measure. No gradient is kept.
    """
    if settings.layout.role != "pipelined":
        return {}
    learners, batches = _first_minibatch(state, experience, optimizers, settings)
    return {
        learner.call: measure_stages(learner, own[0])
        for learner, own in zip(learners, batches, strict=True)
    }


def _first_minibatch(
    state: TrainState, experience: Experience, optimizers: Optimizers, settings: TrainingSettings
) -> tuple[list[Learner], list[list[MicroBatch]]]:
    """Return what an update trains first, and the micro-batches of each; nothing of no tokens."""
    of_step = (settings.minibatches, 1)
    samples = len(experience.rewards)
    order = minibatches(samples, *of_step, seed=settings.seed, step=int(state.step))
    rows = next((rows for rows in order if np.asarray(experience.mask)[rows].any()), None)
    if rows is None:
        return [], []
    learners = learners_of(state, optimizers, settings)
    return learners, _micro_batches(select(experience, rows), 0.0, learners)[0]


def learners_of(
    state: TrainState, optimizers: Optimizers, settings: TrainingSettings
) -> list[Learner]:
    """Return the models that an update trains: the policy, and the critic where there is one."""
    policy = policy_learner(state.policy, settings)
    if optimizers.critic is None:
        return [policy]
    return [policy, critic_learner(typed(Model, state.critic), settings)]


def _take_steps(
    state: TrainState, gradients: dict[str, Gradient], optimizers: Optimizers
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take a minibatch's steps of policy and critic, or none where a number is not finite.

    gradients: by call. Returns the state and all metrics, norms included. A model without a
    gradient stays as it is.
    """
    of_policy = gradients.get("policy_training")
    of_critic = gradients.get("critic_training")
    norms, finite = examine_all(list(gradients.values()))
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
    minibatch: Experience, kl_weight: float, learners: list[Learner]
) -> tuple[list[list[MicroBatch]], float]:
    """Return a minibatch's micro-batches for each learner, all of the host.

    And the share of padding in those of the first one.
    """
    mask = np.asarray(minibatch.mask)
    settings = learners[0].settings
    weights = settings.aggregate(mask, settings.max_new_tokens)
    rows = (settings.microbatch_rows, settings.length_bucket)
    packed = {
        shards: pack(minibatch.rollout, minibatch.mask, *rows, shards)
        for shards in {one.settings.layout.row_shards for one in learners}
    }
    parts = {
        shards: [micro_batch(minibatch, weights, kl_weight, part) for part in own]
        for shards, own in packed.items()
    }
    shards = [one.settings.layout.row_shards for one in learners]
    return [parts[own] for own in shards], padding_share(packed[shards[0]])


def _fused_schedule(
    learners: list[Learner], batches: list[list[MicroBatch]], times: Mapping[str, StageTimes]
) -> FusedSchedule | None:
    """Return the schedule of learners that are pipelines; None of others, which take turns."""
    is_pipelined = learners[0].settings.layout.role == "pipelined"
    return schedule_of(learners, batches, times) if is_pipelined else None


def _gradients(
    learners: list[Learner],
    batches: list[list[MicroBatch]],
    fused: FusedSchedule | None,
    progress: PhaseParts | None = None,
    execute: Execute = run_now,
) -> Iterator[Gradient]:
    """Yield the gradient of a minibatch of each learner, once it is asked for.

    fused: of learners that are pipelines, which run at once: all gradients are computed when the
    first is asked for.
    """
    if fused is not None:
        yield from sum_pipelined(learners, batches, fused.schedule, progress, execute)
        return
    for learner, own in zip(learners, batches, strict=True):
        yield _sum_gradients(learner, own, progress, execute)


def _has_moved(learner: Learner, gradient: Gradient) -> bool:
    """Say whether the policy has moved so far from the old one that no step is taken any more."""
    limit = learner.settings.target_kl
    if not limit or learner.call != "policy_training":
        return False
    told = to_host.fetch(gradient.metrics)
    finite = np.isfinite([*told.values()]).all()
    return bool(finite and told["kl/old"] > limit)


def _sum_gradients(
    learner: Learner, parts: list[MicroBatch], progress: PhaseParts | None, execute: Execute
) -> Gradient:
    """Return the gradient of a minibatch of host arrays, of at least one micro-batch.

    Each micro-batch is placed when the one before it is summed, and noted in `progress` as one of
    the learner's call.
    """
    total = None
    settings = learner.settings
    losses = {"objective": learner.objective, "settings": settings}
    for part in parts:
        began = time.perf_counter()
        placed = place_rows(part, settings.layout)
        if total is None:
            first = accumulate.eval_shape(None, learner.model, placed, **losses)
            names = tuple(first.metrics)
            total = execute(no_gradient, learner.model, names=names, layout=settings.layout)
        total = execute(accumulate, total, learner.model, placed, **losses)
        if progress is not None:  # a copy, for the sum itself is used up by the next
            told = jnp.copy(next(iter(total.metrics.values())))
            progress.hand(learner.call, began, told, part.packed)
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
        means[name] = max(values) if is_maximum(name) else float(np.mean(values))
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
