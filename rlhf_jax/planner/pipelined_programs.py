"""Trace the programs of models that train as pipelines, with what formulas say of each.

Stages that are alike are one program: the first, one in the middle and the last of a copy are
compiled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.stages import Traced

from rlhf_jax.algorithms.policy_gradient import CRITIC_LOSS, POLICY_LOSS
from rlhf_jax.config.memory_updates import KEPT, activation_bytes, largest_work
from rlhf_jax.config.sizes import PlannedRun
from rlhf_jax.mesh import FLOAT32, bytes_per_device
from rlhf_jax.placement.search.collectives import received_bytes
from rlhf_jax.placement.search.pipelines import StageWork, StageWorks, stage_works
from rlhf_jax.placement.transfer import trace_ends
from rlhf_jax.planner import shapes
from rlhf_jax.planner.placed_calls import CallProgram, Foreseen, PlacedCalls
from rlhf_jax.training import stages
from rlhf_jax.training.gradients import Gradient, Learner
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.training.stages import Stage
from rlhf_jax.types import Model, ModelConfig


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """Hold a stage of a copy of a call's pipeline: its part of the model, and what it is given."""

    calls: PlacedCalls  # of one copy
    call: str
    stage: Stage
    part: Model  # shapes
    config: ModelConfig  # of its layers
    reads: tuple[str, ...]  # the columns of a micro-batch

    @property
    def run(self) -> PlannedRun:
        """Return the run as the stage sees it, which keeps all that its layers compute."""
        layout = dataclasses.replace(self.stage.settings.layout, role="training")
        return dataclasses.replace(
            self.calls.run(self.call), layout=layout, layouts={}, remat=False
        )

    @property
    def batch(self) -> Any:
        """Return the shapes of what the stage reads of a micro-batch."""
        rows = self.calls.config.training.microbatch_rows
        layout = self.stage.settings.layout
        made = shapes.micro_batch_shapes(self.calls.config, layout, rows, self.reads)
        return self.stage.needed(made)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Return the shape of what stages give each other, as it travels."""
        layout = self.stage.settings.layout
        packed = shapes.packed_shapes(
            self.calls.config, layout, self.calls.config.training.microbatch_rows, ()
        )
        shape = (*packed.tokens.shape, self.config.width)
        place = stages.hidden_sharding(shape, layout)
        return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=place)

    def trace_forward(self, _: int) -> Traced:
        """Trace the forward pass of a micro-batch."""
        given = None if self.stage.reads_tokens else self.hidden
        return stages.forward.trace(self.part, given, self.batch, stage=self.stage)

    def trace_backward(self, _: int) -> Traced:
        """Trace the gradient of a later micro-batch: the sum so far is there."""
        given = None if self.stage.reads_tokens else self.hidden
        pulled = None if self.stage.loss else self.hidden
        passed = (self.part, given, self.batch, pulled)
        first, _ = stages.backward.eval_shape(None, *passed, stage=self.stage)
        total = Gradient(
            jax.tree.map(lambda leaf: leaf.update(dtype=FLOAT32), self.part),
            shapes.repeated(first.metrics, self.stage.settings.layout),
        )
        return stages.backward.trace(total, *passed, stage=self.stage)

    def forward_bytes(self) -> float:
        """Return a device's bytes in a forward pass, arguments included."""
        run = self.run
        given = 1 if self.stage.reads_tokens else 2
        work = run.forward(self.config, run.batch_rows, run.text_tokens)
        work += run.gathered_block(self.config)
        cast = held_bytes(self.part.layers, run.layout.dtype)
        return held_bytes(self.part) + cast + given * held_bytes(self.hidden) + work

    def backward_bytes(self) -> float:
        """Return a device's bytes in a backward pass, arguments included."""
        run = self.run
        last = self.stage.loss is not None
        passed = 1 if self.stage.reads_tokens else 2 if last else 3
        copies = held_bytes(self.part.layers, run.layout.dtype)  # cast, and the gradient of all
        copies += held_bytes(self.part, run.layout.dtype)
        layer = run.backward(self.config, run.batch_rows, run.text_tokens)
        layer += run.gathered(self.config)
        work = largest_work(run, self.config).bytes if last else layer
        kept = activation_bytes(run, self.config)
        sums = held_bytes(self.part) + held_bytes(self.part, FLOAT32)
        return sums + copies + kept + work + passed * held_bytes(self.hidden)


def pipelined_updates(
    calls: PlacedCalls, call: str, reads: tuple[str, ...]
) -> Iterator[CallProgram]:
    """Yield what brings its ends to a stage, what stages compute, and how copies are summed.

    reads: the columns of a micro-batch.
    """
    settings = TrainingSettings.from_config(calls.config, calls.layouts, calls.remat)
    weights = shapes.model_shapes(calls.model(call), calls.run(call).layout, FLOAT32)
    learner = Learner("policy", POLICY_LOSS, optax.identity(), settings)
    if call.startswith("critic"):
        learner = Learner("critic", CRITIC_LOSS, optax.identity(), settings.of_critic)
    copies = stages.copies_of(learner)
    config = copy.deepcopy(calls.config)
    config.training.microbatch_rows = max(1, config.training.microbatch_rows // len(copies))
    own = dataclasses.replace(calls, config=config)
    of_copy = stages.stages_of(copies[0])
    model = stages.model_of_copy(weights, copies[0], learner)
    parts = stages.cut(model, of_copy)
    whole = calls.model(call)
    shallow = dataclasses.replace(whole, num_layers=whole.num_layers // len(of_copy))
    works = stage_works(calls.placed(call), whole)
    # Pipelines run at once: the gradients of both are there, and what their stages have to keep.
    there = {part.name: part.bytes for part in calls.parts(call)}
    beside = calls.always(call) + there.get("gradients, float32", 0) + there.get(KEPT, 0)
    for index in sorted({0, min(1, len(of_copy) - 2), len(of_copy) - 1}):
        program = StageProgram(own, call, of_copy[index], parts[index], shallow, reads)
        yield from _ends(calls, call, model, of_copy[index], beside)
        yield from _tasks(program, works, beside)
    yield from _summed_copies(calls, call, learner, weights, beside)


def _ends(
    calls: PlacedCalls, call: str, model: Model, stage: Stage, beside: float
) -> Iterator[CallProgram]:
    """Yield what brings the embedding or the head to a stage that has it."""
    ends = dataclasses.replace(stage.without_others(model), layers=(), norm=None)
    layout = stage.settings.layout
    itemsize = layout.dtype.itemsize
    for program in trace_ends(ends, layout, calls.devices, layout.dtype):
        yield CallProgram(
            call,
            "an embedding comes" if stage.reads_tokens else "a head comes",
            lambda _, traced=program.traced: traced,
            Foreseen(program.device_bytes(itemsize), received=program.received_bytes(itemsize)),
            beside=beside - program.arguments,
            depth=1,
        )


def _tasks(program: StageProgram, works: StageWorks, beside: float) -> Iterator[CallProgram]:
    """Yield the forward and the backward of a stage; the last one has a backward alone."""
    first = program.stage.reads_tokens
    last = program.stage.loss is not None
    name = "first" if first else "last" if last else "middle"
    gathered = received_bytes(
        "all-gather",
        held_bytes(program.hidden) * program.run.layout.extent("tensor"),
        program.run.layout.extent("tensor"),
    )
    own = held_bytes(program.part.layers) + held_bytes(program.part.layers, FLOAT32)

    def task(kind: str, work: StageWork, size: float, hops: int, trace: Any) -> CallProgram:
        """Return the program of a task, which gathers hidden states of so many neighbours."""
        return CallProgram(
            program.call,
            f"{name} stage {kind}",
            trace,
            Foreseen(size, work.flops, work.traffic.total + hops * gathered),
            beside=beside - own,
            depth=program.config.num_layers,
        )

    if not last:
        work = works.first_forward if first else works.forward
        size = program.forward_bytes()
        yield task("forward", work, size, not first, program.trace_forward)
    work = works.first_backward if first else works.last if last else works.backward
    size = program.backward_bytes()
    yield task("backward", work, size, 1 if first or last else 2, program.trace_backward)


def _summed_copies(
    calls: PlacedCalls, call: str, learner: Learner, weights: Model, beside: float
) -> Iterator[CallProgram]:
    """Yield what sums the gradients of several copies, once a minibatch."""
    copies = stages.copies_of(learner)
    if len(copies) == 1:
        return
    layout = learner.settings.layout
    held = held_bytes(weights)
    traced = []

    def trace(function: Any, *arguments: Any, **options: Any) -> Any:
        """Trace a program in place of running it, and return its results as shapes."""
        traced.append(function.trace(*arguments, **options))
        return function.eval_shape(*arguments, **options)

    def trace_sum(_: int) -> Traced:
        """Trace the sum, without the metrics."""
        parts = [stages.model_of_copy(weights, copy, learner) for copy in copies]
        stages.sum_copies([Gradient(part, {}) for part in parts], layout, trace)
        return traced[-1]

    yield CallProgram(
        call,
        "sum of copies",
        trace_sum,
        Foreseen(held, received=received_bytes("all-reduce", held, len(copies))),
        beside=beside,
        depth=calls.model(call).num_layers,
    )


def held_bytes(tree: Any, dtype: Any = None) -> int:
    """Return the bytes that a device holds of shapes that know where they lie, in another dtype."""
    if dtype is not None:
        tree = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), tree)
    return bytes_per_device(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))
