"""Hold the calls of a plan on devices that need not be here, and what is said of their programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.stages import Traced

from rlhf_jax import mesh as meshes
from rlhf_jax.config import memory, memory_parts
from rlhf_jax.config.hardware import Hardware
from rlhf_jax.config.memory_parts import Part
from rlhf_jax.config.schema import Config
from rlhf_jax.config.sizes import PlannedRun
from rlhf_jax.mesh import Layout
from rlhf_jax.placement.plan import CallLayouts, Plan
from rlhf_jax.placement.search.costs import PlacedRun
from rlhf_jax.types import ModelConfig, ModelConfigs


class Foreseen(NamedTuple):
    """Hold what formulas say of one run of a program."""

    bytes: float  # of a device, arguments included
    flops: float = 0.0  # of matrix products, on all devices together
    received: float = 0.0  # bytes of a device


class CallProgram(NamedTuple):
    """Hold one program of a call."""

    call: str
    name: str
    trace: Callable[[int], Traced]  # of a model of so many layers
    foreseen: Foreseen
    beside: float  # bytes of a device that are there, too, while it runs
    depth: int  # layers of the model
    # where each layer is a part of the program: of how many it is compiled, twice
    compiled_layers: tuple[int, ...] = ()


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
        """Return the run as a call sees it; generation as one slice does."""
        layout: Layout = getattr(self.layouts, call)
        if call == "generation":
            layout = layout.split()[0]
        return PlannedRun(self.config, self.models, layout, self.remat, {call: layout})

    def placed(self, call: str) -> PlacedRun:
        """Return the run of a call, and its part of the hardware."""
        run = self.run(call)
        return PlacedRun(run, self.hardware.part(run.layout.extent(meshes.AXES)))

    def model(self, call: str) -> ModelConfig:
        """Return the model of a call that trains or scores one: policy or critic."""
        if not call.startswith("critic"):
            return self.models.policy
        assert self.models.critic is not None, "A call of the critic's has one."
        return dataclasses.replace(self.models.critic, scalar_head=True, tied=False)

    def parts(self, call: str) -> list[Part]:
        """Return the parts of memory on the fullest of a call's devices."""
        of_call = self.layouts._asdict()
        found = [
            memory.plan(self.config, self.models, {one: of_call[one] for one in calls}, self.remat)
            for calls in self.plan.groups()
            if call in calls
        ]
        return max(found, key=lambda parts: memory_parts.peak(parts)[1])

    def always(self, call: str) -> int:
        """Return the bytes that the fullest of a call's devices holds from step to step."""
        return memory_parts.total(self.parts(call), "always")
