"""Describe the programs of a student's training, with the predictions of formulas."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp

from rlhf_jax.config import derived
from rlhf_jax.memory import updates
from rlhf_jax.memory.sizes import row_share
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.flops import product_flops
from rlhf_jax.planner import shapes
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls, Predicted
from rlhf_jax.planner.search.costs import forward_flops, gradient_flops
from rlhf_jax.planner.search.traffic import ShardedModel, forward_traffic, gradient_traffic
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.setup.run import student_settings
from rlhf_jax.training import distill
from rlhf_jax.training.distill import DISTILLATION
from rlhf_jax.training.gradients import Learner, sum_gradients
from rlhf_jax.training.optimizer import make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array, Model, ModelConfig

CALL = "policy_training"  # the call whose devices train a student


def student_updates(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield the policy's pass over a micro-batch, the student's gradient, and its step."""
    settings = student_settings(calls.config, calls.layouts[CALL], calls.remat)
    config = copy.deepcopy(calls.config)
    config.training.update(microbatch_rows=settings.microbatch_rows, microbatch_tokens=0)
    placements = dict(calls.plan.placements)
    placements[CALL] = dataclasses.replace(placements[CALL], pipelined=False)
    plan = dataclasses.replace(calls.plan, placements=placements)
    calls_in_slices = dataclasses.replace(calls, config=config, plan=plan)
    # no device of a pipeline has all layers, so a copy in the compute dtype reads it
    yield reading(calls_in_slices, settings, copied=calls.run(CALL).is_pipelined)
    optimizer = make_optimizer(
        config.drafter.learning_rate, max_grad_norm=config.training.max_grad_norm
    )
    learner = Learner("drafter", DISTILLATION, optimizer, settings)
    yield gradient(calls_in_slices, learner)
    yield step(calls_in_slices, learner)


def reading(calls: PlacedCalls, settings: TrainingSettings, *, copied: bool) -> CallProgram:
    """Return the program that reads a micro-batch with the policy or a copy; it uses no head."""
    run = calls.run(CALL)
    policy = calls.models.policy
    passes = calls.placed(CALL).passes()
    sharded = ShardedModel(policy, run.layout, calls.hardware.platform)
    head = sharded.gathered(sharded.weights.head, sharded.width)
    dtype = run.layout.dtype if copied else FLOAT32
    held = run.weights(dataclasses.replace(policy, tied=True), dtype)
    hidden = updates.hidden_bytes(run, run.batch_rows)

    def read(execute: Execute, _: int) -> object:
        weights = shapes.model_shapes(policy, run.layout, dtype)
        return execute(distill.with_hidden_states, weights, distill_batch(calls), settings)

    return CallProgram(
        CALL,
        "student's text",
        read,
        Predicted(
            held + hidden + updates.reading_bytes(run, copied=copied),
            forward_flops(
                policy, passes.samples, passes.tokens, predicted=0, block=packed_block(run.layout)
            ),
            forward_traffic(sharded, passes.on_device(run.layout)).total - head,
        ),
        resident=calls.always(CALL) - held * (not copied) + _all_hidden(calls) - hidden,
        depth=policy.num_layers,
        turns=shapes.pairs_of_texts(calls.config, run.layout, passes.samples),
    )


def gradient(calls: PlacedCalls, learner: Learner) -> CallProgram:
    """Return a student's gradient of a later micro-batch, with an existing sum.

    Logits of both models are made once, and the student's differentiated by its hidden states: the
    head has three products and no gradient, and neither has the embedding.
    """
    run = calls.run(CALL)
    policy = calls.models.policy
    student = _student(calls)
    passes = calls.placed(CALL).passes()
    _, of_head = product_flops(policy)
    flops = gradient_flops(
        student,
        passes.samples,
        passes.tokens,
        predicted=0,
        remat=calls.remat,
        block=packed_block(run.layout),
    )
    flops += 3 * of_head * passes.samples * passes.predicted

    tokens = passes.on_device(run.layout)
    layers = ShardedModel(student, run.layout, calls.hardware.platform)
    ends = dataclasses.replace(layers, model=dataclasses.replace(student, num_layers=0))
    sent = gradient_traffic(layers, tokens, remat=calls.remat)
    sent = sent.minus(gradient_traffic(ends, tokens, remat=calls.remat))
    sent = sent.plus(forward_traffic(ends, tokens))

    of_student = run.weights(student, FLOAT32, ends=False)
    of_policy = run.weights(policy, FLOAT32) - run.weights(policy, FLOAT32, ends=False)
    hidden = updates.hidden_bytes(run, run.batch_rows)
    work = run.weights(student, ends=False) + updates.learning_bytes(run)

    def run_gradient(execute: Execute, _: int) -> object:
        whole = shapes.model_shapes(policy, run.layout, FLOAT32)
        policy_ends = dataclasses.replace(whole, layers=())
        batch = distill_batch(calls, read=True)
        weights = student_shapes(calls)
        return sum_gradients(learner, weights, [batch], policy_ends, execute=execute)

    return CallProgram(
        CALL,
        "student's gradient",
        run_gradient,
        Predicted(2 * of_student + of_policy + hidden + work, flops, sent.total),
        resident=calls.always(CALL) - of_student - of_policy + _all_hidden(calls) - hidden,
        depth=student.num_layers,
        turns=shapes.pairs_of_texts(calls.config, run.layout, passes.samples),
    )


def step(calls: PlacedCalls, learner: Learner) -> CallProgram:
    """Return the optimizer's step of a student: weights, two moments and a gradient."""
    run = calls.run(CALL)
    weights = run.weights(_student(calls), FLOAT32, ends=False)
    return CallProgram(
        CALL,
        "student's step",
        lambda execute, _: shapes.run_step(learner, student_shapes(calls), execute),
        Predicted(4 * weights),
        resident=calls.always(CALL) - 3 * weights + _all_hidden(calls),
        depth=_student(calls).num_layers,
    )


def student_shapes(calls: PlacedCalls) -> Model:
    """Return the shapes of a student, which has no embedding and no head of its own."""
    made = shapes.model_shapes(_student(calls), calls.run(CALL).layout, FLOAT32)
    return dataclasses.replace(made, embed=typed(Array, None), head=None)


def distill_batch(calls: PlacedCalls, *, read: bool = False) -> PackedSequences:
    """Return the shapes of a student's micro-batch, before or after the policy's pass."""
    layout = calls.run(CALL).layout
    samples = calls.placed(CALL).passes().samples
    batch = shapes.packed_shapes(calls.config, layout, samples, ("positions", "total_tokens"))
    more = {"noise_keys": (2, jnp.uint32)}
    more |= {"hidden": (calls.models.policy.width, layout.dtype)} if read else {}

    def rows(width: int, dtype: jax.typing.DTypeLike) -> Any:
        return shapes.row_shapes(lambda: jnp.zeros((*batch.mask.shape, width), dtype), layout)

    return batch.with_columns(**{name: rows(*size) for name, size in more.items()})


def _student(calls: PlacedCalls) -> ModelConfig:
    """Return the shape of the student, which must exist."""
    assert calls.models.drafter is not None, "A student learns."
    return calls.models.drafter


def _all_hidden(calls: PlacedCalls) -> int:
    """Return the bytes of the policy's hidden states of all texts for its student."""
    run = calls.run(CALL)
    samples = derived.student_samples(calls.config)
    return updates.hidden_bytes(run, row_share(samples, run.layout))
