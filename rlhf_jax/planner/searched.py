"""Compare the named plans of a config with the best one that a search finds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rlhf_jax.config.schema import Config
from rlhf_jax.memory.parts import FEWER_ROWS
from rlhf_jax.memory.sizes import parameter_counts
from rlhf_jax.placement.pipelined import is_pipelined
from rlhf_jax.placement.plan import Plan
from rlhf_jax.placement.presets import PRESETS
from rlhf_jax.planner.chips import Efficiency
from rlhf_jax.planner.pipelined_plans import (
    PIPELINED,
    TrainingComparison,
    best_pipelined,
    compare_trainings,
)
from rlhf_jax.planner.planned import Planned
from rlhf_jax.planner.priced import MESH, FoundPlan, PlanPrices, PricedPlan
from rlhf_jax.setup import validation
from rlhf_jax.setup.sample_checks import check_lag

SEARCH_SECONDS = 60.0  # CPU seconds to find and prove a plan
FACTORS = (0.5, 1.5)  # by which each efficiency of a chip is varied, one at a time
SHARDED = "FSDP and TP"  # name of the best plan without pipelines, next to one with them
VARIED_SECONDS = 4.0  # CPU seconds for each of these searches


class Variation(NamedTuple):
    """Hold the comparison of plans for another value of one efficiency of the chip."""

    constant: str
    factor: float
    steps: dict[str, float]  # seconds of a step, by the plans' names; the found one's is the last
    best: float  # those of the plan that would be found

    @property
    def other(self) -> str:
        """Return the best of the plans that the found one is compared with."""
        *others, _ = self.steps
        return min(others, key=lambda name: self.steps[name])

    @property
    def gain(self) -> float:
        """Return the speed of the found plan over that one."""
        *_, best = self.steps.values()
        return self.steps[self.other] / best

    @property
    def better(self) -> float:
        """Return the share of the found plan's step by which another plan is shorter."""
        *_, step = self.steps.values()
        return max(0.0, 1.0 - self.best / step)


class Searched(NamedTuple):
    """Hold the plans that a search has compared; the last one is the found plan."""

    plans: list[PricedPlan]
    left_out: dict[str, str]  # impossible presets, and the reasons
    gap: float  # share by which the found plan may be longer than the best one
    trainings: TrainingComparison | None = None  # as pipelines, where chips are on several nodes


def search_plans(config: Config, planned: Planned, lag: int = 0) -> Searched:
    """Find the best plan for a run's devices, and compare the config's and the presets with it.

    lag: 1 for a run that prefetches the samples of the next step during training; the best plan
    without it is then compared, too. Raises ValueError if the devices' speeds are not known, no
    plan fits their memory, or none has separate devices for generation although it needs them.
    """
    hardware = planned.hardware
    if hardware.chip is None:
        raise ValueError(
            f"The speed of {hardware} is unknown: name devices such as v5p:4x4x4 or gpu:8x8:h100."
        )
    validation.check_batches(config)
    lag = max(lag, config.training.lag)
    plans: list[PricedPlan] = []
    left_out: dict[str, str] = {}
    gap = 0.0
    trainings = None
    for ahead in range(lag + 1):
        prices = PlanPrices.of(config, planned, ahead)
        check_lag(prices.config, Plan(hardware.count, {"generation": prices.base}))
        named, reasons = compare(prices, config.plan, planned.plan)
        left_out = reasons if ahead == 0 else left_out
        found, reason = find_with_pipelines(prices, named)
        if ahead == 0:
            out = reason and not (found and is_pipelined(found.priced.plan))
            left_out |= {PIPELINED: reason} if out else {}
            trainings = None if reason else compare_trainings(prices)
        if found is None:
            raise ValueError(no_plan(hardware, ahead))
        parameters = parameter_counts(planned.models)
        counted = dataclasses.replace(found.priced.plan, parameters=parameters)
        last = "found" if ahead == lag else "synchronous"
        suffix = f", lag {ahead}" if ahead else ""
        plans += [one._replace(name=f"{one.name}{suffix}") for one in named]
        plans.append(found.priced._replace(name=last, plan=counted))
        gap = found.gap
    return Searched(plans, left_out, gap, trainings)


def find_with_pipelines(
    prices: PlanPrices, named: list[PricedPlan]
) -> tuple[FoundPlan | None, str]:
    """Return the best plan, and why no pipelined one is compared; '' if one is.

    Of the best such plan and the best other one, the longer is added to the named ones. If all
    chips have their own links, pipelines are considered only if nothing else fits.
    """
    hardware = prices.hardware
    reason = ""
    if hardware.platform != "gpu" or hardware.nodes == 1:
        reason = (
            f"pipelines idle in their bubbles, and {hardware} gather weights over links of their"
            " own in less time; they are for several nodes of GPUs, or where nothing else fits"
        )
    pipelined = [FoundPlan(one, 0.0) for one in named if one.fits and is_pipelined(one.plan)]
    sharded = prices.find([one for one in named if not is_pipelined(one.plan)], SEARCH_SECONDS)
    if not reason or sharded is None:
        try:
            pipelined.append(best_pipelined(prices))
        except ValueError as error:
            reason = reason or str(error)
    ways = [one for one in (sharded, *pipelined) if one is not None]
    if not ways:
        return None, reason
    # no plan of either kind is shorter than the bound of both
    bound = min(one.priced.step * (1.0 - one.gap) for one in ways)
    best = FoundPlan.best([one.priced for one in ways], bound)
    if not reason and sharded is not None:
        if best.priced is sharded.priced:
            other = min((one.priced for one in pipelined), key=lambda plan: plan.step)
            named.append(other._replace(name=PIPELINED))
        else:
            named.append(sharded.priced._replace(name=SHARDED))
    return best._replace(priced=best.priced._replace(name="found")), reason


def no_plan(hardware: object, lag: int) -> str:
    """Return the message for a search without a result."""
    if lag:
        return (
            f"No plan of {hardware} gives generation devices of its own and fits; name more"
            " devices, or set the lag to 0."
        )
    return f"No plan fits {hardware}; {FEWER_ROWS}, or generation.max_rows, or name more devices."


def compare(
    prices: PlanPrices, requested: str, own: Plan
) -> tuple[list[PricedPlan], dict[str, str]]:
    """Price the mesh, the presets and the config's plan; return why some are impossible."""
    priced = []
    left_out = {}
    for name in dict.fromkeys((MESH, *PRESETS, requested or MESH)):
        try:
            priced.append(prices.price(name, prices.named_plan(name, own)))
        except ValueError as error:
            left_out[name] = str(error)
    return priced, left_out


def vary(config: Config, planned: Planned, plans: list[PricedPlan]) -> list[Variation]:
    """Price the plans of a search again with one efficiency of the chip changed at a time.

    Plans that do not fit are left out; there is no variation if only the found one is left.
    """
    usable = [plan for plan in plans if plan.fits]
    if len(usable) < 2 or not plans[-1].fits:
        return []
    lag = plans[-1].lag
    base = {ahead: PlanPrices.of(config, planned, ahead) for ahead in range(lag + 1)}
    variations = []
    for constant in Efficiency._fields:
        for factor in FACTORS:
            prices = {ahead: one.varied(constant, factor) for ahead, one in base.items()}
            again = [prices[plan.lag].price(plan.name, plan.plan) for plan in usable]
            best = prices[lag].find([one for one in again if one.lag == lag], VARIED_SECONDS)
            steps = {one.name: one.step for one in again}
            shortest = best.priced.step if best else again[-1].step
            variations.append(Variation(constant, factor, steps, shortest))
    return variations
