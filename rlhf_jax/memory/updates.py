"""Estimate a device's bytes in updates of policy, critic and student.

Weights and optimizers are not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast as typed

from rlhf_jax.config import derived
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.memory.parts import FEWER_ROWS, SPLIT, SPLIT_TENSORS, Part
from rlhf_jax.memory.sizes import PlannedRun, row_share
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.placement.pipelined import StageTimes, joint_problem, limit_inputs
from rlhf_jax.types import ModelConfig

KEPT = "hidden states that stages keep and send"


def update_parts(run: PlannedRun, model: ModelConfig) -> list[Part]:
    """List the parts of one model's update besides its weights and optimizer.

    The gradient is summed in float32; a micro-batch's gradient and a copy of the weights are in the
    compute dtype. The backward pass runs through the head first and then the layers: the larger
    counts.
    """
    micro_batch = run.cast_weights(model) + run.weights(model)
    return [
        Part("gradients, float32", "training", run.weights(model, FLOAT32), SPLIT),
        Part("weights and gradients of a micro-batch", "training", micro_batch, SPLIT),
        Part("activations kept by layer", "training", activation_bytes(run, model), FEWER_ROWS),
        largest_work(run, model),
    ]


def pipelined_parts(learners: Sequence[tuple[PlannedRun, ModelConfig]]) -> list[Part]:
    """List the parts of pipelined updates of policy and critic, on a device with a stage.

    learners: of each model its run, in the layout of its training call, and its shape. Gradients of
    both are summed at once, and both have weights in the compute dtype; the rest is of one
    micro-batch at one stage.
    """
    # A backward recomputes all of its stage's layers once, so no layer is recomputed again.
    learners = [(dataclasses.replace(run, remat=False), model) for run, model in learners]
    gradients = sum(run.weights(model, FLOAT32) for run, model in learners)
    micro_batch = sum(run.cast_weights(model) for run, model in learners)
    # One model's gradient of a micro-batch exists at a time.
    micro_batch += max(run.weights(model) for run, model in learners)
    activations = max(activation_bytes(run, model) for run, model in learners)
    # The policy's head and the critic's embedding are on one slice: the weights and a micro-batch's
    # gradient in the compute dtype, and the sum in float32.
    ends = 0
    for run, model in learners:
        entries = run.tensor_share(model.vocab_size) * model.width // run.layout.extent("fsdp")
        ends += entries * (2 * run.layout.dtype.itemsize + FLOAT32.itemsize)
    pipes = [stage_times(run, model) for run, model in learners]
    limit = typed(float, limit_inputs(joint_problem(pipes)).limit)
    inputs = int(min(limit, sum(pipe.micro_batches * pipe.kept for pipe in pipes)))
    # Inputs wait for their backward, as many of both pipes as a schedule may keep on a node, and at
    # most as many hidden states and cotangents until the next stage takes them.
    waiting = 2 * inputs
    works = [largest_work(run, model) for run, model in learners]
    return [
        Part("gradients, float32", "training", gradients, SPLIT),
        Part("weights and gradients of a micro-batch", "training", micro_batch, SPLIT),
        Part("embedding or head of a stage, and its gradients", "training", ends, SPLIT_TENSORS),
        Part(KEPT, "training", waiting, FEWER_ROWS),
        Part("activations kept by layer", "training", activations, FEWER_ROWS),
        max(works, key=lambda work: work.bytes),
    ]


def student_parts(run: PlannedRun) -> list[Part]:
    """List the parts of a student's update besides its weights and optimizer.

    They are gradients as in `update_parts`, the policy's hidden states of all its rows, and the
    working memory of the policy or the student, or their logits and gradients. A pipelined policy
    is copied to all devices for this, in the compute dtype.
    """
    copied = run.is_pipelined
    run = dataclasses.replace(run, layout=run.layout.unpipelined)
    copy = run.weights(run.models.policy) if copied else 0
    weights = run.weights(run.models.drafter, ends=False)
    gradients = run.weights(run.models.drafter, FLOAT32, ends=False) + weights
    samples = derived.student_samples(run.config)
    hidden = hidden_bytes(run, row_share(samples, run.layout))
    work = max(copy + reading_bytes(run, copied=copied), learning_bytes(run))
    return [
        Part("student's gradients", "training", gradients, SPLIT),
        Part("the policy's hidden states", "training", hidden, "lower drafter.samples"),
        Part("a layer at work, or logits of both", "training", work, FEWER_ROWS),
    ]


def hidden_bytes(run: PlannedRun, rows: int) -> int:
    """Return the bytes of the policy's hidden states before the predicted tokens of rows."""
    tokens = rows * run.text_tokens
    return tokens * run.models.policy.width * run.layout.dtype.itemsize


def reading_bytes(run: PlannedRun, *, copied: bool = False) -> int:
    """Return the working memory of the policy, besides its weights, to read rows for its student.

    copied: it is a copy in the compute dtype.
    """
    policy = run.models.policy
    work = run.forward_packed(policy, run.line_tokens)
    cast = 0 if copied else run.cast_weights(policy, ends=False)
    return cast + run.gathered_block(policy) + work


def learning_bytes(run: PlannedRun) -> int:
    """Return the working memory of a student's backward pass: in a layer, or at the logits.

    Its layers are as large as the policy's, and the kept activations add to either.
    """
    policy = run.models.policy
    work = run.backward_packed(policy, run.line_tokens)
    layer = run.weights(run.models.drafter, ends=False) + run.gathered(policy) + work
    kept = activation_bytes(run, typed(ModelConfig, run.models.drafter))
    return kept + max(layer, run.temporaries.distilled * run.logits(policy))


def stage_times(run: PlannedRun, model: ModelConfig) -> StageTimes:
    """Return the work of a pipeline's stages for a micro-batch, in a device's multiplications.

    `kept` is in bytes.
    """
    itemsize = run.layout.dtype.itemsize
    tokens = run.line_tokens
    # A device stores its part over fsdp of these weights, and multiplies by all of them.
    weights = run.weights(model, ends=False) / itemsize * run.layout.extent("fsdp")
    return StageTimes.of_work(
        run.layout,
        run.micro_batches,
        forward=tokens * weights,
        # The logits, again for the backward, and the gradients of head and hidden states.
        head=4 * tokens * model.width * run.outputs(model),
        kept=tokens * run.tensor_share(model.width) * itemsize,
    )


def activation_bytes(run: PlannedRun, model: ModelConfig) -> int:
    """Return the bytes that the backward pass of a micro-batch keeps, of a stage's layers if any.

    Without a pipeline all layers are one stage.
    """
    stages = run.layout.slices if run.is_pipelined else 1
    layers = -(-model.num_layers // stages)
    return layers * run.line_tokens * run.kept_values(model)


def largest_work(run: PlannedRun, model: ModelConfig) -> Part:
    """Return the larger working memory of a layer and the head."""
    itemsize = run.layout.dtype.itemsize
    layer = run.backward_packed(model, run.line_tokens) + run.gathered(model)
    # In float32 a chunk's gradient of the head and its logits; if there are several chunks,
    # copies of the head and its gradient so far.
    several = run.line_tokens > CHUNK
    copies = 4 * (run.temporaries.head_sums if several else 1) + (itemsize if itemsize < 4 else 0)
    head = copies * model.width * run.outputs(model) + run.logits(model)
    works = [
        Part("one layer at work", "training", layer, FEWER_ROWS),
        Part("head and a chunk of logits", "training", head, SPLIT_TENSORS),
    ]
    return max(works, key=lambda work: work.bytes)
