"""Describe the programs of models that train as pipelines, with the predictions of formulas.

Equal stages are one program: the first, one in the middle and the last of a copy are compiled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from rlhf_jax.config import derived
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.memory.updates import KEPT, activation_bytes, largest_work
from rlhf_jax.mesh import FLOAT32, bytes_per_device
from rlhf_jax.placement.transfer import ends_programs
from rlhf_jax.planner import shapes
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls, Predicted
from rlhf_jax.planner.search.collectives import received_bytes
from rlhf_jax.planner.search.costs import Work
from rlhf_jax.planner.search.pipelines import StageWorks, stage_works
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.training import stages
from rlhf_jax.training.gradients import Gradient, Learner
from rlhf_jax.training.pipelined import RunningStage, run_backward
from rlhf_jax.training.stages import Stage
from rlhf_jax.types import Model, ModelConfig


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """Hold a stage of a copy of a call's pipeline: its part of the model, and its inputs."""

    calls: PlacedCalls  # of one copy
    call: str
    stage: Stage
    part: Model  # shapes
    config: ModelConfig  # of its layers
    reads: tuple[str, ...]  # the columns of a micro-batch

    @property
    def run(self) -> PlannedRun:
        """Return the run for the stage, which keeps all results of its layers."""
        layout = dataclasses.replace(self.stage.settings.layout, role="training")
        return dataclasses.replace(
            self.calls.run(self.call), layout=layout, layouts={}, remat=False
        )

    @property
    def batch(self) -> Any:
        """Return the shapes of the stage's part of a micro-batch."""
        rows = derived.microbatch_rows(self.calls.config)
        layout = self.stage.settings.layout
        made = shapes.micro_batch_shapes(self.calls.config, layout, rows, self.reads)
        return self.stage.needed(made)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Return the shape of the hidden states between stages, as they travel."""
        layout = self.stage.settings.layout
        rows = derived.microbatch_rows(self.calls.config)
        packed = shapes.packed_shapes(self.calls.config, layout, rows, ())
        shape = (*packed.tokens.shape, self.config.width)
        place = stages.hidden_sharding(shape, layout)
        return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=place)

    def forward(self, execute: Execute, _: int) -> object:
        """Run the forward pass of a micro-batch."""
        given = None if self.stage.reads_tokens else self.hidden
        return execute(stages.forward, self.part, given, self.batch, stage=self.stage)

    def backward(self, execute: Execute, _: int) -> object:
        """Run the gradient of a later micro-batch, with an existing sum."""
        given = None if self.stage.reads_tokens else self.hidden
        cotangent = None if self.stage.loss else self.hidden
        running = RunningStage(self.stage, self.part)
        return run_backward(running, given, self.batch, cotangent, execute)

    def forward_bytes(self) -> float:
        """Return a device's bytes in a forward pass, arguments included."""
        run = self.run
        given = 1 if self.stage.reads_tokens else 2
        work = run.forward_packed(self.config, run.line_tokens)
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
        layer = run.backward_packed(self.config, run.line_tokens)
        layer += run.gathered(self.config)
        work = largest_work(run, self.config).bytes if last else layer
        kept = activation_bytes(run, self.config)
        sums = held_bytes(self.part) + held_bytes(self.part, FLOAT32)
        return sums + copies + kept + work + passed * held_bytes(self.hidden)


def pipelined_updates(calls: PlacedCalls, call: str) -> Iterator[CallProgram]:
    """Yield the programs that place a stage's ends, those of stages, and the sum over copies."""
    weights = shapes.model_shapes(calls.model(call), calls.run(call).layout, FLOAT32)
    learner = calls.learner(call)
    copies = stages.copies_of(learner)
    config = copy.deepcopy(calls.config)
    rows = max(1, derived.microbatch_rows(config) // len(copies))
    config.training.update(microbatch_rows=rows, microbatch_tokens=0)
    calls_of_copy = dataclasses.replace(calls, config=config)
    of_copy = stages.stages_of(copies[0])
    model = stages.model_of_copy(weights, copies[0], learner)
    parts = stages.split_model(model, of_copy)
    whole = calls.model(call)
    shallow = dataclasses.replace(whole, num_layers=whole.num_layers // len(of_copy))
    works = stage_works(calls.placed(call), whole)
    # Pipelines run at once: the gradients of both are resident, and the inputs kept by their
    # stages.
    resident = calls.always(call, ["gradients, float32", KEPT])
    for index in sorted({0, min(1, len(of_copy) - 2), len(of_copy) - 1}):
        program = StageProgram(
            calls_of_copy, call, of_copy[index], parts[index], shallow, calls.reads
        )
        yield from _ends(calls, call, model, of_copy[index], resident)
        yield from _tasks(program, works, resident)
    yield from _summed_copies(calls, call, learner, weights, resident)


def _ends(
    calls: PlacedCalls, call: str, model: Model, stage: Stage, resident: float
) -> Iterator[CallProgram]:
    """Yield the programs that move the embedding or the head to a stage that has it."""
    ends = dataclasses.replace(stage.without_others(model), layers=(), norm=None)
    layout = stage.settings.layout
    itemsize = layout.dtype.itemsize
    for program in ends_programs(ends, layout, calls.devices):
        yield CallProgram(
            call,
            "an embedding comes" if stage.reads_tokens else "a head comes",
            lambda execute, _, program=program: program.run(execute),
            Predicted(program.device_bytes(itemsize), received=program.received_bytes(itemsize)),
            resident=resident - program.arguments,
            depth=1,
        )


def _tasks(program: StageProgram, works: StageWorks, resident: float) -> Iterator[CallProgram]:
    """Yield the forward and the backward of a stage; the last one has only a backward."""
    first = program.stage.reads_tokens
    last = program.stage.loss is not None
    name = "first" if first else "last" if last else "middle"
    gathered = received_bytes(
        "all-gather",
        held_bytes(program.hidden) * program.run.layout.extent("tensor"),
        program.run.layout.extent("tensor"),
    )
    held = held_bytes(program.part.layers) + held_bytes(program.part.layers, FLOAT32)
    config = program.calls.config
    layout = program.stage.settings.layout

    def task(kind: str, work: Work, size: float, hops: int, run: Any) -> CallProgram:
        """Return the program of a task that gathers hidden states from some neighbours."""
        return CallProgram(
            program.call,
            f"{name} stage {kind}",
            run,
            Predicted(size, work.flops, work.traffic.total + hops * gathered),
            resident=resident - held,
            depth=program.config.num_layers,
            turns=shapes.pairs_of_texts(config, layout, derived.microbatch_rows(config)),
        )

    if not last:
        work = works.first_forward if first else works.forward
        size = program.forward_bytes()
        yield task("forward", work, size, not first, program.forward)
    work = works.first_backward if first else works.last if last else works.backward
    size = program.backward_bytes()
    yield task("backward", work, size, 1 if first or last else 2, program.backward)


def _summed_copies(
    calls: PlacedCalls, call: str, learner: Learner, weights: Model, resident: float
) -> Iterator[CallProgram]:
    """Yield the programs that sum the gradients of several copies, once per minibatch."""
    copies = stages.copies_of(learner)
    if len(copies) == 1:
        return
    layout = learner.settings.layout
    held = held_bytes(weights)
    parts = [stages.model_of_copy(weights, copy, learner) for copy in copies]
    gradients = [Gradient(part, {}) for part in parts]  # without the metrics
    yield CallProgram(
        call,
        "sum of copies",
        lambda execute, _: stages.sum_copies(gradients, layout, execute),
        Predicted(held, received=received_bytes("all-reduce", held, len(copies))),
        resident=resident,
        depth=calls.model(call).num_layers,
    )


def held_bytes(tree: Any, dtype: Any = None) -> int:
    """Return the bytes of placed shapes on a device, in another dtype."""
    if dtype is not None:
        tree = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), tree)
    return bytes_per_device(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))
