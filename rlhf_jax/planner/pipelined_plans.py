"""Find the best plan that trains as pipelines, and compare its training with FSDP and TP."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from rlhf_jax.config import derived
from rlhf_jax.placement.pipelined import fill_with_copies
from rlhf_jax.placement.plan import Placement
from rlhf_jax.placement.presets import layer_counts
from rlhf_jax.planner.priced import FoundPlan, PlanPrices
from rlhf_jax.planner.search.branch_and_bound import SearchResult, search
from rlhf_jax.planner.search.options import SearchSpace
from rlhf_jax.planner.search.parts import part_sizes, part_starts, powers_of_two
from rlhf_jax.planner.search.pipelines import JointTraining
from rlhf_jax.planner.search.schedule import Option, Problem
from rlhf_jax.setup.validation import check_pipelined_training
from rlhf_jax.types import ModelConfigs

PIPELINED = "pipelined"  # name of the best plan that trains as pipelines
PIPELINED_SECONDS = 20.0  # CPU seconds to place the other calls of such a plan
COMPARED_ROWS = 64  # largest micro-batch, in rows, for which trainings are compared


class PipelinedTraining(NamedTuple):
    """Hold one way to train as pipelines, and its costs."""

    placements: dict[str, Placement]  # of the calls that train, by name
    joint: JointTraining
    memory: float  # bytes of a device while it trains


class TrainingComparison(NamedTuple):
    """Hold the seconds of a step's updates: as pipelines, and by FSDP and TP."""

    tokens: float  # of a chip and optimizer step, at full length
    crossover: float  # tokens below which pipelines are expected to be faster
    pipelined: PipelinedTraining  # the fastest
    pipelined_rows: int  # its training.microbatch_rows
    sharded: dict[str, Option]  # the fastest of FSDP and TP, by call
    sharded_seconds: float
    sharded_rows: int  # its training.microbatch_rows
    in_turn_seconds: float  # with one model after the other on all chips

    @property
    def gain(self) -> float:
        """Return the speed of pipelines over FSDP and TP."""
        return self.sharded_seconds / self.pipelined.joint.fused


def best_pipelined(prices: PlanPrices) -> FoundPlan:
    """Return the best plan that trains as pipelines, with all other calls placed by a search.

    Pipelines have all devices or, next to generation, the last of them. The gap is that of the
    schedule and of the placement of other calls. Raises ValueError if there is none.
    """
    check_pipelined_training(prices.config)
    best = math.inf
    plans = []
    bounds = []
    for remat, problem in prices.problems.items():
        space = prices.spaces[remat]
        for one in pipelined_trainings(space):
            joint = space.joint_options(one.placements)
            options = {call: [option] for call, option in joint.items()}
            own = dataclasses.replace(problem, options={**problem.options, **options})
            result = search(own, best, PIPELINED_SECONDS / len(prices.problems))
            # a placement not found is no shorter than the best, but a better schedule might be
            bounds.append((result.bound if result else best) - one.joint.fused + one.joint.least)
            if result is not None and result.placed:
                best = result.seconds
                plan = space.plan(result.placed)
                plans.append(prices.price(PIPELINED, plan))
    if not plans:
        raise ValueError(
            f"no stages divide {prices.hardware} and the layers of policy and critic, or none fit"
        )
    return FoundPlan.best(plans, min(bounds))


def pipelined_trainings(space: SearchSpace) -> list[PipelinedTraining]:
    """Return the ways to train as pipelines that are Pareto-optimal in seconds and memory."""
    kept: list[PipelinedTraining] = []
    for placements, joint in _joint_trainings(space):
        memory = sum(space.held_bytes(placements))
        beaten = any(
            one.joint.fused <= joint.quick_least
            and one.memory <= memory
            and one.placements["policy_training"].count == placements["policy_training"].count
            for one in kept
        )
        if memory <= space.memory_limit and not beaten:
            kept.append(PipelinedTraining(placements, joint, memory))
    return sorted(kept, key=lambda one: one.joint.fused)


def _joint_trainings(space: SearchSpace) -> list[tuple[dict[str, Placement], JointTraining]]:
    """List the ways to train as pipelines on all devices or, with prefetch, on parts of them.

    The one with the lowest bound comes first.
    """
    ways = []
    hardware = space.hardware
    node_chips = hardware.count // hardware.nodes
    for blocks in part_sizes(space.blocks):
        if (blocks == space.blocks) == bool(space.config.training.lag):
            continue
        count = blocks * space.block_devices
        first = part_starts(blocks, space.blocks)[-1] * space.block_devices
        base = dataclasses.replace(space.base, first=first, count=count)
        for policy in policy_pipelines(base, node_chips, space.models):
            placements = placements_of(policy, space.models)
            placements = {call: one for call, one in placements.items() if call in space.calls}
            if placements:
                ways.append((placements, space.joint(placements)))
    return sorted(ways, key=lambda pair: pair[1].quick_least)


def policy_pipelines(base: Placement, node_chips: int, models: ModelConfigs) -> Iterator[Placement]:
    """Yield the sensible placements of a policy's pipeline on the devices of `base`.

    Stages divide its layers, and are whole nodes or equal parts of one. `tensor` stays within a
    node and divides the key-value heads of all models; `fsdp` divides their width.
    """
    layers = models.policy.num_layers
    heads = math.gcd(*(model.num_kv_heads for model in models.trunks.values()))
    width = math.gcd(*(model.width for model in models.trunks.values()))
    for stages in range(2, layers + 1):
        own, rest = divmod(base.count, stages)
        if rest or layers % stages or (own % node_chips and node_chips % own):
            continue
        for tensor in powers_of_two(min(own, node_chips)):
            shards, rest = divmod(own, tensor)
            if rest or heads % tensor:
                continue
            for fsdp in range(1, shards + 1):
                if shards % fsdp == 0 and width % fsdp == 0:
                    yield dataclasses.replace(
                        base,
                        slices=stages,
                        data=shards // fsdp,
                        fsdp=fsdp,
                        tensor=tensor,
                        pipelined=True,
                    )


def placements_of(policy: Placement, models: ModelConfigs) -> dict[str, Placement]:
    """Return the placements of the pipelines of a policy and its critics, by call.

    They are empty if no stages divide a critic's layers.
    """
    layers = layer_counts(models)
    critics = {role: fill_with_copies(policy, layers, role) for role in models.critics}
    if any(layers[role] % placed.slices for role, placed in critics.items()):
        return {}
    placed = {f"{role}_training": placed for role, placed in critics.items()}
    return {"policy_training": policy, **placed}


def fastest_pipelined(space: SearchSpace) -> PipelinedTraining | None:
    """Return the fastest way to train as pipelines that fits; None if none does."""
    best: PipelinedTraining | None = None
    for placements, joint in _joint_trainings(space):
        if best and best.joint.fused <= joint.quick_least:
            break
        memory = sum(space.held_bytes(placements))
        shorter = best is None or joint.fused < best.joint.fused
        if memory <= space.memory_limit and shorter:
            best = PipelinedTraining(placements, joint, memory)
    return best


def compare_trainings(prices: PlanPrices) -> TrainingComparison | None:
    """Compare updates as pipelines with those by FSDP and TP, each with its best micro-batch.

    Other calls are ignored. None if one of the two does not fit.
    """
    config = prices.config
    minibatch = derived.chosen_samples(config) // config.training.minibatches
    calls = [call for call in derived.calls(config) if call.endswith("_training")]
    of_pipelines: list[tuple[float, int, PipelinedTraining]] = []
    of_shards: list[tuple[float, int, SearchResult]] = []
    in_turn = math.inf
    for rows in powers_of_two(min(minibatch, COMPARED_ROWS)):
        changed = copy.deepcopy(config)
        changed.training.update(microbatch_rows=rows, microbatch_tokens=0)
        changed.training.lag = 0
        for space in dataclasses.replace(prices, config=changed, held={}).spaces.values():
            pipelined = fastest_pipelined(space)
            options = {call: list(space.options(call)) for call in calls}
            sharded = search(Problem(options, space.blocks, space.memory_limit))
            of_pipelines += [(pipelined.joint.fused, rows, pipelined)] if pipelined else []
            of_shards += [(sharded.seconds, rows, sharded)] if sharded else []
            whole = {
                call: [one for one in ways if one.blocks == space.blocks]
                for call, ways in options.items()
            }
            on_all = search(Problem(whole, space.blocks, space.memory_limit), in_turn)
            in_turn = on_all.seconds if on_all else in_turn
    if not of_pipelines or not of_shards:
        return None
    hardware = prices.hardware
    chip = hardware.chip
    assert chip is not None, "Plans are priced for known chips alone."
    tokens = minibatch * derived.text_tokens(config)
    _, pipelined_rows, best = min(of_pipelines, key=lambda one: one[0])
    seconds, sharded_rows, other = min(of_shards, key=lambda one: one[0])
    return TrainingComparison(
        tokens=tokens / hardware.count,
        crossover=chip.crossover_tokens(hardware.count // hardware.nodes),
        pipelined=best,
        pipelined_rows=pipelined_rows,
        sharded=other.placed,
        sharded_seconds=seconds,
        sharded_rows=sharded_rows,
        in_turn_seconds=in_turn,
    )
