"""Draw the common parts of charts as inline SVG: the box, its axes, labels and tips.

The plot's own box is the SVG; labels stand outside it, in the page's margins (`overflow: visible`).
Places are percentages and lines keep their width, so a chart fits a phone and a desk with text of
one size.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rlhf_jax.report.run import Series
from rlhf_jax.report.scales import axis_number, domain, groups, reading, tick_step, ticks

MOST_POINTS = 200  # of a line, bars, and hover targets
UNITS = 1000  # units of the box that paths are drawn in, to either side
LABEL_PIXELS = 16  # between two labels
GRID_PIXELS = 40  # between two lines of the grid, at least
MOST_STEP_LABELS = 6


@dataclasses.dataclass(frozen=True)
class Frame:
    """Hold the box of a chart: the steps and values at its edges, and its height in pixels."""

    left: float
    right: float
    bottom: float
    top: float
    mark: float  # between two lines of the grid
    height: int

    def x(self, steps: ArrayLike) -> np.ndarray:
        """Return the positions of steps as shares of the width, 0 at the left."""
        return (np.asarray(steps) - self.left) / (self.right - self.left)

    def y(self, values: ArrayLike) -> np.ndarray:
        """Return the positions of values as shares of the height, 0 at the top.

        Values outside stay at the edge.
        """
        return np.clip((self.top - np.asarray(values)) / (self.top - self.bottom), 0.0, 1.0)


def frame_of(shown: Sequence[Series], height: int) -> Frame:
    """Return the box of all the series, with room on both sides of a single step."""
    steps = np.concatenate([line.steps for line in shown])
    values = np.concatenate([line.values for line in shown])
    bottom, top, mark = domain(values, height // GRID_PIXELS)
    left = float(steps.min())
    right = float(steps.max())
    room = 0.0 if right > left else 0.5
    return Frame(
        left=left - room, right=right + room, bottom=bottom, top=top, mark=mark, height=height
    )


def svg(label: str, height: int, *parts: str) -> str:
    """Return the SVG of a chart; `label` describes it to screen readers."""
    name = html.escape(label)
    return (
        f'<svg class="plot" height="{height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    )


def stretched(paths: str) -> str:
    """Return paths in UNITS stretched over the chart's box."""
    box = f'viewBox="0 0 {UNITS} {UNITS}" width="100%" height="100%" preserveAspectRatio="none"'
    return f"<svg {box}>{paths}</svg>"


def value_grid(frame: Frame) -> str:
    """Draw lines at round values, and their labels left of the chart."""
    drawn = ""
    for mark in ticks(frame.bottom, frame.top, frame.mark):
        at = percent(frame.y(mark))
        kind = "zero" if abs(mark) < frame.mark / 2 else "grid"
        label = axis_number(mark, frame.mark)
        drawn += (
            f'<line class="{kind}" x2="100%" y1="{at}" y2="{at}"/>'
            f'<text class="tick" x="-10" y="{at}" dy=".32em" text-anchor="end">{label}</text>'
        )
    return drawn


def grid(frame: Frame) -> str:
    """Draw lines at round values, and labels of values and of whole steps."""
    step = max(1.0, tick_step(frame.left, frame.right, MOST_STEP_LABELS))
    return value_grid(frame) + step_labels(frame, step)


def step_labels(frame: Frame, step: float) -> str:
    """Draw labels of round steps below the chart."""
    return "".join(
        f'<text class="tick" x="{percent(frame.x(mark))}" y="{frame.height + 20}" '
        f'text-anchor="middle">{axis_number(mark, step)}</text>'
        for mark in ticks(frame.left, frame.right, step)
    )


def bands(steps: np.ndarray, frame: Frame) -> Iterator[tuple[slice, float, float]]:
    """Yield (part, left, right) of at most MOST_POINTS parts that divide steps and width."""
    parts = groups(len(steps), MOST_POINTS)
    between = [(steps[a.stop - 1] + steps[b.start]) / 2 for a, b in itertools.pairwise(parts)]
    edges = [frame.left, *between, frame.right]
    yield from zip(parts, edges[:-1], edges[1:], strict=True)


def target(frame: Frame, left: float, right: float, text: str, rows: str = 'height="100%"') -> str:
    """Draw an invisible band that shows a text under the pointer."""
    start = percent(frame.x(left))
    width = percent(frame.x(right) - frame.x(left))
    title = f"<title>{html.escape(text)}</title>"
    return f'<rect class="at" x="{start}" width="{width}" {rows}>{title}</rect>'


def spikes(line: Series, frame: Frame) -> str:
    """Write the greatest and the least value if they are outside the chart."""
    outside = [
        (int(line.values.argmax()), -7, "↑"),
        (int(line.values.argmin()), frame.height - 6, "↓"),
    ]
    slack = 1e-9 * (frame.top - frame.bottom)
    return "".join(
        f'<text class="tick" x="{percent(frame.x(line.steps[index]))}" y="{at}" '
        f'text-anchor="start" dx="-4">{arrow} {reading(line.values[index])}</text>'
        for index, at, arrow in outside
        if not frame.bottom - slack <= line.values[index] <= frame.top + slack
    )


def end_labels(ends: Sequence[tuple[str, float]], frame: Frame) -> str:
    """Write the last value of each line at its end, moved apart if two would overlap."""
    places = sorted((float(frame.y(value)) * frame.height, name, value) for name, value in ends)
    moved = _apart(np.array([at for at, _, _ in places]), frame.height)
    places = [(at, name, value) for at, (_, name, value) in zip(moved, places, strict=True)]
    return "".join(
        f'<text class="end {name}" x="100%" dx="10" y="{at:.1f}" dy=".34em">{reading(value)}</text>'
        for at, name, value in places
    )


def _apart(places: np.ndarray, height: int) -> np.ndarray:
    """Return places [n], in order, moved to a distance of at least LABEL_PIXELS.

    Those that had to move stay within the height.
    """
    if len(places) < 2 or np.diff(places).min() >= LABEL_PIXELS:
        return places
    # Imported here, as it takes half a second and few charts need it.
    from scipy.optimize import isotonic_regression

    steps = LABEL_PIXELS * np.arange(len(places))
    room = max(height - steps[-1], 0)
    # Overlapping neighbours are pooled, and share their mean.
    return np.clip(isotonic_regression(places - steps).x, 0, room) + steps


def percent(share: float | np.ndarray) -> str:
    """Format a share as a percentage for SVG."""
    return f"{100 * float(share):.2f}%"


def path_of(x: np.ndarray, y: np.ndarray) -> str:
    """Return the path through points at shares of the box."""
    points = zip(UNITS * x, UNITS * y, strict=True)
    return "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in points)
