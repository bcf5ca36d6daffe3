"""Charts as inline SVG: pure functions of series to a string, no script needed.

The plot's own box is the SVG; labels stand outside it, in the margins that the page leaves (`overflow: visible`).
Places are percentages and lines keep their width, so a chart fits a phone and a desk with text of one size.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.report.run import Series
from rlhf_jax.report.scales import (
    axis_number,
    domain,
    duration,
    extremes,
    groups,
    reading,
    smooth,
    tick_step,
    ticks,
)

MOST = 200  # points of a line, bars, and places to point at
UNITS = 1000  # of the box that paths are drawn in
LABEL = 16  # pixels between two labels
ROW = 40  # pixels between two lines of the grid, or more


@dataclasses.dataclass(frozen=True)
class Frame:
    """The box of a chart: the steps and values at its edges, the step of its ticks, and its height in pixels."""

    left: float
    right: float
    bottom: float
    top: float
    mark: float
    height: int

    def x(self, steps: Any) -> Any:
        """Share of the width, 0 at the left."""
        return (np.asarray(steps) - self.left) / (self.right - self.left)

    def y(self, values: Any) -> Any:
        """Share of the height, 0 at the top; what lies outside stays at the edge."""
        return np.clip((self.top - np.asarray(values)) / (self.top - self.bottom), 0.0, 1.0)


def line_chart(title: str, trained: Series, evaluated: Series | None = None, height: int = 190) -> str:
    """SVG of a number by step: every value light, the moving mean bold, evaluations as dots; '' of nothing."""
    shown = [line for line in (trained, evaluated) if line]
    if not shown:
        return ""
    frame = _frame(shown, height)
    parts, ends = [_grid(frame)], []
    if trained:
        mean = smooth(trained.values)
        parts += [_trained(trained, mean, frame), _targets(trained, frame), _spikes(trained, frame)]
        ends.append(("train", float(mean[-1])))
    if evaluated:
        parts.append(_dots(evaluated, frame))
        ends.append(("eval", float(evaluated.values[-1])))
    spoken = f"{title} by step: from {reading(shown[0].values[0])} to {reading(shown[0].values[-1])}"
    return _svg(spoken, height, *parts, _end_labels(ends, frame))


def stacked_chart(title: str, layers: Sequence[Series], height: int = 190) -> str:
    """SVG of seconds by step, one bar a step (or run of steps) with a layer for each series; '' of nothing.

    The layers have the same steps.
    """
    layers = [layer for layer in layers if layer]
    if not layers:
        return ""
    steps, values = layers[0].steps, np.stack([layer.values for layer in layers])  # [layers, n]
    parts = groups(len(steps), MOST)
    means = np.stack([values[:, part].mean(1) for part in parts], 1)  # [layers, bars]
    _, top, mark = domain(means.sum(0), height // ROW, from_zero=True)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    frame = Frame(float(steps[0] - half), float(steps[-1] + half), 0.0, top, mark, height)
    edges = np.array([[steps[part][0] - half, steps[part][-1] + half] for part in parts])
    above = np.cumsum(means, 0)
    bars = "".join(
        f'<path class="layer-{index}" d="{_bars(edges, above[index] - means[index], above[index], frame)}"/>'
        for index in range(len(layers))
    )
    targets = "".join(
        _target(frame, edge[0], edge[1], _stack_tip(steps[part], layers, bar))
        for part, edge, bar in zip(parts, edges, means.T, strict=True)
    )
    whole = Series("together", np.array([steps[part][0] for part in parts]), means.sum(0))
    return _svg(f"{title} by step", height, _grid(frame), _stretched(bars), targets, _spikes(whole, frame))


def _frame(shown: Sequence[Series], height: int) -> Frame:
    steps = np.concatenate([line.steps for line in shown])
    bottom, top, mark = domain(np.concatenate([line.values for line in shown]), height // ROW)
    left, right = float(steps.min()), float(steps.max())
    room = 0.0 if right > left else 0.5
    return Frame(left - room, right + room, bottom, top, mark, height)


def _svg(spoken: str, height: int, *parts: str) -> str:
    name = html.escape(spoken)
    return f'<svg class="plot" height="{height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _stretched(paths: str) -> str:
    box = f'viewBox="0 0 {UNITS} {UNITS}" width="100%" height="100%" preserveAspectRatio="none"'
    return f"<svg {box}>{paths}</svg>"


def _grid(frame: Frame) -> str:
    rows = "".join(
        f'<line class="{"zero" if abs(mark) < frame.mark / 2 else "grid"}" x2="100%" y1="{at}" y2="{at}"/>'
        f'<text class="tick" x="-10" y="{at}" dy=".32em" text-anchor="end">{axis_number(mark, frame.mark)}</text>'
        for mark, at in ((mark, _percent(frame.y(mark))) for mark in ticks(frame.bottom, frame.top, frame.mark))
    )
    step = max(1.0, tick_step(frame.left, frame.right, 6))
    return rows + "".join(
        f'<text class="tick" x="{_percent(frame.x(mark))}" y="{frame.height + 20}" text-anchor="middle">'
        f"{axis_number(mark, step)}</text>"
        for mark in ticks(frame.left, frame.right, step)
    )


def _trained(line: Series, mean: np.ndarray, frame: Frame) -> str:
    if len(line) == 1:
        return f'<circle class="only" cx="{_percent(frame.x(line.steps[0]))}" cy="{_percent(frame.y(mean[0]))}" r="5"/>'
    parts = groups(len(line), MOST)
    kept = extremes(line.values, parts)
    raw = _path(frame.x(line.steps[kept]), frame.y(line.values[kept]))
    middle = np.unique([0, len(line) - 1, *((part.start + part.stop - 1) // 2 for part in parts)])
    bold = _path(frame.x(line.steps[middle]), frame.y(mean[middle]))
    return _stretched(f'<path class="raw" d="{raw}"/><path class="mean" d="{bold}"/>')


def _path(x: np.ndarray, y: np.ndarray) -> str:
    points = zip(UNITS * x, UNITS * y, strict=True)
    return "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in points)


def _bars(edges: np.ndarray, low: np.ndarray, high: np.ndarray, frame: Frame) -> str:
    """One path of rectangles; where bars are few there is a gap between them."""
    left, right = UNITS * frame.x(edges.T)
    gap = (right - left) * (0.12 if len(edges) <= 60 else 0.0)
    top, bottom = UNITS * frame.y(high), UNITS * frame.y(low)
    rows = zip(left + gap, top, right - left - 2 * gap, bottom - top, strict=True)
    return "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in rows)


def _dots(line: Series, frame: Frame) -> str:
    parts = groups(len(line), MOST)
    kept = [part.stop - 1 for part in parts]
    x, y = frame.x(line.steps[kept]), frame.y(line.values[kept])
    path = _stretched(f'<path class="held" d="{_path(x, y)}"/>')
    radius = 5 if len(kept) <= 40 else 3
    return path + "".join(
        f'<circle class="dot" cx="{_percent(across)}" cy="{_percent(down)}" r="{radius}">'
        f"<title>{line.name} after {line.steps[index]:,.0f} steps\n"
        f"{reading(float(line.values[index]))}</title></circle>"
        for index, across, down in zip(kept, x, y, strict=True)
    )


def _targets(line: Series, frame: Frame) -> str:
    """Invisible bands over the whole height that say the values under the pointer."""
    parts = groups(len(line), MOST)
    between = [(line.steps[a.stop - 1] + line.steps[b.start]) / 2 for a, b in itertools.pairwise(parts)]
    edges = [frame.left, *between, frame.right]
    return "".join(
        _target(frame, left, right, _tip(line.steps[part], line.values[part], line.name))
        for part, left, right in zip(parts, edges[:-1], edges[1:], strict=True)
    )


def _target(frame: Frame, left: float, right: float, text: str) -> str:
    start, width = _percent(frame.x(left)), _percent(frame.x(right) - frame.x(left))
    return f'<rect class="at" x="{start}" width="{width}" height="100%"><title>{html.escape(text)}</title></rect>'


def _tip(steps: np.ndarray, values: np.ndarray, name: str) -> str:
    spread = f" ({reading(values.min())} to {reading(values.max())})" if len(values) > 1 else ""
    return f"{_when(steps)}\n{name} {reading(values.mean())}{spread}"


def _stack_tip(steps: np.ndarray, layers: Sequence[Series], seconds: np.ndarray) -> str:
    rows = [f"{layer.name} {duration(value)}" for layer, value in zip(layers, seconds, strict=True)]
    return "\n".join([_when(steps), *rows, f"together {duration(float(seconds.sum()))}"])


def _when(steps: np.ndarray) -> str:
    return f"step {steps[0]:,.0f}" if len(steps) == 1 else f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"


def _spikes(line: Series, frame: Frame) -> str:
    """The greatest and the least value where they lie outside the chart."""
    found = [(int(line.values.argmax()), -7, "↑"), (int(line.values.argmin()), frame.height - 6, "↓")]
    return "".join(
        f'<text class="tick" x="{_percent(frame.x(line.steps[index]))}" y="{at}" text-anchor="start" dx="-4">'
        f"{arrow} {reading(line.values[index])}</text>"
        for index, at, arrow in found
        if not frame.bottom <= line.values[index] <= frame.top
    )


def _end_labels(ends: Sequence[tuple[str, float]], frame: Frame) -> str:
    """The last value of each line beside its end, moved apart where two would meet."""
    places = sorted((float(frame.y(value)) * frame.height, name, value) for name, value in ends)
    if len(places) == 2 and places[1][0] - places[0][0] < LABEL:
        middle = min(max((places[0][0] + places[1][0]) / 2, LABEL / 2), frame.height - LABEL / 2)
        moved = (middle - LABEL / 2, middle + LABEL / 2)
        places = [(at, name, value) for at, (_, name, value) in zip(moved, places, strict=True)]
    return "".join(
        f'<text class="end {name}" x="100%" dx="10" y="{at:.1f}" dy=".34em">{reading(value)}</text>'
        for at, name, value in places
    )


def _percent(share: float) -> str:
    return f"{100 * float(share):.2f}%"
