"""Trace the programs of each call of a plan from shapes, with what formulas say of each.

Devices need not be here: those of a TPU topology are enough. Nothing is compiled or run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.stages import Traced

from rlhf_jax.algorithms.policy_gradient import CRITIC_LOSS, POLICY_LOSS
from rlhf_jax.config import derived, memory, memory_parts
from rlhf_jax.inference.scoring import READ, score_packed
from rlhf_jax.mesh import FLOAT32, Layout
from rlhf_jax.placement.search.costs import Passes, forward_flops, gradient_flops
from rlhf_jax.placement.search.traffic import ShardedModel, forward_traffic, gradient_traffic
from rlhf_jax.planner import shapes
from rlhf_jax.planner.generation_programs import arrivals, drafts, prefill, rounds
from rlhf_jax.planner.pipelined_programs import pipelined_updates
from rlhf_jax.planner.placed_calls import CallProgram, Foreseen, PlacedCalls
from rlhf_jax.planner.student_programs import student_updates
from rlhf_jax.rewards.models import read_scores
from rlhf_jax.training.gradients import Gradient, accumulate
from rlhf_jax.training.kinds import Loss
from rlhf_jax.training.optimizer import apply, make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfig


def programs(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield the programs of all calls, in the order of a plan."""
    for call in calls.plan.placements:
        if call == "generation":
            yield from arrivals(calls)
            yield prefill(calls)
            yield from drafts(calls)
            yield from rounds(calls)
        elif call == "reward_inference":
            yield from rewards(calls)
        elif call.endswith("_inference"):
            yield scores(calls, call)
        else:
            run = calls.run(call)
            if run.is_pipelined and run.trains_policy:
                yield from pipelined_updates(calls, call, read_by_losses(calls))
                yield optimizers_step(calls, call)
            elif run.trains_policy:
                yield from updates(calls, call)
            if call == "policy_training" and derived.trains_drafter(calls.config):
                yield from student_updates(calls)


def scores(calls: PlacedCalls, call: str) -> CallProgram:
    """Return what scores a micro-batch with policy, reference or critic."""
    layout: Layout = getattr(calls.layouts, call)
    model = calls.model(call)
    passes = calls.placed(call).passes()
    batch = shapes.packed_shapes(calls.config, layout, passes.samples, READ)
    weights = shapes.model_shapes(model, layout)

    def trace(_: int) -> Traced:
        temperature = calls.config.generation.temperature
        return score_packed.trace(weights, batch, temperature=temperature, layout=layout)

    return _scoring(calls, call, "scores", model, trace, passes)


def rewards(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield what scores a micro-batch with each reward model."""
    call = "reward_inference"
    layout = calls.layouts.reward_inference
    passes = calls.placed(call).passes()
    bucket = calls.config.training.length_bucket
    slots = -(-passes.tokens // bucket) * bucket
    for model in dict.fromkeys(calls.models.rewards):
        weights = shapes.model_shapes(model, layout)
        tokens, last = shapes.row_shapes(
            lambda: (
                jnp.zeros((passes.samples, slots), jnp.int32),
                jnp.zeros(passes.samples, jnp.int32),
            ),
            layout,
        )

        def trace(_: int, weights=weights, tokens=tokens, last=last) -> Traced:
            return read_scores.trace(weights, tokens, last, layout)

        padded = passes._replace(tokens=slots, predicted=1)
        yield _scoring(calls, call, "rewards", model, trace, padded)


def _scoring(
    calls: PlacedCalls,
    call: str,
    name: str,
    model: ModelConfig,
    trace: Callable[[int], Traced],
    passes: Passes,
) -> CallProgram:
    """Return a program that scores a micro-batch, with what formulas say of it."""
    run = calls.run(call)
    layout = run.layout
    held = run.weights(model)
    work = memory.scoring_bytes(run, model, run.batch_rows)
    sharded = ShardedModel(model, layout, calls.hardware.platform)
    foreseen = Foreseen(
        held + work,
        forward_flops(model, *passes[1:]),
        forward_traffic(sharded, passes.on_device(layout)).total,
    )
    parts = calls.parts(call)
    copies = sum(part.bytes for part in parts if part.name == "models that score")
    beside = memory_parts.total(parts, "always") + copies - held
    return CallProgram(call, name, trace, foreseen, beside, model.num_layers)


def updates(calls: PlacedCalls, call: str) -> Iterator[CallProgram]:
    """Yield the gradient of a micro-batch and the optimizer's step, of policy or critic."""
    run = calls.run(call)
    model = calls.model(call)
    training = calls.config.training
    passes = calls.placed(call).passes(training.minibatches)
    held = run.weights(model, FLOAT32)
    work = sum(part.bytes for part in memory.update_parts(run, model))
    sharded = ShardedModel(model, run.layout, calls.hardware.platform)
    traffic = gradient_traffic(sharded, passes.on_device(run.layout), remat=calls.remat)
    flops = gradient_flops(model, *passes[1:], remat=calls.remat)
    always = calls.always(call)
    others = _waiting(calls, call)
    yield CallProgram(
        call,
        "gradient",
        lambda _: trace_gradient(calls, call, passes.samples),
        Foreseen(held + work, flops, traffic.total),
        beside=always - held + others * call.startswith("critic"),
        depth=model.num_layers,
    )
    yield optimizers_step(calls, call)


def optimizers_step(calls: PlacedCalls, call: str) -> CallProgram:
    """Return the optimizer's step of policy or critic."""
    run = calls.run(call)
    model = calls.model(call)
    held = run.weights(model, FLOAT32)
    return CallProgram(
        call,
        "optimizer's step",
        lambda _: trace_step(calls, call),
        Foreseen(4 * held),  # weights, two moments and a gradient
        beside=calls.always(call) - 3 * held + _waiting(calls, call),
        depth=model.num_layers,
    )


def _waiting(calls: PlacedCalls, call: str) -> int:
    """Return the bytes of the other model's gradient, where it lies on a call's devices."""
    other = "policy_training" if call.startswith("critic") else "critic_training"
    own = calls.plan.placements[call]
    placed = calls.plan.placements.get(other)
    if placed is None or not set(placed.devices) & set(own.devices):
        return 0
    return calls.run(other).weights(calls.model(other), FLOAT32)


def trace_gradient(calls: PlacedCalls, call: str, rows: int) -> Traced:
    """Trace the gradient of a later micro-batch: the sum so far is there."""
    settings = TrainingSettings.from_config(calls.config, calls.layouts, calls.remat)
    loss: Loss = POLICY_LOSS
    if call.startswith("critic"):
        settings = settings.of_critic
        loss = CRITIC_LOSS
    layout = settings.layout
    weights = shapes.model_shapes(calls.model(call), layout, FLOAT32)
    reads = read_by_losses(calls)
    batch = shapes.micro_batch_shapes(calls.config, layout, rows, reads)
    how = dict(loss=loss, settings=settings)
    first = jax.eval_shape(functools.partial(accumulate, None, **how), weights, batch)
    total = Gradient(weights, shapes.repeated(first.metrics, layout))
    return accumulate.trace(total, weights, batch, **how)


def read_by_losses(calls: PlacedCalls) -> tuple[str, ...]:
    """Return the columns that a micro-batch has for the losses of policy and critic."""
    critic = CRITIC_LOSS.reads if derived.needs_critic(calls.config) else ()
    return (*POLICY_LOSS.reads, *critic)


def trace_step(calls: PlacedCalls, call: str) -> Traced:
    """Trace the optimizer's step."""
    layout: Layout = getattr(calls.layouts, call)
    training = calls.config.training
    optimizer = make_optimizer(
        training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        weight_decay=training.weight_decay,
    )
    weights = shapes.model_shapes(calls.model(call), layout, FLOAT32)
    return apply.trace(*shapes.step_shapes(weights, optimizer, layout), optimizer=optimizer)
