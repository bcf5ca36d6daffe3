"""Draw when each call of a plan is predicted to run, as an SVG that stands alone.

It has a title, the lanes, and what their colours mean.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping

from rlhf_jax.monitoring.report.charts import Lane, lanes_chart
from rlhf_jax.monitoring.report.scales import axis_number, share
from rlhf_jax.placement.search.schedule import Event
from rlhf_jax.planner.priced import PricedPlan

PICTURE_WIDTH = 1000  # pixels
NAMES_WIDTH = 96  # pixels left of the lanes
SHARES_WIDTH = 64  # pixels right of them
TITLE_HEIGHT = 92  # pixels above them
LETTER = 6.3  # pixels of a letter of the legend, about

ARRIVING = "weights"  # the class and the legend's word of weights on their way
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

    devices: what they are, for the title.
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
    """Return the class of an event's bar: its call, or weights on their way."""
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


def complete_svg(
    drawn: str, *, title: str, note: str, colours: Mapping[str, str], style: str = ""
) -> str:
    """Return an SVG of what `lanes_chart` drew.

    colours: of each class of bars, in the order of the legend; style: more CSS.
    """
    height = int(drawn.partition('height="')[2].partition('"')[0])
    whole = TITLE_HEIGHT + height + 74
    lanes_width = PICTURE_WIDTH - NAMES_WIDTH - SHARES_WIDTH
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    common = (
        "text{font:12px system-ui,sans-serif;fill:#5d6068}.title{font-size:18px;font-weight:600;"
        "fill:#17181c}svg svg{overflow:visible}.idle{fill:#eeede9}.at{fill:transparent}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {whole}" '
        f'width="{PICTURE_WIDTH}" height="{whole}"><style>{common}{fills}{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="24" y="36">{html.escape(title)}</text>'
        f'<text x="24" y="58">{html.escape(note)}</text>'
        f'<svg x="{NAMES_WIDTH}" y="{TITLE_HEIGHT}" width="{lanes_width}" height="{height}">'
        f"{drawn}</svg>"
        f"{draw_legend(list(colours), TITLE_HEIGHT + height + 50)}</svg>\n"
    )


def draw_legend(names: list[str], at: int) -> str:
    """Draw a square and a name for each class of bars, so many pixels from the top."""
    drawn = ""
    left = 24.0
    for name in names:
        said = name.replace("_", " ")
        drawn += (
            f'<rect class="{name}" x="{left:.0f}" y="{at - 10}" width="10" height="10" rx="2"/>'
            f'<text x="{left + 16:.0f}" y="{at}">{said}</text>'
        )
        left += 30 + LETTER * len(said)
    return drawn
