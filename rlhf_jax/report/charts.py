"""Draw charts as inline SVG: pure functions of series to a string, no script needed."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlhf_jax.report.axes import (
    GRID_PIXELS,
    LABEL_PIXELS,
    MOST_POINTS,
    MOST_STEP_LABELS,
    UNITS,
    Frame,
    bands,
    end_labels,
    frame_of,
    grid,
    path_of,
    percent,
    spikes,
    step_labels,
    stretched,
    svg,
    target,
    value_grid,
)
from rlhf_jax.report.run import Series, is_constant
from rlhf_jax.report.scales import domain, duration, groups, reading, smooth, tick_step

# Least and most pixels of a lane, and of all lanes together if possible.
LANE_PIXELS = (5, 28, 576)
# Default height of a chart in pixels.
HEIGHT = 190
# Of a standalone SVG, in pixels.
PICTURE_WIDTH = 1000
NAMES_WIDTH = 96  # left of the lanes
SHARES_WIDTH = 64  # right of them
TITLE_HEIGHT = 92  # above them
LETTER = 6.3  # of a letter of the legend, about


@dataclasses.dataclass(frozen=True)
class Chart:
    """Hold a titled chart; `legend` has (class, text) rows."""

    title: str
    note: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


COLOURS = 4  # classes of lines with their own colours: other-0 ...


@dataclasses.dataclass(frozen=True)
class Lane:
    """Hold a row of `lanes_chart`."""

    name: str  # written before it
    bars: Sequence[tuple[str, float, float]]  # (class, left, right)
    tips: Sequence[tuple[str, float, float]]  # (text, left, right)
    marks: Sequence[float]  # places of dots
    end: str  # written after it


def line_chart(
    title: str, trained: Series, evaluated: Series | None = None, height: int = HEIGHT
) -> str:
    """Draw a number by step: each value light, the moving mean bold, evaluations as dots.

    Returns an SVG; '' for an empty or constant series. height: in pixels.
    """
    shown = [line for line in (trained, evaluated) if line]
    if all(map(is_constant, shown)):
        return ""
    frame = frame_of(shown, height)
    parts = [grid(frame)]
    ends = []
    if trained:
        steps = trained.steps
        values = trained.values
        mean = smooth(values)
        if len(trained) > 1:
            # A line through the least and the greatest value of every part keeps each spike.
            parts_of_line = groups(len(trained), MOST_POINTS)
            ends_of_part = itertools.product(parts_of_line, (np.argmin, np.argmax))
            kept = np.unique([part.start + end(values[part]) for part, end in ends_of_part])
            raw = path_of(frame.x(steps[kept]), frame.y(values[kept]))
            parts.append(stretched(f'<path class="raw" d="{raw}"/>'))
        parts.append(_mean(trained, mean, frame))
        for part, left, right in bands(steps, frame):
            seen = values[part]
            spread = f" ({reading(seen.min())} to {reading(seen.max())})" if len(seen) > 1 else ""
            tip = f"{_when(steps[part])}\n{trained.name} {reading(seen.mean())}{spread}"
            parts.append(target(frame, left, right, tip))
        parts.append(spikes(trained, frame))
        ends.append(("train", float(mean[-1])))
    if evaluated:
        parts.append(_dots(evaluated, frame))
        ends.append(("eval", float(evaluated.values[-1])))
    first, last = shown[0].values[[0, -1]]
    label = f"{title} by step: from {reading(first)} to {reading(last)}"
    return svg(label, height, *parts, end_labels(ends, frame))


def lines_chart(title: str, note: str, lines: Sequence[tuple[str, Series]]) -> Chart:
    """Draw the moving means of several (class, number by step), with their names.

    Its SVG is '' for empty or constant series.
    """
    lines = [(kind, line) for kind, line in lines if line]
    legend = tuple((kind, line.name) for kind, line in lines)
    if all(is_constant(line) for _, line in lines):
        return Chart(title, note, "", legend)
    frame = frame_of([line for _, line in lines], HEIGHT)
    parts = [grid(frame)]
    ends = []
    for kind, line in lines:
        mean = smooth(line.values)
        parts.append(_mean(line, mean, frame, kind))
        ends.append((kind, float(mean[-1])))

    # The lines may have different steps: a tip has those with values in its band.
    named = {
        line.name: dict(zip(line.steps.tolist(), line.values.tolist(), strict=True))
        for _, line in lines
    }
    steps = np.unique(np.concatenate([line.steps for _, line in lines]))
    for part, left, right in bands(steps, frame):
        tip = [_when(steps[part])]
        for name, values in named.items():
            seen = [values[step] for step in steps[part].tolist() if step in values]
            if seen:
                tip.append(f"{name} {reading(float(np.mean(seen)))}")
        parts.append(target(frame, left, right, "\n".join(tip)))
    drawn = svg(f"{title} by step", HEIGHT, *parts, end_labels(ends, frame))
    return Chart(title, note, drawn, legend)


def share_chart(
    title: str,
    names: Sequence[str],
    layers: Sequence[tuple[str, np.ndarray]],
    tips: Sequence[str],
    height: int = HEIGHT,
) -> str:
    """Draw a bar for each name, stacked from layers (class, per cent [n]); '' without names.

    Returns an SVG, in which hovering shows a bar's tip, of `tips` [n].
    """
    if not names:
        return ""
    frame = Frame(0.0, float(len(names)), 0.0, 100.0, 25.0, height)
    edges = np.arange(len(names))[:, None] + np.array([0.0, 1.0])
    bars = _stacked(layers, edges, frame)
    labels = "".join(
        f'<text class="tick" x="{percent(frame.x(index + 0.5))}" y="{height + 20}" '
        f'text-anchor="middle">{html.escape(name)}</text>'
        for index, name in enumerate(names)
    )
    targets = "".join(target(frame, index, index + 1, tip) for index, tip in enumerate(tips))
    return svg(title, height, value_grid(frame), labels, bars, targets)


def stacked_chart(
    title: str,
    layers: Sequence[Series],
    kinds: Sequence[str] = (),
    say: Callable[[float], str] = duration,
    whole: bool = True,
) -> str:
    """Draw numbers by step, one bar per step (or run of steps) with a layer for each series.

    Returns an SVG; '' if empty. layers: of the same steps. kinds: their classes, 'layer-0',
    'layer-1' ... if not given. say: formats a number, by default seconds. whole: whether tips
    include the sum of the layers.
    """
    layers = [layer for layer in layers if layer]
    kinds = kinds or [f"layer-{index}" for index in range(len(layers))]
    if not layers:
        return ""
    steps = layers[0].steps
    values = np.stack([layer.values for layer in layers])  # [layers, n]
    parts = groups(len(steps), MOST_POINTS)
    means = np.stack([values[:, part].mean(1) for part in parts], 1)  # [layers, bars]
    _, top, mark = domain(means.sum(0), HEIGHT // GRID_PIXELS, from_zero=True)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    frame = Frame(float(steps[0] - half), float(steps[-1] + half), 0.0, top, mark, HEIGHT)
    edges = np.array([[steps[part][0] - half, steps[part][-1] + half] for part in parts])
    bars = _stacked(list(zip(kinds, means, strict=True)), edges, frame)
    targets = []
    for part, (left, right), bar in zip(parts, edges, means.T, strict=True):
        tip = [_when(steps[part])]
        tip += [f"{layer.name} {say(value)}" for layer, value in zip(layers, bar, strict=True)]
        if whole:
            tip.append(f"together {say(float(bar.sum()))}")
        targets.append(target(frame, left, right, "\n".join(tip)))
    sums = Series("together", np.array([steps[part][0] for part in parts]), means.sum(0))
    return svg(f"{title} by step", HEIGHT, grid(frame), bars, *targets, spikes(sums, frame))


def lanes_chart(title: str, lanes: Sequence[Lane], right: float) -> str:
    """Draw lanes from 0 to `right`, their bars on a background of class 'idle', as an SVG."""
    least, most, together = LANE_PIXELS
    pitch = min(max(together // len(lanes), least), most)
    frame = Frame(0.0, right, 0.0, float(len(lanes)), 1.0, pitch * len(lanes))
    bars = {"idle": [(index, 0.0, right) for index in range(len(lanes))]}
    dots = ""
    for index, lane in enumerate(lanes):
        for kind, start, end in lane.bars:
            bars.setdefault(kind, []).append((index, start, end))
        middle = UNITS * ((index + 0.5) / len(lanes))
        dots += "".join(f"M{UNITS * frame.x(at):.1f} {middle:.1f}h0" for at in lane.marks)
    pixel = UNITS / frame.height
    gap = round(pitch / 4.5)  # a fifth of a lane, in whole pixels, is left between two lanes
    tall = pixel * (pitch - gap)
    paths = []
    for kind, places in bars.items():
        path = ""
        for index, start, end in places:
            left = UNITS * frame.x(start)
            top = pixel * (pitch * index + gap // 2)
            path += f"M{left:.1f} {top:.1f}H{UNITS * frame.x(end):.1f}v{tall:.1f}H{left:.1f}z"
        paths.append(f'<path class="{kind}" d="{path}"/>')
    if dots:
        width = max(2, min(pitch - 4, 7))
        paths.append(f'<path class="mark" stroke-width="{width}" d="{dots}"/>')

    tips = []
    for index, lane in enumerate(lanes):
        rows = f'y="{percent(index / len(lanes))}" height="{percent(1 / len(lanes))}"'
        tips += [target(frame, start, end, text, rows) for text, start, end in lane.tips]
    heading = '<text class="tick" x="100%" dx="10" y="-9">idle</text>'  # over the lanes' ends
    seconds = step_labels(frame, tick_step(0.0, right, MOST_STEP_LABELS))
    labels = [_lane_labels(lanes, pitch), heading, seconds]
    return svg(title, frame.height, stretched("".join(paths)), *labels, *tips)


def complete_svg(
    drawn: str, *, title: str, note: str, colours: Mapping[str, str], style: str = ""
) -> str:
    """Make a standalone SVG from the output of `lanes_chart`, with a title and a legend.

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
        f"{_legend(list(colours), TITLE_HEIGHT + height + 50)}</svg>\n"
    )


def _lane_labels(lanes: Sequence[Lane], pitch: int) -> str:
    """Write the names of lanes before them and the ends after, as many as have room."""
    shown = range(0, len(lanes), math.ceil(LABEL_PIXELS / pitch))
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


def _legend(names: list[str], at: int) -> str:
    """Draw a square and a name for each class of bars, at a distance from the top in pixels."""
    drawn = ""
    left = 24.0
    for name in names:
        label = name.replace("_", " ")
        drawn += (
            f'<rect class="{name}" x="{left:.0f}" y="{at - 10}" width="10" height="10" rx="2"/>'
            f'<text x="{left + 16:.0f}" y="{at}">{label}</text>'
        )
        left += 30 + LETTER * len(label)
    return drawn


def _mean(line: Series, mean: np.ndarray, frame: Frame, kind: str = "") -> str:
    """Draw the moving mean of a line as a bold line, or a single value as a dot."""
    if len(line) == 1:
        place = f'cx="{percent(frame.x(line.steps[0]))}" cy="{percent(frame.y(mean[0]))}"'
        return f'<circle class="{f"only {kind}".rstrip()}" {place} r="5"/>'
    parts = groups(len(line), MOST_POINTS)
    middle = np.unique([0, len(line) - 1, *((part.start + part.stop - 1) // 2 for part in parts)])
    bold = path_of(frame.x(line.steps[middle]), frame.y(mean[middle]))
    return stretched(f'<path class="{f"mean {kind}".rstrip()}" d="{bold}"/>')


def _stacked(layers: Sequence[tuple[str, np.ndarray]], edges: np.ndarray, frame: Frame) -> str:
    """Draw bars between edges [n, 2] of layers (class, heights [n]), with gaps if they are few."""
    left, right = UNITS * frame.x(edges.T)
    gap = (right - left) * (0.12 if len(edges) <= 60 else 0.0)
    paths = ""
    below = np.zeros(len(edges))
    for kind, heights in layers:
        bottom = UNITS * frame.y(below)
        below = below + heights
        top = UNITS * frame.y(below)
        rows = zip(left + gap, top, right - left - 2 * gap, bottom - top, strict=True)
        bars = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in rows)
        paths += f'<path class="{kind}" d="{bars}"/>'
    return stretched(paths)


def _dots(line: Series, frame: Frame) -> str:
    """Draw a line as dots joined by dashes, each of which shows its value on hover."""
    parts = groups(len(line), MOST_POINTS)
    kept = [part.stop - 1 for part in parts]
    x = frame.x(line.steps[kept])
    y = frame.y(line.values[kept])
    path = stretched(f'<path class="held" d="{path_of(x, y)}"/>')
    radius = 5 if len(kept) <= 40 else 3
    return path + "".join(
        f'<circle class="dot" cx="{percent(across)}" cy="{percent(down)}" r="{radius}">'
        f"<title>{line.name} after {line.steps[index]:,.0f} steps\n"
        f"{reading(float(line.values[index]))}</title></circle>"
        for index, across, down in zip(kept, x, y, strict=True)
    )


def _when(steps: np.ndarray) -> str:
    """Describe a range of steps."""
    if len(steps) == 1:
        return f"step {steps[0]:,.0f}"
    return f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"
