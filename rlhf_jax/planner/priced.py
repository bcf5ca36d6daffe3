"""Price plans of a run by formulas, and find the best one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.parts import Part
from rlhf_jax.placement.plan import Placement, Plan, check, check_parts
from rlhf_jax.placement.presets import PRESETS, layer_counts, plan_of
from rlhf_jax.planner.chips import check_boxes
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.planned import Planned
from rlhf_jax.planner.search.branch_and_bound import search
from rlhf_jax.planner.search.options import SearchSpace
from rlhf_jax.planner.search.schedule import (
    STEADY,
    Event,
    Problem,
    most_bytes,
    simulate,
    stage_seconds,
    steady_seconds,
)
from rlhf_jax.setup import validation
from rlhf_jax.setup.run_spec import place_calls
from rlhf_jax.setup.sample_checks import check_lag
from rlhf_jax.types import ModelConfigs

MESH = "mesh"  # name of the plan in which all calls have the config's mesh


class PricedPlan(NamedTuple):
    """Hold a plan and its predicted costs."""

    name: str
    plan: Plan  # of calls
    calls: dict[str, float]  # seconds of each call
    stages: tuple[float, ...]  # of generation, inference and training
    step: float  # seconds of a step, transfers of weights included
    gigabytes: float  # of the fullest device, in 10^9 bytes
    fits: bool  # whether a device has this much
    parts: list[Part]  # of its memory
    moved: dict[str, int]  # bytes of trained weights that come to each device of a call
    lag: int  # off-policy steps: how far samples are prefetched
    remat: bool
    events: list[Event]  # of a few iterations


class FoundPlan(NamedTuple):
    """Hold the best plan, and the share of its step by which another may be shorter."""

    priced: PricedPlan
    gap: float

    @classmethod
    def best(cls, plans: Sequence[PricedPlan], bound: float) -> FoundPlan:
        """Return the shortest plan that fits, with its gap to a lower bound of all steps."""
        priced = min(plans, key=lambda one: (not one.fits, one.step))
        gap = max(0.0, 1.0 - bound / priced.step)
        return cls(priced, gap if gap > 1e-9 else 0.0)


@dataclasses.dataclass(frozen=True)
class PlanPrices:
    """Price the plans of a run on absent devices; its lag is its config's."""

    config: Config
    models: ModelConfigs
    hardware: Hardware
    base: Placement  # of all calls by the config's mesh
    held: dict = dataclasses.field(default_factory=dict)  # the spaces' cache of memory

    @classmethod
    def of(cls, config: Config, planned: Planned, lag: int) -> PlanPrices:
        """Return the prices of a run with a given lag."""
        changed = copy.deepcopy(config)
        changed.plan = ""
        changed.training.lag = lag
        hardware = planned.hardware
        mesh, _ = place_calls(changed, planned.models, hardware, hardware.count, hardware.count)
        base = dataclasses.replace(next(iter(mesh.placements.values())), pipelined=False)
        return cls(changed, planned.models, hardware, base)

    def varied(self, constant: str, factor: float) -> PlanPrices:
        """Return the prices if one of the chip's efficiencies has another value."""
        chip = self.hardware.chip
        assert chip is not None, "Plans are priced for known chips alone."
        other = chip.efficiency._replace(**{constant: factor * getattr(chip.efficiency, constant)})
        hardware = self.hardware._replace(chip=chip._replace(efficiency=other))
        return dataclasses.replace(self, hardware=hardware)

    def named_plan(self, name: str, own: Plan) -> Plan:
        """Return the plan of a name, checked; ValueError if it is impossible or not comparable.

        own: the plan of a name that is neither the mesh's nor a preset's.
        """
        calls = derived.calls(self.config)
        plan = own
        if name == MESH:
            layers = layer_counts(self.models)
            plan = plan_of(self.config, self.hardware.count, self.base, layers)
        elif name in PRESETS:
            plan = Plan(self.hardware.count, PRESETS[name](self.base, calls))
        check(plan, name, calls, self.hardware.count)
        check_parts(plan, name, self.hardware.device_kind, self.hardware.count)
        check_boxes(plan, name, self.hardware.torus)
        validation.check_rows(self.config, plan, "" if name == MESH else name)
        check_lag(self.config, plan)
        next(iter(self.spaces.values())).placed(plan, name)
        return plan

    @functools.cached_property
    def spaces(self) -> dict[bool, SearchSpace]:
        """Return the search spaces with and without recomputing layers in the backward pass.

        If the config leaves it open, a run recomputes as `settle_remat` decides.
        """
        setting = self.config.training.remat
        space = functools.partial(
            SearchSpace, self.config, self.models, self.hardware, self.base, held=self.held
        )
        if setting != "auto":
            return {setting == "on": space(remat=setting == "on")}
        return {False: space(remat=False, room=estimate.ROOM), True: space(remat=True)}

    @functools.cached_property
    def problems(self) -> dict[bool, Problem]:
        """Return the problem of each space."""
        return {remat: space.problem() for remat, space in self.spaces.items()}

    def price(self, name: str, plan: Plan) -> PricedPlan:
        """Predict the costs of a checked plan."""
        predicted = functools.partial(
            estimate.fullest, self.config, self.models, plan, plan.layouts(self.hardware.platform)
        )
        limit = self.hardware.gigabytes * memory_parts.GIGA
        remat, _ = estimate.settle_remat(self.config, predicted(remat=False), limit)
        parts = predicted(remat=remat)
        problem = self.problems[remat]
        placed = self.spaces[remat].placed(plan, name)
        # a run may lack some
        stages: dict[str, float] = dict.fromkeys(memory_parts.STAGE_NAMES, 0.0)
        for calls in problem.stages:
            stages[calls[0].rpartition("_")[2]] += stage_seconds(problem, calls, placed)
        events = simulate(problem, placed, STEADY)
        gigabytes = max(memory_parts.peak(parts)[1], most_bytes(problem, placed))
        return PricedPlan(
            name,
            plan,
            calls={call: placed[call].seconds for call in plan.placements},
            stages=tuple(stages.values()),
            step=steady_seconds(events),
            gigabytes=gigabytes / memory_parts.GIGA,
            fits=gigabytes <= limit,
            parts=parts,
            moved={
                call: self.spaces[remat].arrival_bytes(call, option.placement)
                for call, option in placed.items()
                if problem.transfer(call, option, placed)
            },
            lag=problem.lag,
            remat=remat,
            events=events,
        )

    def find(self, known: Sequence[PricedPlan], limit: float) -> FoundPlan | None:
        """Return the best plan, never longer than a known one; None if none fits.

        limit: CPU seconds.
        """
        bounds = []
        plans = [one for one in known if one.fits]
        for remat, problem in self.problems.items():
            below = min((one.step for one in plans if one.fits), default=math.inf)
            result = search(problem, below, limit / len(self.problems))
            if result is not None:
                bounds.append(result.bound)
            if result is not None and result.placed:
                plans.append(self.price("found", self.spaces[remat].plan(result.placed)))
        if not plans:
            return None
        best = FoundPlan.best(plans, min(bounds, default=math.inf))
        return best._replace(priced=best.priced._replace(name="found"))
