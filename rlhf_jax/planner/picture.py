"""Draw the predicted times of a plan's calls, as a standalone SVG."""

from __future__ import annotations

import itertools

from rlhf_jax.planner.priced import PricedPlan
from rlhf_jax.planner.search.schedule import Event
from rlhf_jax.report.charts import Lane, complete_svg, lanes_chart
from rlhf_jax.report.scales import axis_number, share

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
