"""Hold the calls of a plan on absent devices, and describe their programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.stages import Traced

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.parts import Part
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.models.flops import jaxpr_flops
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.placement.plan import CallLayouts, Plan
from rlhf_jax.planner import shapes
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.search.costs import PlacedRun
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.training.gradients import Gradient, Learner
from rlhf_jax.training.optimizer import make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfig, ModelConfigs


class Predicted(NamedTuple):
    """Hold the predictions of formulas for one run of a program."""

    bytes: float  # of a device, arguments included
    flops: float = 0.0  # of matrix products, on all devices together
    received: float = 0.0  # bytes of a device


class CallProgram(NamedTuple):
    """Describe one program of a call: its code, for tracing or compiling, and its costs."""

    call: str
    name: str
    # The code of a run, given shapes of a model with a number of layers: this program is its last.
    run: Callable[[Execute, int], object]
    predicted: Predicted
    resident: float  # other bytes on a device while it runs
    depth: int  # layers of the model
    # if each layer is a part of the program: the two numbers of layers for which it is compiled
    compiled_layers: tuple[int, ...] = ()
    turns: int = 1  # iterations of data-dependent loops: attended pairs of blocks of a line

    def flops(self, traced: Traced) -> int:
        """Count the FLOPs of the traced program, on all devices together."""
        return jaxpr_flops(traced.jaxpr, self.turns)

    def trace(self, depth: int) -> Traced:
        """Trace the program for a model of some depth; its devices may be absent."""
        traced: list[Traced] = []

        def execute(function: jax.stages.Wrapped, *arguments: Any, **options: Any) -> Any:
            """Trace a program instead of running it, and return its results as shapes."""
            traced.append(function.trace(*arguments, **options))
            results = traced[-1].out_info
            if isinstance(results, Gradient) and "layout" in options:  # the sharding of sums
                places = model_shardings(results, options["layout"])
                return shapes.placed(results, places)
            return results

        self.run(execute, depth)
        return traced[-1]


@dataclasses.dataclass(frozen=True)
class PlacedCalls:
    """Hold the calls of a plan, and the devices that they are placed on."""

    config: Config
    models: ModelConfigs
    plan: Plan
    devices: Sequence[Any]
    hardware: Hardware
    remat: bool

    @functools.cached_property
    def layouts(self) -> CallLayouts:
        """Return the layout of each call."""
        return self.plan.layouts(self.devices)

    def run(self, call: str) -> PlannedRun:
        """Return the run for a call; for generation, that of one slice."""
        layout = self.layouts[call]
        if call == "generation":
            layout = layout.split()[0]
        return PlannedRun(self.config, self.models, layout, self.remat, {call: layout})

    def placed(self, call: str) -> PlacedRun:
        """Return the run of a call, and its part of the hardware."""
        return PlacedRun.on_part(self.run(call), self.hardware)

    def model(self, call: str) -> ModelConfig:
        """Return the shape of the model of a call that trains one."""
        return self.models.of(call)[0]

    def shallower(self, role: str, depth: int) -> PlacedCalls:
        """Return the calls with only the first layers of the policy or the drafter."""
        model = dataclasses.replace(getattr(self.models, role), num_layers=depth)
        return dataclasses.replace(self, models=self.models._replace(**{role: model}))

    @property
    def trained(self) -> list[str]:
        """Return the training calls, in the order of their gradients."""
        learning = derived.learning_calls(self.config)
        return [call for call in self.plan.placements if call in learning]

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns of a micro-batch that losses read."""
        return tuple(name for call in self.trained for name in self.learner(call).loss.reads)

    def learner(self, call: str) -> Learner:
        """Return the learner of a call's model, with a constant rate."""
        training = self.config.training
        optimizer = make_optimizer(
            training.learning_rate,
            max_grad_norm=training.max_grad_norm,
            weight_decay=training.weight_decay,
        )
        settings = TrainingSettings.from_config(self.config, self.layouts[call], self.remat)
        role = call.removesuffix("_training")
        return Learner(role, algorithm_of(self.config).losses[role], optimizer, settings)

    def waiting(self, call: str, others: Sequence[str]) -> int:
        """Return the bytes of other calls' gradients on a call's devices."""
        own = set(self.plan.placements[call].devices)
        there = [one for one in others if own & set(self.plan.placements[one].devices)]
        return sum(self.run(one).weights(self.model(one), FLOAT32) for one in there)

    def parts(self, call: str) -> list[Part]:
        """Return the parts of memory on the fullest of a call's devices."""
        groups = estimate.by_group(self.config, self.models, self.plan, self.layouts, self.remat)
        there = [parts for calls, parts in groups if call in calls]
        return max(there, key=lambda parts: memory_parts.peak(parts)[1])

    def always(self, call: str, named: Collection[str] = (), but: str = "") -> int:
        """Return the bytes that the fullest of a call's devices holds from step to step.

        named: parts that are resident in addition. but: a part to leave out.
        """
        parts = [part for part in self.parts(call) if part.name != but]
        besides = sum(part.bytes for part in parts if part.name in named)
        return memory_parts.total(parts, "always") + besides
