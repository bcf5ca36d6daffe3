"""Draw the latest step's timeline for the report: the work of slices and other devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from rlhf_jax.report.charts import Chart, Lane, lanes_chart, line_chart
from rlhf_jax.report.run import Row, RunRecord, Trace, series
from rlhf_jax.report.scales import axis_number, reading, share, strategy_label, volume

# (key, title, unit) of the charts by step.
SLICE_CHARTS = (
    ("generation/idle_share", "Idle time", "share of the slices' time in generation"),
    ("generation/moved_bytes", "Moved between slices", "bytes of caches"),
)
SLICE_KEYS = tuple(key for key, *_ in SLICE_CHARTS)
SPAN_KINDS = ("generate", "exchange", "inference", "training")
# Shades of rounds: from half of the most rows up, from a quarter up, and so on.
ROW_SHADES = 5

# Limits of the drawing, so that the page stays small.
MOST_COLUMNS = 600
BARS = 1400
MARKS = 500
TIPS = 192
LANE_TIPS = 48  # tips of one lane
MOST_LANES = 128
TIP_STRATEGIES = 3  # strategies in a tip


@dataclasses.dataclass(frozen=True)
class Busy:
    """Hold the seconds [columns] of a lane in each column of the picture."""

    generate: np.ndarray
    inference: np.ndarray
    training: np.ndarray
    idle: np.ndarray
    rows: np.ndarray  # live ones while it generated


def picture(run: RunRecord) -> Chart | None:
    """Draw the latest step with a trace; None for a single lane."""
    trace = run.trace
    if trace is None or not len(trace) or len(trace.lanes) == 1:
        return None
    count = len(trace.lanes)
    shown = np.unique(np.linspace(0, count - 1, min(count, MOST_LANES)).round().astype(int))
    some = "" if len(shown) == count else f", {len(shown)} of {count:,} {_kind_of_lanes(trace)}"
    right = float(trace.ended.max()) or 1e-6
    # Most rows of each shade, the lightest first: powers of two up to the most live rows.
    most = int(trace.rows[trace.kind == "generate"].max(initial=1))
    top = (most - 1).bit_length()
    bounds = [1 << power for power in range(max(0, top - ROW_SHADES + 1), top + 1)]
    title = f"What the devices did in step {trace.step}"
    svg = lanes_chart(title, _lanes(trace, shown, right, bounds), right)
    least = [1, *(bound + 1 for bound in bounds)]
    sizes = [
        f"{a}–{b} rows" if a < b else f"{b} row{'s' * (b > 1)}"
        for a, b in zip(least, bounds, strict=False)
    ]
    others = (
        ("inference", "inference", "inference"),
        ("training", "training", "training"),
        ("exchange", "mark", "samples came"),
    )
    other_kinds = [(kind, text) for event, kind, text in others if event in trace.kind]
    legend = (*zip(_classes(bounds), sizes, strict=True), *other_kinds, ("idle", "idle"))
    note = f"seconds; a lane a slice{some}"
    if _kind_of_lanes(trace) == "lanes":
        note = f"seconds; a lane a slice, or the devices of other calls{some}"
    return Chart(f"Step {trace.step:,}", note, svg, legend)


def charts(rows: list[Row]) -> list[Chart]:
    """Draw idle time and moves by step, if there are any."""
    return [
        Chart(title, note, line_chart(title, line))
        for key, title, note in SLICE_CHARTS
        if (line := series(rows, key, title)).values.any()
    ]


def words(trace: Trace) -> str:
    """Describe the idle share, and the moves between slices."""
    whole = len(trace.lanes) * float(trace.ended.max()) or 1.0
    idle = 1.0 - float((trace.ended - trace.began).sum()) / whole
    moved = _moved(trace) or "no sample moved"
    kind = _kind_of_lanes(trace)
    return f"{len(trace.lanes):,} {kind}, idle for {share(idle, 1.0)} of the time; {moved}."


def busy(part: Trace, edges: np.ndarray) -> Busy:
    """Return the work of one slice between `edges` [columns + 1]."""
    kinds = {kind: part.kind == kind for kind in SPAN_KINDS}
    ones = np.ones(len(part))
    seconds = {kind: _within(part, chosen, ones, edges) for kind, chosen in kinds.items()}
    row_seconds = _within(part, kinds["generate"], part.rows, edges)
    rows = row_seconds / np.maximum(seconds["generate"], 1e-12)
    idle = np.diff(edges) - sum(seconds.values())
    stages = [seconds[kind] for kind in ("generate", "inference", "training")]
    return Busy(*stages, idle=np.maximum(idle, 0.0), rows=rows)


def _lanes(trace: Trace, shown: np.ndarray, right: float, bounds: list[int]) -> list[Lane]:
    """Return the lanes of these slices, with the finest columns that keep the picture small."""
    parts = [trace.where(trace.lane == index) for index in shown]

    def bars(columns: int) -> list[list[tuple[str, float, float]]]:
        edges = np.linspace(0.0, right, columns + 1)
        return [_bars(busy(part, edges), edges, bounds) for part in parts]

    def marks(columns: int) -> list[list[float]]:
        came = [part.began[part.kind == "exchange"] for part in parts]
        return [
            (np.unique((columns * at / right).round()) * right / columns).tolist() for at in came
        ]

    edges = np.linspace(0.0, right, min(max(1, TIPS // len(shown)), LANE_TIPS) + 1)
    places = list(itertools.pairwise(edges.tolist()))
    columns = zip(shown, parts, _fitting(bars, BARS), _fitting(marks, MARKS), strict=True)
    lanes = []
    for index, part, own_bars, own_marks in columns:
        seen = busy(part, edges)
        tips = [
            (_tip(part, trace.lanes[index], column, seen=seen, left=start, right=end), start, end)
            for column, (start, end) in enumerate(places)
        ]
        idle = busy(part, np.array([0.0, right])).idle[0]
        lanes.append(
            Lane(
                name=trace.lanes[index].rpartition(" ")[2],
                bars=own_bars,
                tips=tips,
                marks=own_marks,
                end=share(idle, right),
            )
        )
    return lanes


def _fitting(draw: Callable[[int], list[list]], most: int) -> list[list]:
    """Draw in MOST_COLUMNS, or half of that and so on, until the total is within the limit."""
    columns = MOST_COLUMNS
    while sum(map(len, drawn := draw(columns))) > most and columns > 1:
        columns //= 2
    return drawn


def _within(part: Trace, chosen: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return [columns] weighted seconds of the chosen spans in each column."""
    began = part.began[chosen]
    ended = part.ended[chosen]
    if not len(began):
        return np.zeros(len(edges) - 1)
    so_far = np.cumsum((ended - began) * weights[chosen])
    knots = np.stack([began, ended], 1).reshape(-1)
    values = np.stack([so_far - (ended - began) * weights[chosen], so_far], 1).reshape(-1)
    return np.diff(np.interp(edges, knots, values))


def _bars(seen: Busy, edges: np.ndarray, bounds: list[int]) -> list[tuple[str, float, float]]:
    """Return (class, left, right) of runs of equal columns.

    There is no bar for columns in which a lane was mostly idle.
    """
    shade = np.searchsorted(bounds, np.minimum(seen.rows, bounds[-1]) - 1e-6)
    kind = np.where(seen.inference > seen.generate, len(bounds), shade)
    kind = np.where(seen.training > seen.inference + seen.generate, len(bounds) + 1, kind)
    busy = seen.inference + seen.generate + seen.training
    kind = np.where(busy < np.diff(edges) / 2, -1, kind)
    starts = np.flatnonzero(np.diff(kind, prepend=-2))
    runs = itertools.pairwise([*starts.tolist(), len(kind)])
    names = [*_classes(bounds), "inference", "training"]
    return [(names[kind[a]], float(edges[a]), float(edges[b])) for a, b in runs if kind[a] >= 0]


def _classes(bounds: list[int]) -> list[str]:
    """Return the class of each shade: the fullest always has the same colour."""
    return [f"rows-{ROW_SHADES - len(bounds) + index}" for index in range(len(bounds))]


def _tip(part: Trace, lane: str, column: int, seen: Busy, left: float, right: float) -> str:
    """Describe the work of a lane from `left` to `right`, one drawn column."""
    whole = right - left
    lines = [f"{lane}, {axis_number(left, whole)} to {axis_number(right, whole)} s"]
    inside = part.where((part.began < right) & (part.ended > left))
    if seen.generate[column] > 0:
        names, counts = np.unique(inside.name[inside.kind == "generate"], return_counts=True)
        most = names[np.argsort(-counts, kind="stable")][:TIP_STRATEGIES]
        rows = reading(float(seen.rows[column]))
        lines.append(f"{rows} rows, {', '.join(map(strategy_label, most))}")
    for kind in ("inference", "training"):
        seconds = getattr(seen, kind)[column]
        if seconds > 0:
            calls = dict.fromkeys(inside.name[inside.kind == kind])
            lines.append(f"{', '.join(calls).replace('_', ' ')} {share(seconds, whole)}")
    if came := _moved(part.where((part.began >= left) & (part.began < right)), "came"):
        lines.append(came)
    lines.append(f"idle {share(seen.idle[column], whole)}")
    return "\n".join(lines)


def _kind_of_lanes(trace: Trace) -> str:
    """Name the kind of the lanes: slices, if all are generation's."""
    return "slices" if all(name.startswith("slice ") for name in trace.lanes) else "lanes"


def _moved(part: Trace, word: str = "moved") -> str:
    """Return '3 samples moved with caches of 1.2 MB'; '' without moves."""
    exchanges = part.kind == "exchange"
    count = int(part.rows[exchanges].sum())
    if not count:
        return ""
    amount = volume(float(part.amount[exchanges].sum()))
    return f"{count:,} sample{'s' * (count != 1)} {word} with caches of {amount}"
