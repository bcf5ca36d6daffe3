"""Charts as inline SVG: pure functions of series to a string, no script needed.

The plot's own box is the SVG; labels stand outside it, in the margins that the page leaves
(`overflow: visible`). Places are percentages and lines keep their width, so a chart fits a phone
and a desk with text of one size.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.monitoring.report.run import Series
from rlhf_jax.monitoring.report.scales import (
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
# pixels of a lane at least and at most, and of all together where that is possible
LANES = (5, 28, 576)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A titled chart; `legend` has (class, text) rows."""

    title: str
    note: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Lane:
    """A row of `lanes_chart`: what to call it, bars as (class, left, right), tips as (text, left,
    right), marks, and a word at its end.
    """

    name: str
    bars: Sequence[tuple[str, float, float]]
    tips: Sequence[tuple[str, float, float]]
    marks: Sequence[float]
    end: str


@dataclasses.dataclass(frozen=True)
class Frame:
    """The box of a chart: the steps and values at its edges, the step of its ticks, and its height
    in pixels.
    """

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


def line_chart(
    title: str, trained: Series, evaluated: Series | None = None, height: int = 190
) -> str:
    """SVG of a number by step: every value light, the moving mean bold, evaluations as dots; '' of
    nothing.
    """
    shown = [line for line in (trained, evaluated) if line]
    if not shown:
        return ""
    frame = _frame(shown, height)
    parts = [_grid(frame)]
    ends = []
    if trained:
        mean = smooth(trained.values)
        parts += [_trained(trained, mean, frame), _targets(trained, frame), _spikes(trained, frame)]
        ends.append(("train", float(mean[-1])))
    if evaluated:
        parts.append(_dots(evaluated, frame))
        ends.append(("eval", float(evaluated.values[-1])))
    spoken = (
        f"{title} by step: from {reading(shown[0].values[0])} to {reading(shown[0].values[-1])}"
    )
    return _svg(spoken, height, *parts, _end_labels(ends, frame))


def lines_chart(title: str, lines: Sequence[tuple[str, Series]], height: int = 190) -> str:
    """SVG of the moving means of several numbers by step, each line of its own class; '' of
    nothing.
    """
    lines = [(kind, line) for kind, line in lines if line]
    if not lines:
        return ""
    frame = _frame([line for _, line in lines], height)
    means = [(kind, smooth(line.values)) for kind, line in lines]
    drawn = [
        _mean(line, mean, frame, kind) for (kind, line), (_, mean) in zip(lines, means, strict=True)
    ]
    named = {
        line.name: dict(zip(line.steps.tolist(), line.values.tolist(), strict=True))
        for _, line in lines
    }
    steps = np.unique(np.concatenate([line.steps for _, line in lines]))
    targets = "".join(
        _target(frame, left, right, _several_tip(steps[part], named))
        for part, left, right in _bands(steps, frame)
    )
    ends = [(kind, float(mean[-1])) for kind, mean in means]
    return _svg(f"{title} by step", height, _grid(frame), *drawn, targets, _end_labels(ends, frame))


def share_chart(
    title: str,
    names: Sequence[str],
    layers: Sequence[tuple[str, np.ndarray]],
    tips: Sequence[str],
    height: int = 190,
) -> str:
    """SVG of a bar for each name, stacked of (class, per cent [n]) layers that `tips` [n] say; ''
    of none.
    """
    if not names:
        return ""
    frame = Frame(0.0, float(len(names)), 0.0, 100.0, 25.0, height)
    edges = np.arange(len(names))[:, None] + np.array([0.0, 1.0])
    above = np.cumsum([shares for _, shares in layers], 0)
    bars = "".join(
        f'<path class="{kind}" d="{_bars(edges, top - shares, top, frame)}"/>'
        for (kind, shares), top in zip(layers, above, strict=True)
    )
    labels = "".join(
        f'<text class="tick" x="{_percent(frame.x(index + 0.5))}" y="{height + 20}" '
        f'text-anchor="middle">{html.escape(name)}</text>'
        for index, name in enumerate(names)
    )
    targets = "".join(_target(frame, index, index + 1, tip) for index, tip in enumerate(tips))
    return _svg(title, height, _rows(frame), labels, _stretched(bars), targets)


def stacked_chart(
    title: str,
    layers: Sequence[Series],
    height: int = 190,
    kinds: Sequence[str] = (),
    say: Callable[[float], str] = duration,
    whole: bool = True,
) -> str:
    """SVG of numbers by step, one bar a step (or run of steps) with a layer for each series; '' of
    nothing.

    The layers have the same steps, and are of these classes, or 'layer-0', 'layer-1' ...; `say`
    speaks a number (of seconds), and the tips tell the `whole`.
    """
    layers = [layer for layer in layers if layer]
    kinds = kinds or [f"layer-{index}" for index in range(len(layers))]
    if not layers:
        return ""
    # [layers, n]
    steps = layers[0].steps
    values = np.stack([layer.values for layer in layers])
    parts = groups(len(steps), MOST)
    means = np.stack([values[:, part].mean(1) for part in parts], 1)  # [layers, bars]
    _, top, mark = domain(means.sum(0), height // ROW, from_zero=True)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    frame = Frame(float(steps[0] - half), float(steps[-1] + half), 0.0, top, mark, height)
    edges = np.array([[steps[part][0] - half, steps[part][-1] + half] for part in parts])
    above = np.cumsum(means, 0)
    bars = "".join(
        f'<path class="{kind}" d="{_bars(edges, top - mean, top, frame)}"/>'
        for kind, top, mean in zip(kinds, above, means, strict=True)
    )
    targets = "".join(
        _target(frame, edge[0], edge[1], _stack_tip(steps[part], layers, bar, say, whole))
        for part, edge, bar in zip(parts, edges, means.T, strict=True)
    )
    sums = Series("together", np.array([steps[part][0] for part in parts]), means.sum(0))
    return _svg(
        f"{title} by step", height, _grid(frame), _stretched(bars), targets, _spikes(sums, frame)
    )


def lanes_chart(title: str, lanes: Sequence[Lane], right: float, heading: str) -> str:
    """SVG of lanes from 0 to `right`, their bars over a ground of class 'idle'; `heading` stands
    over their ends.
    """
    least, most, together = LANES
    pitch = min(max(together // len(lanes), least), most)
    frame = Frame(0.0, right, 0.0, float(len(lanes)), 1.0, pitch * len(lanes))
    ground = [("idle", index, 0.0, right) for index in range(len(lanes))]
    bars = [
        (kind, index, start, end)
        for index, lane in enumerate(lanes)
        for kind, start, end in lane.bars
    ]
    kinds = dict.fromkeys(kind for kind, *_ in bars)
    paths = [
        _lane_bars(kind, [bar for bar in ground + bars if bar[0] == kind], frame)
        for kind in ("idle", *kinds)
    ]
    marks = [
        (frame.x(at), (index + 0.5) / len(lanes))
        for index, lane in enumerate(lanes)
        for at in lane.marks
    ]
    dots = "".join(f"M{UNITS * x:.1f} {UNITS * y:.1f}h0" for x, y in marks)
    paths += (
        [f'<path class="mark" stroke-width="{max(2, min(pitch - 4, 7))}" d="{dots}"/>']
        if dots
        else []
    )
    words = f'<text class="tick" x="100%" dx="10" y="-9">{html.escape(heading)}</text>'
    labels = [_lane_labels(lanes, pitch), words, _columns(frame, tick_step(0.0, right, 6))]
    return _svg(title, frame.height, _stretched("".join(paths)), *labels, _lane_tips(lanes, frame))


def _lane_bars(kind: str, bars: Sequence[tuple[str, int, float, float]], frame: Frame) -> str:
    """One path of all bars of a class; a fifth of a lane, in whole pixels, is left between two."""
    pixel = UNITS / frame.height
    pitch = frame.height // frame.top
    gap = round(pitch / 4.5)
    tall = pixel * (pitch - gap)
    places = [
        (frame.x(left), pixel * (pitch * index + gap // 2), frame.x(right))
        for _, index, left, right in bars
    ]
    drawn = "".join(
        f"M{UNITS * x:.1f} {y:.1f}H{UNITS * end:.1f}v{tall:.1f}H{UNITS * x:.1f}z"
        for x, y, end in places
    )
    return f'<path class="{kind}" d="{drawn}"/>'


def _lane_labels(lanes: Sequence[Lane], pitch: int) -> str:
    """Names and ends, as many as have room."""
    shown = range(0, len(lanes), math.ceil(LABEL / pitch))
    middles = [(lanes[index], f'y="{(index + 0.5) * pitch:.1f}" dy=".34em"') for index in shown]
    names = [
        f'<text class="tick" x="-10" {at} text-anchor="end">{html.escape(lane.name)}</text>'
        for lane, at in middles
    ]
    ends = [
        f'<text class="tick" x="100%" dx="10" {at}>{html.escape(lane.end)}</text>'
        for lane, at in middles
    ]
    return "".join([*names, *ends])


def _lane_tips(lanes: Sequence[Lane], frame: Frame) -> str:
    return "".join(
        _target(
            frame,
            left,
            right,
            text,
            f'y="{_percent(index / len(lanes))}" height="{_percent(1 / len(lanes))}"',
        )
        for index, lane in enumerate(lanes)
        for text, left, right in lane.tips
    )


def _frame(shown: Sequence[Series], height: int) -> Frame:
    steps = np.concatenate([line.steps for line in shown])
    bottom, top, mark = domain(np.concatenate([line.values for line in shown]), height // ROW)
    left = float(steps.min())
    right = float(steps.max())
    room = 0.0 if right > left else 0.5
    return Frame(left - room, right + room, bottom, top, mark, height)


def _svg(spoken: str, height: int, *parts: str) -> str:
    name = html.escape(spoken)
    return (
        f'<svg class="plot" height="{height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    )


def _stretched(paths: str) -> str:
    box = f'viewBox="0 0 {UNITS} {UNITS}" width="100%" height="100%" preserveAspectRatio="none"'
    return f"<svg {box}>{paths}</svg>"


def _rows(frame: Frame) -> str:
    return "".join(
        f'<line class="{"zero" if abs(mark) < frame.mark / 2 else "grid"}" '
        f'x2="100%" y1="{at}" y2="{at}"/>'
        f'<text class="tick" x="-10" y="{at}" dy=".32em" text-anchor="end">'
        f"{axis_number(mark, frame.mark)}</text>"
        for mark, at in (
            (mark, _percent(frame.y(mark))) for mark in ticks(frame.bottom, frame.top, frame.mark)
        )
    )


def _grid(frame: Frame) -> str:
    return _rows(frame) + _columns(frame, max(1.0, tick_step(frame.left, frame.right, 6)))


def _columns(frame: Frame, step: float) -> str:
    """Labels below the chart."""
    return "".join(
        f'<text class="tick" x="{_percent(frame.x(mark))}" y="{frame.height + 20}" '
        f'text-anchor="middle">{axis_number(mark, step)}</text>'
        for mark in ticks(frame.left, frame.right, step)
    )


def _trained(line: Series, mean: np.ndarray, frame: Frame) -> str:
    if len(line) == 1:
        return _mean(line, mean, frame, "")
    kept = extremes(line.values, groups(len(line), MOST))
    raw = _path(frame.x(line.steps[kept]), frame.y(line.values[kept]))
    return _stretched(f'<path class="raw" d="{raw}"/>') + _mean(line, mean, frame, "")


def _mean(line: Series, mean: np.ndarray, frame: Frame, kind: str) -> str:
    """The moving mean as a bold line; a dot of one value."""
    if len(line) == 1:
        place = f'cx="{_percent(frame.x(line.steps[0]))}" cy="{_percent(frame.y(mean[0]))}"'
        return f'<circle class="{f"only {kind}".rstrip()}" {place} r="5"/>'
    parts = groups(len(line), MOST)
    middle = np.unique([0, len(line) - 1, *((part.start + part.stop - 1) // 2 for part in parts)])
    bold = _path(frame.x(line.steps[middle]), frame.y(mean[middle]))
    return _stretched(f'<path class="{f"mean {kind}".rstrip()}" d="{bold}"/>')


def _path(x: np.ndarray, y: np.ndarray) -> str:
    points = zip(UNITS * x, UNITS * y, strict=True)
    return "M" + "L".join(f"{send_to_process:.1f} {down:.1f}" for send_to_process, down in points)


def _bars(edges: np.ndarray, low: np.ndarray, high: np.ndarray, frame: Frame) -> str:
    """One path of rectangles; where bars are few there is a gap between them."""
    left, right = UNITS * frame.x(edges.T)
    gap = (right - left) * (0.12 if len(edges) <= 60 else 0.0)
    top = UNITS * frame.y(high)
    bottom = UNITS * frame.y(low)
    rows = zip(left + gap, top, right - left - 2 * gap, bottom - top, strict=True)
    return "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in rows)


def _dots(line: Series, frame: Frame) -> str:
    parts = groups(len(line), MOST)
    kept = [part.stop - 1 for part in parts]
    x = frame.x(line.steps[kept])
    y = frame.y(line.values[kept])
    path = _stretched(f'<path class="held" d="{_path(x, y)}"/>')
    radius = 5 if len(kept) <= 40 else 3
    return path + "".join(
        f'<circle class="dot" cx="{_percent(send_to_process)}" cy="{_percent(down)}" r="{radius}">'
        f"<title>{line.name} after {line.steps[index]:,.0f} steps\n"
        f"{reading(float(line.values[index]))}</title></circle>"
        for index, send_to_process, down in zip(kept, x, y, strict=True)
    )


def _targets(line: Series, frame: Frame) -> str:
    """Invisible bands over the whole height that say the values under the pointer."""
    return "".join(
        _target(frame, left, right, _tip(line.steps[part], line.values[part], line.name))
        for part, left, right in _bands(line.steps, frame)
    )


def _bands(steps: np.ndarray, frame: Frame) -> Iterator[tuple[slice, float, float]]:
    """(part, left, right) of at most MOST parts of the steps, which share the width out among
    them.
    """
    parts = groups(len(steps), MOST)
    between = [(steps[a.stop - 1] + steps[b.start]) / 2 for a, b in itertools.pairwise(parts)]
    edges = [frame.left, *between, frame.right]
    yield from zip(parts, edges[:-1], edges[1:], strict=True)


def _target(frame: Frame, left: float, right: float, text: str, rows: str = 'height="100%"') -> str:
    start = _percent(frame.x(left))
    width = _percent(frame.x(right) - frame.x(left))
    title = f"<title>{html.escape(text)}</title>"
    return f'<rect class="at" x="{start}" width="{width}" {rows}>{title}</rect>'


def _tip(steps: np.ndarray, values: np.ndarray, name: str) -> str:
    spread = f" ({reading(values.min())} to {reading(values.max())})" if len(values) > 1 else ""
    return f"{_when(steps)}\n{name} {reading(values.mean())}{spread}"


def _stack_tip(
    steps: np.ndarray,
    layers: Sequence[Series],
    values: np.ndarray,
    say: Callable[[float], str],
    whole: bool,
) -> str:
    rows = [f"{layer.name} {say(value)}" for layer, value in zip(layers, values, strict=True)]
    together = [f"together {say(float(values.sum()))}"] if whole else []
    return "\n".join([_when(steps), *rows, *together])


def _several_tip(steps: np.ndarray, named: Mapping[str, Mapping[float, float]]) -> str:
    """The mean of each line over these steps."""
    seen = {
        name: [values[step] for step in steps.tolist() if step in values]
        for name, values in named.items()
    }
    return "\n".join(
        [_when(steps), *(f"{name} {reading(float(np.mean(v)))}" for name, v in seen.items() if v)]
    )


def _when(steps: np.ndarray) -> str:
    return (
        f"step {steps[0]:,.0f}" if len(steps) == 1 else f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"
    )


def _spikes(line: Series, frame: Frame) -> str:
    """The greatest and the least value where they lie outside the chart."""
    found = [
        (int(line.values.argmax()), -7, "↑"),
        (int(line.values.argmin()), frame.height - 6, "↓"),
    ]
    slack = 1e-9 * (frame.top - frame.bottom)
    return "".join(
        f'<text class="tick" x="{_percent(frame.x(line.steps[index]))}" y="{at}" '
        f'text-anchor="start" dx="-4">{arrow} {reading(line.values[index])}</text>'
        for index, at, arrow in found
        if not frame.bottom - slack <= line.values[index] <= frame.top + slack
    )


def _end_labels(ends: Sequence[tuple[str, float]], frame: Frame) -> str:
    """The last value of each line beside its end, moved apart where two would meet."""
    places = sorted((float(frame.y(value)) * frame.height, name, value) for name, value in ends)
    moved = _apart(np.array([at for at, _, _ in places]), frame.height)
    places = [(at, name, value) for at, (_, name, value) in zip(moved, places, strict=True)]
    return "".join(
        f'<text class="end {name}" x="100%" dx="10" y="{at:.1f}" dy=".34em">{reading(value)}</text>'
        for at, name, value in places
    )


def _apart(places: np.ndarray, height: int) -> np.ndarray:
    """Places [n], in order, LABEL or more from each other and within the height where they had to
    move.
    """
    if len(places) < 2 or np.diff(places).min() >= LABEL:
        return places
    steps = LABEL * np.arange(len(places))
    room = max(height - steps[-1], 0)
    # least squares that rise nowhere: neighbours that meet are pooled
    pooled = [[place] for place in places - steps]
    at = 1
    while at < len(pooled):
        if at and np.mean(pooled[at - 1]) > np.mean(pooled[at]):
            pooled[at - 1 : at + 1] = [pooled[at - 1] + pooled[at]]
            at -= 1
        else:
            at += 1
    return np.clip([np.mean(part) for part in pooled for _ in part], 0, room) + steps


def _percent(share: float) -> str:
    return f"{100 * float(share):.2f}%"
