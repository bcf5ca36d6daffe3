"""Compare the plans that a config may name with the best one that a search finds."""

from __future__ import annotations

import copy
from typing import NamedTuple

from rlhf_jax.build.calls import place_calls
from rlhf_jax.build.planned import Planned
from rlhf_jax.config import derived, memory, memory_parts, validation
from rlhf_jax.config.schema import Config
from rlhf_jax.placement.plan import Plan, check_parts
from rlhf_jax.placement.presets import PRESETS, parameter_counts
from rlhf_jax.placement.search.branch_and_bound import Placed, Problem, search, stage_seconds
from rlhf_jax.placement.search.options import SearchSpace


class PricedPlan(NamedTuple):
    """Hold a plan and what it is predicted to take."""

    name: str
    plan: Plan
    calls: dict[str, float]  # seconds of each call
    stages: tuple[float, float, float]  # of generation, inference and training
    step: float  # seconds of a step, with weights on their way
    gigabytes: float  # of the fullest device, in 10^9 bytes
    fits: bool  # whether a device has so much


class Searched(NamedTuple):
    """Hold what a search has compared: the plan it found is the last one."""

    plans: list[PricedPlan]
    left_out: dict[str, str]  # presets that cannot be, and why
    gap: float  # by which share the plan that was found may be longer than the best one


def search_plans(config: Config, planned: Planned) -> Searched:
    """Find the best plan for a run's devices, and compare the config's own and the presets with it.

    Raises ValueError where the devices' speeds are not known, or no plan fits their memory.
    """
    hardware = planned.hardware
    if hardware.chip is None:
        raise ValueError(
            f"Nothing says how fast {hardware} are: name devices such as v5p:4x4x4 or gpu:8x8:h100."
        )
    validation.check_batches(config)
    of_mesh = copy.deepcopy(config)
    of_mesh.plan = ""
    mesh, _ = place_calls(of_mesh, planned.models, hardware, hardware.count, hardware.count)
    base = mesh.placements["generation"]
    space = SearchSpace(config, planned.models, hardware, base, planned.remat)
    problem = space.problem()
    named = {}
    known = {}
    left_out = {}
    for name in dict.fromkeys(("mesh", *PRESETS, config.plan or "mesh")):
        try:
            plan = mesh if name == "mesh" else planned.plan
            if name in PRESETS:
                plan = Plan(hardware.count, PRESETS[name](base, derived.calls(config)))
            check_parts(plan, name, hardware.device_kind, hardware.count)
            validation.check_rows(config, plan, "" if name == "mesh" else name)
            known[name] = space.placed(plan, name)
            named[name] = plan
        except ValueError as error:
            left_out[name] = str(error)
    found = search(problem, list(known.values()))
    if found is None:
        raise ValueError(
            f"No plan fits {hardware}; lower training.microbatch_rows or generation.max_rows, or"
            " name more devices."
        )
    known["found"] = found.placed
    named["found"] = Plan(
        hardware.count, space.plan(found.placed).placements, parameter_counts(planned.models)
    )
    plans = [
        _priced(name, plan, placed, problem, space)
        for (name, plan), placed in zip(named.items(), known.values(), strict=True)
    ]
    return Searched(plans, left_out, found.gap)


def _priced(
    name: str, plan: Plan, placed: Placed, problem: Problem, space: SearchSpace
) -> PricedPlan:
    """Gather what is predicted of a plan."""
    parts = memory.fullest(space.config, space.models, plan, plan.layouts(None), space.remat)
    calls = {call: placed[call].seconds for call in plan.placements}
    *before, training = (stage_seconds(problem, stage, placed) for stage in problem.stages)
    stages = (before[0], sum(before[1:]), training)
    gigabytes = memory_parts.peak(parts)[1] / memory_parts.GIGA
    fits = gigabytes <= space.hardware.gigabytes
    return PricedPlan(name, plan, calls, stages, sum(stages), gigabytes, fits)
