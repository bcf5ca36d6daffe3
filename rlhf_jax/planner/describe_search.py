"""Print the results of a search for plans, and draw the predicted times of calls as an SVG."""

from __future__ import annotations

import itertools

from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.monitoring import console
from rlhf_jax.planner.pipelined_plans import TrainingComparison
from rlhf_jax.planner.priced import PricedPlan
from rlhf_jax.planner.search.schedule import Event
from rlhf_jax.planner.searched import Searched, Variation
from rlhf_jax.report.charts import Lane, complete_svg, lanes_chart
from rlhf_jax.report.scales import axis_number, share

OF_PIPELINES = (
    "of pipelines: those of both models cut alike, on all chips or, beside generation, the last"
)
VARIED = "if chips reach another share of their figures, one at a time:"
ARRIVING = "weights"  # the class and the legend's label of weights in transfer
CALL_COLOURS = {
    "generation": "#2a6fdb",
    "reward_inference": "#b9770e",
    "policy_inference": "#e9a23b",
    "reference_inference": "#f0bd71",
    "critic_inference": "#d98a52",
    "policy_training": "#12855f",
    "critic_training": "#5bb59a",
    ARRIVING: "#c2362f",
}


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


def timeline_svg(priced: PricedPlan, devices: str) -> str:
    """Return an SVG of the first iterations: a lane for each range of devices with the same calls.

    devices: their name, for the title.
    """
    right = max(event.ended for event in priced.events)
    devices_of = [event.devices for event in priced.events]
    edges = {edge for own in devices_of for edge in (own.start, own.stop)}
    every = sorted(edges | {0, priced.plan.devices})
    groups = [range(start, end) for start, end in itertools.pairwise(every)]
    lanes = [lane_of(group, priced.events, right) for group in groups]
    drawn = lanes_chart("Predicted calls by device", lanes, right)
    ahead = ", samples drawn one step ahead" if priced.lag else ""
    there = {name_of(event) for event in priced.events}
    return complete_svg(
        drawn,
        title=f"Predicted, not measured: {priced.step:.2f} s a step{ahead}",
        note=f"{devices}; seconds, a lane for devices with the same calls; steps in turn pale",
        colours={name: colour for name, colour in CALL_COLOURS.items() if name in there},
        style=".pale{opacity:.6}",
    )


def name_of(event: Event) -> str:
    """Return the class of an event's bar: its call, or weights in transfer."""
    return ARRIVING if event.receives else event.call


def lane_of(group: range, events: list[Event], right: float) -> Lane:
    """Return the lane of a range of devices."""
    own = [event for event in events if group.start in event.devices]
    bars = []
    tips = []
    for event in own:
        pale = " pale" if event.iteration % 2 else ""
        bars.append((name_of(event) + pale, event.began, event.ended))
        words = f"weights come to {event.call}" if event.receives else event.call
        span = f"{axis_number(event.began, 0.01)} to {axis_number(event.ended, 0.01)} s"
        tips.append((f"{words}, step {event.iteration}\n{span}", event.began, event.ended))
    idle = right - sum(event.ended - event.began for event in own)
    name = f"{group.start}..{group.stop - 1}"
    return Lane(name=name, bars=bars, tips=tips, marks=[], end=share(idle, right))
