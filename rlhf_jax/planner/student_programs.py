"""Trace the programs by which a student learns from shapes, with what formulas say of each."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
from jax.stages import Traced

from rlhf_jax.config import derived, memory_updates
from rlhf_jax.config.sizes import row_share
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.placement.search.costs import forward_flops, gradient_flops, product_flops
from rlhf_jax.placement.search.traffic import ShardedModel, forward_traffic, gradient_traffic
from rlhf_jax.planner import shapes
from rlhf_jax.planner.placed_calls import CallProgram, Foreseen, PlacedCalls
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.setup.settings import student_settings
from rlhf_jax.training import distill
from rlhf_jax.training.distill import DISTILLATION
from rlhf_jax.training.gradients import Gradient, accumulate
from rlhf_jax.training.optimizer import apply, make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array, Model, ModelConfig

CALL = "policy_training"  # on whose devices a student learns


def student_updates(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield how the policy reads a micro-batch, the student's gradient, and its step."""
    settings = student_settings(calls.config, calls.layouts, calls.remat)
    config = copy.deepcopy(calls.config)
    config.training.microbatch_rows = settings.microbatch_rows
    placements = dict(calls.plan.placements)
    placements[CALL] = dataclasses.replace(placements[CALL], pipelined=False)
    plan = dataclasses.replace(calls.plan, placements=placements)
    own = dataclasses.replace(calls, config=config, plan=plan)
    # of a pipeline, no device of which has all layers, it reads a copy in the compute dtype
    yield reading(own, settings, copied=calls.run(CALL).is_pipelined)
    yield gradient(own, settings)
    yield step(own)


def reading(calls: PlacedCalls, settings: TrainingSettings, *, copied: bool) -> CallProgram:
    """Return what reads a micro-batch with the policy, or with a copy of it; it takes no head."""
    run = calls.run(CALL)
    policy = calls.models.policy
    passes = calls.placed(CALL).passes()
    sharded = ShardedModel(policy, run.layout, calls.hardware.platform)
    head = sharded.gathered(sharded.weights.head, sharded.width)
    dtype = run.layout.dtype if copied else FLOAT32
    held = run.weights(dataclasses.replace(policy, tied=True), dtype)
    hidden = memory_updates.hidden_bytes(run, run.batch_rows)

    def trace(_: int) -> Traced:
        weights = shapes.model_shapes(policy, run.layout, dtype)
        return distill.with_hidden_states.trace(weights, distill_batch(calls), settings)

    return CallProgram(
        CALL,
        "student's text",
        trace,
        Foreseen(
            held + hidden + memory_updates.reading_bytes(run, copied=copied),
            forward_flops(policy, passes.samples, passes.tokens, predicted=0),
            forward_traffic(sharded, passes.on_device(run.layout)).total - head,
        ),
        beside=calls.always(CALL) - held * (not copied) + _all_hidden(calls) - hidden,
        depth=policy.num_layers,
    )


def gradient(calls: PlacedCalls, settings: TrainingSettings) -> CallProgram:
    """Return a student's gradient of a later micro-batch: the sum so far is there.

    Logits of both models are made once, and the student's differentiated by its hidden states: the
    head has three products and no gradient, and neither has the embedding.
    """
    run = calls.run(CALL)
    policy = calls.models.policy
    student = _student(calls)
    passes = calls.placed(CALL).passes()
    _, of_head = product_flops(policy)
    flops = gradient_flops(student, passes.samples, passes.tokens, 0, remat=calls.remat)
    flops += 3 * of_head * passes.samples * passes.predicted

    tokens = passes.on_device(run.layout)
    layers = ShardedModel(student, run.layout, calls.hardware.platform)
    ends = dataclasses.replace(layers, model=dataclasses.replace(student, num_layers=0))
    sent = gradient_traffic(layers, tokens, remat=calls.remat)
    sent = sent.minus(gradient_traffic(ends, tokens, remat=calls.remat))
    sent = sent.plus(forward_traffic(ends, tokens))

    own = run.weights(student, FLOAT32, ends=False)
    of_policy = run.weights(policy, FLOAT32) - run.weights(policy, FLOAT32, ends=False)
    hidden = memory_updates.hidden_bytes(run, run.batch_rows)
    work = run.weights(student, ends=False) + memory_updates.learning_bytes(run)

    def trace(_: int) -> Traced:
        weights = student_shapes(calls)
        policy_ends = dataclasses.replace(
            shapes.model_shapes(policy, run.layout, FLOAT32), layers=()
        )
        given = (weights, distill_batch(calls, read=True), policy_ends)
        how = dict(loss=DISTILLATION, settings=settings)
        first = jax.eval_shape(functools.partial(accumulate, None, **how), *given)
        total = Gradient(weights, shapes.repeated(first.metrics, run.layout))
        return accumulate.trace(total, *given, **how)

    return CallProgram(
        CALL,
        "student's gradient",
        trace,
        Foreseen(2 * own + of_policy + hidden + work, flops, sent.total),
        beside=calls.always(CALL) - own - of_policy + _all_hidden(calls) - hidden,
        depth=student.num_layers,
    )


def step(calls: PlacedCalls) -> CallProgram:
    """Return the optimizer's step of a student: weights, two moments and a gradient."""
    run = calls.run(CALL)
    own = run.weights(_student(calls), FLOAT32, ends=False)
    optimizer = make_optimizer(
        calls.config.drafter.learning_rate, max_grad_norm=calls.config.training.max_grad_norm
    )

    def trace(_: int) -> Traced:
        given = shapes.step_shapes(student_shapes(calls), optimizer, run.layout)
        return apply.trace(*given, optimizer=optimizer)

    return CallProgram(
        CALL,
        "student's step",
        trace,
        Foreseen(4 * own),
        beside=calls.always(CALL) - 3 * own + _all_hidden(calls),
        depth=_student(calls).num_layers,
    )


def student_shapes(calls: PlacedCalls) -> Model:
    """Return the shapes of a student, which has no embedding and no head of its own."""
    made = shapes.model_shapes(_student(calls), calls.run(CALL).layout, FLOAT32)
    return dataclasses.replace(made, embed=typed(Array, None), head=None)


def distill_batch(calls: PlacedCalls, *, read: bool = False) -> PackedSequences:
    """Return the shapes of a micro-batch of a student, which the policy has read, or not yet."""
    layout = calls.run(CALL).layout
    samples = calls.placed(CALL).passes().samples
    batch = shapes.packed_shapes(calls.config, layout, samples, ("positions", "total_tokens"))
    more = {"noise_keys": (2, jnp.uint32)}
    more |= {"hidden": (calls.models.policy.width, layout.dtype)} if read else {}

    def rows(width: int, dtype: jax.typing.DTypeLike) -> Any:
        return shapes.row_shapes(lambda: jnp.zeros((*batch.mask.shape, width), dtype), layout)

    return batch.with_columns(**{name: rows(*size) for name, size in more.items()})


def _student(calls: PlacedCalls) -> ModelConfig:
    """Return the shape of the student, which there must be."""
    assert calls.models.drafter is not None, "A student learns."
    return calls.models.drafter


def _all_hidden(calls: PlacedCalls) -> int:
    """Return the bytes of the policy's hidden states of all texts that its student learns from."""
    run = calls.run(CALL)
    return memory_updates.hidden_bytes(
        run, row_share(derived.student_samples(calls.config), run.layout)
    )
