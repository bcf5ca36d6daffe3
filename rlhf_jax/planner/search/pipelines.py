"""Predict the seconds of policy and critic trained as pipelines, concurrently and in turn.

A stage is priced as a separate model on the devices of its slice; transfers between stages go over
the network, without overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_jax.memory.sizes import weight_bytes
from rlhf_jax.mesh import AXES, FLOAT32, abstract_mesh
from rlhf_jax.models.attention import packed_block
from rlhf_jax.pipeline.problem import PipelineProblem
from rlhf_jax.placement.pipelined import (
    StageTimes,
    bubble_warnings,
    fused_schedule,
    joint_problem,
    serial_schedule,
)
from rlhf_jax.planner.search.collectives import received_bytes
from rlhf_jax.planner.search.costs import (
    LATENCY,
    CallCost,
    PlacedRun,
    Work,
    forward_flops,
    gradient_flops,
)
from rlhf_jax.planner.search.traffic import ShardedModel, Traffic, forward_traffic, gradient_traffic
from rlhf_jax.types import ModelConfig


class StageWorks(NamedTuple):
    """Hold the work of a copy's stages for a micro-batch; the last does all in its backward."""

    first_forward: Work
    forward: Work
    first_backward: Work
    backward: Work
    last: Work


class PipelineCost(NamedTuple):
    """Hold the costs of one model's pipeline in an update."""

    times: StageTimes  # seconds
    flops: float  # on all devices together
    received: float  # bytes that a device of a middle stage receives
    gathering: float  # seconds in which weights move to the ends, and gradients leave them


@dataclasses.dataclass(frozen=True)
class JointTraining:
    """Hold the predicted costs per step of a policy and a critic trained as pipelines."""

    calls: tuple[str, ...]
    pipes: tuple[PipelineCost, ...]  # of each call
    updates: int  # optimizer steps of a step

    @property
    def times(self) -> list[StageTimes]:
        """Return the seconds of the stages of each pipe."""
        return [pipe.times for pipe in self.pipes]

    @property
    def gathering(self) -> float:
        """Return the seconds of an update before its first forward and after its last backward."""
        return sum(pipe.gathering for pipe in self.pipes)

    @property
    def problem(self) -> PipelineProblem:
        """Return the pipes of one update."""
        return joint_problem(self.times)

    @property
    def fused(self) -> float:
        """Return the seconds of a step, each pipeline in the bubbles of the other."""
        return self.updates * (fused_schedule(self.problem).makespan + self.gathering)

    @property
    def serial(self) -> float:
        """Return the seconds of a step, one pipeline after the other by 1F1B."""
        return self.updates * (serial_schedule(self.problem).makespan + self.gathering)

    @property
    def least(self) -> float:
        """Return a lower bound of the seconds of any schedule of these pipelines."""
        return self.updates * (fused_schedule(self.problem).bound + self.gathering)

    @property
    def quick_least(self) -> float:
        """Return such a bound quickly, as `least` without a schedule."""
        return self.updates * (quick_bound(self.problem) + self.gathering)

    @property
    def shares(self) -> dict[str, float]:
        """Return seconds by call in proportion to each pipeline's work; their sum is the step's."""
        work = [one.micro_batches * (sum(one.forward) + sum(one.backward)) for one in self.times]
        each = [self.fused * own / sum(work) for own in work]
        return dict(zip(self.calls, each, strict=True))

    @property
    def costs(self) -> list[CallCost]:
        """Return the costs of each call of a step."""
        return [
            CallCost(call, self.updates * pipe.flops, self.updates * pipe.received, seconds)
            for (call, seconds), pipe in zip(self.shares.items(), self.pipes, strict=True)
        ]

    @property
    def warnings(self) -> list[str]:
        """Yield a warning for each pipeline of too few micro-batches."""
        pairs = zip(self.calls, self.times, strict=True)
        return bubble_warnings((call, one.micro_batches, len(one.forward)) for call, one in pairs)


def quick_bound(problem: PipelineProblem) -> float:
    """Return a lower bound of the makespan, quickly.

    A node does all its tasks, after the least time before a first one and before that after a last.
    """
    work = [0.0] * problem.nodes
    before = [float("inf")] * problem.nodes
    after = [float("inf")] * problem.nodes
    for pipe in problem.pipes:
        for stage, node in itertools.chain.from_iterable(map(enumerate, pipe.nodes)):
            work[node] += pipe.micro_batches * (pipe.forward[stage] + pipe.backward[stage])
            before[node] = min(before[node], sum(pipe.forward[:stage]))
            after[node] = min(after[node], sum(pipe.backward[:stage]))
    return max(map(sum, zip(before, work, after, strict=True)))


def joint_training(placed: Sequence[tuple[str, PlacedRun]]) -> JointTraining:
    """Predict the training of policy and critic as pipelines, or of a single one.

    placed: each call that trains, with the run on its devices, in role "pipelined".
    """
    training = placed[0][1].run.config.training
    return JointTraining(
        calls=tuple(call for call, _ in placed),
        pipes=tuple(pipeline_cost(one, one.run.models.of(call)[0]) for call, one in placed),
        updates=training.epochs * training.minibatches,
    )


def one_stage(placed: PlacedRun) -> PlacedRun:
    """Return the run for one stage of a copy, on the devices of its node."""
    layout = placed.run.layout
    shape = {axis: layout.extent(axis) for axis in AXES} | {"slices": 1, "data": 1}
    stage_layout = dataclasses.replace(
        layout, mesh=abstract_mesh(shape, layout.platform), role="training"
    )
    run = dataclasses.replace(placed.run, layout=stage_layout)
    return PlacedRun.on_part(run, placed.hardware)


def stage_works(placed: PlacedRun, model: ModelConfig) -> StageWorks:
    """Return the work of the stages of a model.

    The embedding is the first stage's, and the head belongs to the last one's backward. A backward
    recomputes its forward, whatever `training.remat` is. Copies share a micro-batch's rows.
    """
    layout = one_stage(placed).run.layout
    passes = placed.passes(chosen=True)
    tokens = passes.on_device(placed.run.layout)
    samples = passes.samples // placed.run.layout.extent("data")
    part = dataclasses.replace(model, num_layers=model.num_layers // placed.run.layout.slices)
    layers = ShardedModel(part, layout, placed.hardware.platform)
    ends = dataclasses.replace(layers, model=dataclasses.replace(model, num_layers=0))

    # the embedding and the head add the work of a model without layers
    of_ends = gradient_traffic(ends, tokens, remat=False)
    embedding = Traffic(width=ends.exchanged(tokens.fed), tensor=ends.summed(tokens.fed))
    forward = forward_traffic(layers, tokens).minus(forward_traffic(ends, tokens))
    backward = gradient_traffic(layers, tokens, remat=False).minus(of_ends)

    block = packed_block(layout)
    of_layers = forward_flops(part, samples, passes.tokens, predicted=0, block=block)
    gradient = functools.partial(
        gradient_flops, part, samples, passes.tokens, remat=False, block=block
    )
    of_gradient = gradient(predicted=0)
    of_last = gradient(predicted=passes.predicted)
    return StageWorks(
        first_forward=Work(of_layers, forward.plus(embedding)),
        forward=Work(of_layers, forward),
        first_backward=Work(of_gradient, backward.plus(embedding)),
        backward=Work(of_gradient, backward),
        last=Work(of_last, backward.plus(of_ends).minus(embedding)),
    )


def pipeline_cost(placed: PlacedRun, model: ModelConfig) -> PipelineCost:
    """Return the costs of a model cut into stages.

    The last stage's own forward only receives.
    """
    stages = placed.run.layout.slices
    copies = placed.run.layout.extent("data")
    alone = one_stage(placed)
    works = stage_works(placed, model)
    hidden = ShardedModel(model, alone.run.layout, placed.hardware.platform).hidden(
        placed.passes(chosen=True).on_device(placed.run.layout).fed
    )
    seconds = functools.partial(alone.seconds, share=alone.chip.efficiency.training)
    hop, gathering = travelling_seconds(placed, model, hidden)
    inner = hop + seconds(works.forward)
    micro_batches = placed.run.micro_batches
    times = StageTimes(
        micro_batches,
        forward=(seconds(works.first_forward), *[inner] * (stages - 2), hop),
        backward=(*[hop + seconds(works.backward)] * (stages - 1), seconds(works.last)),
        kept=hidden / placed.run.layout.extent("tensor"),
        copies=copies,
    )
    inner_flops = works.forward.flops + works.backward.flops
    flops = copies * ((stages - 1) * inner_flops + works.last.flops)
    received = works.forward.traffic.total + works.backward.traffic.total + 2 * hidden
    return PipelineCost(times, micro_batches * flops, micro_batches * received, gathering)


def travelling_seconds(placed: PlacedRun, model: ModelConfig, hidden: float) -> tuple[float, float]:
    """Return the seconds of a hop between stages, and those once per update, before and after.

    Slices send over the network, if there is one. hidden: bytes of a device's rows, of which
    devices that share them over `tensor` send a part each, and gather it over their links. Each
    slice has a part of the embedding and of the head; the stages that need these are on the first
    and on the last slice, so both travel at once: weights in the compute dtype, and gradients in
    float32. At the end copies sum their gradients.
    """
    chip = placed.chip
    bandwidth = chip.link_bandwidth
    if placed.hardware.nodes > 1 and not chip.torus_axes:
        bandwidth = min(bandwidth, chip.network_bandwidth)
    bandwidth *= chip.efficiency.links
    tensor = placed.run.layout.extent("tensor")
    gathered = received_bytes("all-gather", hidden, tensor) / placed.bandwidth("tensor")
    hop = LATENCY + hidden / tensor / bandwidth + gathered

    embedding = dataclasses.replace(model, num_layers=0, tied=True, scalar_head=False)
    layout = one_stage(placed).run.layout
    size = sum(weight_bytes(embedding, dtype, layout, True) for dtype in (layout.dtype, FLOAT32))
    gradient = weight_bytes(model, FLOAT32, placed.run.layout, True)
    size += received_bytes("all-reduce", gradient, placed.run.layout.extent("data"))
    return hop, 2 * LATENCY + size / bandwidth
