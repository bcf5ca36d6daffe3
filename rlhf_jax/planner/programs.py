"""Describe the programs of each call of a plan: their code, and the predictions of formulas.

Devices may be absent: those of a TPU topology suffice. Nothing is compiled or run.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_jax.config import derived
from rlhf_jax.generation import drafting
from rlhf_jax.inference.scoring import READ, score_packed
from rlhf_jax.memory import estimate
from rlhf_jax.memory.updates import update_parts
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.planner import shapes
from rlhf_jax.planner.generation_programs import arrivals, drafts, prefill, rounds
from rlhf_jax.planner.pipelined_programs import pipelined_updates
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls, Predicted
from rlhf_jax.planner.student_programs import student_updates
from rlhf_jax.rewards.models import read_scores
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.training.gradients import sum_gradients
from rlhf_jax.types import ModelConfig


def programs(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield the programs of all calls, in the order of a plan."""
    for call in calls.plan.placements:
        run = calls.run(call)
        if call == "generation":
            yield from arrivals(calls)
            yield prefill(calls)
            yield from drafts(calls)
            yield from rounds(calls)
        elif call.endswith("_inference"):
            for model in dict.fromkeys(calls.models.of(call)):
                yield scores(calls, call, model)
        elif call in calls.trained:
            yield from (
                pipelined_updates(calls, call) if run.is_pipelined else [gradient(calls, call)]
            )
            yield optimizers_step(calls, call)
        if call == "policy_training" and drafting.trains_drafter(calls.config):
            yield from student_updates(calls)


def scores(calls: PlacedCalls, call: str, model: ModelConfig) -> CallProgram:
    """Return the program that scores a micro-batch by a model.

    Texts of rewards are padded to whole buckets, and give one number each.
    """
    config = calls.config
    run = calls.run(call)
    placed = calls.placed(call)
    role = call.removesuffix("_inference")
    rewards = role == "reward"
    passes = placed.passes(chosen=not rewards)
    if rewards:
        passes = passes._replace(tokens=derived.reward_tokens(config, model), predicted=1)

    letters = (0, 1) if derived.compares_pairs(call, model) else None  # any two tokens

    def run_scores(execute: Execute, _: int) -> object:
        weights = shapes.model_shapes(model, run.layout)
        if rewards:
            tokens, last = shapes.prompt_shapes(passes.samples, passes.tokens, run.layout)
            return execute(read_scores, weights, tokens, last, run.layout, letters)
        batch = shapes.packed_shapes(config, run.layout, passes.samples, READ)
        temperature = derived.temperature(config)
        return execute(score_packed, weights, batch, temperature=temperature, layout=run.layout)

    held = run.weights(model)
    work = placed.forward(model, passes)
    rows = run.batch_rows if rewards else run.scored_rows
    size = held + estimate.scoring_bytes(run, role, model, rows)
    return CallProgram(
        call,
        "rewards" if rewards else "scores",
        run_scores,
        Predicted(size, work.flops, work.traffic.total),
        resident=calls.always(call, ["models that score"]) - held,
        depth=model.num_layers,
        turns=shapes.pairs_of_texts(config, run.layout, passes.samples),
    )


def gradient(calls: PlacedCalls, call: str) -> CallProgram:
    """Return the gradient of a later micro-batch, with an existing sum."""
    run = calls.run(call)
    model = calls.model(call)
    placed = calls.placed(call)
    passes = placed.passes(calls.config.training.minibatches, chosen=True)

    def run_gradient(execute: Execute, _: int) -> object:
        weights = shapes.model_shapes(model, run.layout, FLOAT32)
        batch = shapes.micro_batch_shapes(calls.config, run.layout, passes.samples, calls.reads)
        return sum_gradients(calls.learner(call), weights, [batch], execute=execute)

    held = run.weights(model, FLOAT32)
    size = held + sum(part.bytes for part in update_parts(run, model))
    work = placed.gradient(model, passes)
    before = calls.trained[: calls.trained.index(call)]
    return CallProgram(
        call,
        "gradient",
        run_gradient,
        Predicted(size, work.flops, work.traffic.total),
        resident=calls.always(call) - held + calls.waiting(call, before),
        depth=model.num_layers,
        turns=shapes.pairs_of_texts(calls.config, run.layout, passes.samples),
    )


def optimizers_step(calls: PlacedCalls, call: str) -> CallProgram:
    """Return the step of a model's optimizer: weights, two moments and a gradient."""
    run = calls.run(call)
    model = calls.model(call)
    weights = shapes.model_shapes(model, run.layout, FLOAT32)
    held = run.weights(model, FLOAT32)
    others = [one for one in calls.trained if one != call]
    return CallProgram(
        call,
        "optimizer's step",
        lambda execute, _: shapes.run_step(calls.learner(call), weights, execute),
        Predicted(4 * held),
        resident=calls.always(call) - 3 * held + calls.waiting(call, others),
        depth=model.num_layers,
    )
