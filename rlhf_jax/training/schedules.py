"""Find the schedule of concurrent pipelines, from the times of their stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.models.flops import count_flops
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.pipeline.schedule import Schedule
from rlhf_jax.pipeline.search import solve
from rlhf_jax.placement.pipelined import StageTimes, joint_problem, limit_inputs, serial_schedule
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.stages import Stage, backward, copies_of, forward, rows_of_copy, stages_of
from rlhf_jax.types import Model, ModelConfig

RUN_TRIES = 100  # of a search, at most
# Gap to the bound at which it ends, as devices may wait for it: with 16 stages and 50 micro-batches
# that takes a third of a second of the CPU, and to the bound two seconds.
NEAR = 0.01


class FusedSchedule(NamedTuple):
    """Hold a schedule of concurrent pipelines, and their time in turn."""

    schedule: Schedule
    serial: float  # one pipeline after the other, each by 1F1B

    def metrics(self) -> dict[str, float]:
        """Return predictions: times in seconds, or in 10^9 FLOPs without measurements.

        The peak is of the inputs that the fullest slice keeps, in 10^6 bytes.
        """
        return {
            "pipeline/makespan": self.schedule.makespan,
            "pipeline/bound": self.schedule.bound,
            "pipeline/serial": self.serial,
            "pipeline/peak": float(self.schedule.peak.max()) / 1e6,
        }


class PipelineWork(NamedTuple):
    """Hold the facts that determine the FLOPs of a pipeline."""

    config: ModelConfig
    stages: tuple[Stage, ...]  # of one copy
    copies: int
    # a micro-batch's shapes, leaf by leaf, and their tree
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any


def schedule_of(
    learners: Sequence[Learner],
    models: Sequence[Model],
    batches: Sequence[Sequence[PackedSequences]],
    times: Mapping[str, StageTimes],
) -> FusedSchedule:
    """Return the order of a minibatch's tasks on the stages of all learners.

    batches: the micro-batches of each learner, assumed to be as large as the first. times: by call,
    as measured for another micro-batch; without them FLOPs are counted.
    """
    works = []
    for learner, model, own in zip(learners, models, batches, strict=True):
        kept = kept_bytes(learner, model.config, own[0])
        taken = times.get(learner.call)
        if taken is None:
            copies = copies_of(learner)
            leaves, tree = jax.tree.flatten(rows_of_copy(own[0], 0, len(copies)))
            shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
            stages = tuple(stages_of(copies[0]))
            work = PipelineWork(model.config, stages, len(copies), shapes, tree)
            taken = count_stages(work, kept)
        works.append(taken._replace(micro_batches=len(own), kept=kept))
    return _find_schedule(tuple(works))


@functools.lru_cache(maxsize=256)
def _find_schedule(times: tuple[StageTimes, ...]) -> FusedSchedule:
    """Return the schedule from a short search, with a limit on kept inputs."""
    problem = joint_problem(times)
    schedule = solve(limit_inputs(problem), RUN_TRIES, within=NEAR)
    return FusedSchedule(schedule, serial_schedule(problem).makespan)


def kept_bytes(learner: Learner, config: ModelConfig, batch: PackedSequences) -> float:
    """Return the bytes of a micro-batch's hidden states as input of a stage of a copy."""
    layout = learner.settings.layout
    tokens = np.size(batch.tokens) // layout.extent("data")
    return float(tokens * config.width * layout.dtype.itemsize)


@functools.lru_cache(maxsize=256)
def count_stages(work: PipelineWork, kept: float) -> StageTimes:
    """Return the 10^9 FLOPs of each stage of a micro-batch, in place of seconds.

    kept: bytes of the hidden states between stages. The first stage, one in the middle and the last
    one are traced.
    """
    count = len(work.stages)
    batch: PackedSequences = jax.tree.unflatten(work.tree, work.leaves)
    shape = (*batch.tokens.shape, work.config.width)
    given = jax.ShapeDtypeStruct(shape, work.stages[0].settings.layout.dtype)
    # Every pair of blocks of a line counts, as if it were one long sample.
    flops_of = functools.partial(count_flops, turns=batch.pairs.shape[1])
    depth = work.config.num_layers // count
    whole = abstract_weights(work.config)
    layers = jax.tree.map(lambda leaf: leaf.update(shape=(depth, *leaf.shape[1:])), whole.layers)
    whole = dataclasses.replace(whole, layers=layers)

    def gigaflops(stage: Stage) -> tuple[float, float]:
        """Return those of a stage's forward and backward; the last one's forward has none."""
        part = stage.without_others(whole)
        received = None if stage.reads_tokens else given
        needed = stage.needed(batch)
        cotangent = None if stage.loss else given
        run = functools.partial(backward, stage=stage)
        back = flops_of(run, None, part, received, needed, cotangent) / 1e9
        if stage.loss:
            return 0.0, back
        run = functools.partial(forward, stage=stage)
        return flops_of(run, part, received, needed) / 1e9, back

    kinds = [0, *[min(1, count - 2)] * (count - 2), count - 1]
    costs = {kind: gigaflops(work.stages[kind]) for kind in set(kinds)}
    forwards, backwards = zip(*[costs[kind] for kind in kinds], strict=True)
    return StageTimes(1, forwards, backwards, kept, work.copies)
