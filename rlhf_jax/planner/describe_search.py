"""Print the results of a search for plans."""

from __future__ import annotations

from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.monitoring import console
from rlhf_jax.planner.pipelined_plans import TrainingComparison
from rlhf_jax.planner.priced import PricedPlan
from rlhf_jax.planner.searched import Searched, Variation

OF_PIPELINES = (
    "of pipelines: those of both models cut alike, on all chips or, beside generation, the last"
)
VARIED = "if chips reach another share of their figures, one at a time:"


def print_search(searched: Searched, variations: list[Variation]) -> None:
    """Print plans side by side: predicted seconds of each stage, and the fullest chip's memory."""
    *others, best = searched.plans
    trainings = searched.trainings
    table = [
        f"{line}, {seconds:.2f} s"
        for line, seconds in zip(best.plan.table(), best.calls.values(), strict=True)
    ]
    reasons = [f"{plan.name}: {why_not(plan, best)}" for plan in others]
    varied = "\n".join(map(variation_line, variations))
    rows = [
        *(
            (f"with lag {lag}" if lag else "predicted", "\n".join(plan_lines(searched, lag)))
            for lag in range(best.lag + 1)
        ),
        *(("left out", f"{name}: {reason}") for name, reason in searched.left_out.items()),
        *([("beside it", "\n".join(reasons))] if reasons else []),
        ("found", "\n".join(table)),
        ("memory", "\n".join(memory_parts.table(best.parts))),
        ("weights", "\n".join(map(moved_line, searched.plans))),
        ("gain", gain_of(searched)),
        *([("pipelines", "\n".join(training_lines(trainings)))] if trainings else []),
        *([("varied", f"{VARIED}\n{varied}")] if varied else []),
        ("", "by formulas, for full lengths and no drafts; not measured"),
        *([("", OF_PIPELINES)] if trainings else []),
        *([] if all(plan.fits for plan in others) else [("", "! is more than a chip has")]),
    ]
    console.describe("rlhf_jax: plans of calls", rows)


def plan_lines(searched: Searched, lag: int) -> list[str]:
    """Write a line for each plan with this lag, under a heading."""
    lines = [f"{'':13}{'step':>10}{'generation':>12}{'inference':>10}{'training':>10}{'a chip':>9}"]
    for plan in searched.plans:
        generation, inference, training = (f"{seconds:.2f} s" for seconds in plan.stages)
        step = f"{plan.step:.2f} s"
        stages = f"{step:>10}{generation:>12}{inference:>10}{training:>10}"
        if plan.lag == lag:
            name = plan.name.removesuffix(f", lag {lag}")
            lines.append(f"{name:13}{stages}{plan.gigabytes:6.1f} GB{' ' if plan.fits else '!'}")
    return lines


def gain_of(searched: Searched) -> str:
    """Describe the gain of the found plan, and the proved bound."""
    *others, found_plan = searched.plans
    gap = searched.gap
    proved = f"the best may be {gap:.1%} shorter" if gap else "no plan of this kind is shorter"
    usable = [plan for plan in others if plan.fits]
    if not usable:
        return proved
    best = min(usable, key=lambda plan: plan.step)
    gain = f"{best.step / found_plan.step:.2f} times as fast as {best.name}; {proved}"
    return f"{gain}: drawing ahead does not pay" if best.step < found_plan.step else gain


def training_lines(compared: TrainingComparison) -> list[str]:
    """Describe a step's updates as pipelines against those by FSDP and TP, and the crossover."""
    pipelined = compared.pipelined
    joint = pipelined.joint
    by_pipeline = {
        call: _sizes_of({**placed.shape, "stages": placed.slices, "slices": 1})
        for call, placed in pipelined.placements.items()
    }
    alike = len(set(by_pipeline.values())) == 1
    ways = [sizes if alike else f"{call} {sizes}" for call, sizes in by_pipeline.items()]
    by_call = [
        f"{call} on {option.placement.count} chips, {_sizes_of(option.placement.shape)}"
        for call, option in compared.sharded.items()
    ]
    both = len(joint.calls) > 1
    micro_batches = joint.times[0].micro_batches
    serial = (
        f"{joint.serial:8.2f} s  one pipeline after the other: {joint.serial / joint.fused:.2f}"
        " times as long"
    )
    in_turn = (
        f"{compared.in_turn_seconds:8.2f} s  FSDP and TP on all chips, one model after the other:"
        f" {compared.in_turn_seconds / joint.fused:.2f} times as long"
    )
    lines = [
        "updates of a step, each way with its best training.microbatch_rows:",
        f"{joint.fused:8.2f} s  {'pipelines at once' if both else 'a pipeline'}:"
        f" {'; '.join(dict.fromkeys(ways))}, micro-batches {micro_batches}; microbatch_rows"
        f" {compared.pipelined_rows}",
        *([serial] if both else []),
        f"{compared.sharded_seconds:8.2f} s  FSDP and TP: {compared.gain:.2f} times as long;"
        f" microbatch_rows {compared.sharded_rows}; {'; '.join(by_call)}",
        *([in_turn] if both else []),
        f"{compared.tokens:,.0f} tokens a chip and optimizer step; below {compared.crossover:,.0f},"
        " by the rule F eta / (2 D s), FSDP over all chips gathers for longer than bubbles last",
    ]
    return [*lines, *joint.warnings]


def _sizes_of(shape: dict[str, int]) -> str:
    """Write the axes of a mesh that split."""
    return ", ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "whole"


def moved_line(plan: PricedPlan) -> str:
    """Describe which trained weights move to each chip of a call, once per step."""
    each = [f"{size / memory_parts.GIGA:.2f} GB a chip to {c}" for c, size in plan.moved.items()]
    return f"{plan.name:13} {', '.join(each)}"


def variation_line(one: Variation) -> str:
    """Describe the found plan's lead if a constant has another value."""
    line = f"{one.constant:9} x {one.factor:g}: {one.gain:.2f} times as fast as {one.other}"
    return line if one.better < 0.001 else f"{line}; another plan is {one.better:.1%} shorter"


def why_not(plan: PricedPlan, best: PricedPlan) -> str:
    """Describe the call in which a plan loses the most time to the found plan."""
    if not plan.fits:
        largest = max(plan.parts, key=lambda part: part.bytes).name
        return f"does not fit, with {plan.gigabytes:.1f} GB a chip, most of it {largest}"
    more = plan.step - best.step
    if abs(more) <= 1e-6 * best.step:
        return "as fast"
    if more < 0:
        return f"{-more:.2f} s shorter"
    reason = f"{more:.2f} s longer"
    if plan.lag < best.lag:
        reason += ", as all else waits for generation"
    extra = [one - other for one, other in zip(plan.stages, best.stages, strict=True)]
    stage = memory_parts.STAGE_NAMES[extra.index(max(extra))]
    if max(extra) <= 0:
        return reason
    calls = [call for call in plan.calls if call.endswith(stage)]
    longer = {call: plan.calls[call] - best.calls[call] for call in calls}
    call = max(longer, key=lambda name: longer[name])
    if longer[call] <= 0:
        return f"{reason}; calls of {stage} share devices, and wait for each other"
    return f"{reason}; {call} takes {plan.calls[call]:.2f} s, not {best.calls[call]:.2f} s"
