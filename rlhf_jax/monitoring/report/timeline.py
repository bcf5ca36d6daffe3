"""The report's picture of the latest step's timeline: a lane for each slice, and what it did
when.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from markupsafe import Markup

from rlhf_jax.monitoring.report.charts import Chart, Lane, lanes_chart, line_chart
from rlhf_jax.monitoring.report.run import Row, RunRecord, Trace, series
from rlhf_jax.monitoring.report.scales import axis_number, reading, share, volume

# (key, title, what it counts) of the charts by step.
CHARTS = (
    ("generation/idle_share", "Idle time", "share of the slices' time in generation"),
    ("generation/moved_bytes", "Moved between slices", "bytes of caches"),
)
SLICE_KEYS = tuple(key for key, *_ in CHARTS)
SHADES = 5  # of the colour of rounds: most rows and half of that, half of those and so on
# that are drawn of a timeline, at most,
COLUMNS = 600
BARS = 1400
MARKS = 500
TIPS = 192
MOST_SLICES = 128
MOST_TIPS = 48  # and on a lane
SPOKEN = 3  # strategies that a tip names


@dataclasses.dataclass(frozen=True)
class Busy:
    """Seconds [columns] of a slice in each column of the picture, and rows times seconds."""

    generate: np.ndarray
    inference: np.ndarray
    idle: np.ndarray
    row_seconds: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[columns] live rows while it generated."""
        return self.row_seconds / np.maximum(self.generate, 1e-12)


def picture(run: RunRecord) -> Chart | None:
    """The timeline of the latest step that left one; None of a single slice that only generated."""
    trace = run.trace
    if trace is None or not len(trace) or (trace.slices == 1 and "inference" not in trace.kind):
        return None
    shown = np.unique(
        np.linspace(0, trace.slices - 1, min(trace.slices, MOST_SLICES)).round().astype(int)
    )
    some = "" if len(shown) == trace.slices else f", {len(shown)} of {trace.slices:,} slices"
    right = float(trace.ended.max()) or 1e-6
    bounds = _bounds(trace)
    svg = lanes_chart(
        f"What each slice did in step {trace.step}",
        _lanes(trace, shown, right, bounds),
        right,
        "idle",
    )
    return Chart(
        f"Step {trace.step:,}",
        f"seconds; a lane a slice{some}",
        Markup(svg),
        _legend(trace, bounds),
    )


def charts(rows: list[Row]) -> list[Chart]:
    """Idle time and what was moved by step, where there was any."""
    lines = [(title, note, series(rows, key, title)) for key, title, note in CHARTS]
    return [
        Chart(title, note, Markup(line_chart(title, line)))
        for title, note, line in lines
        if line.values.any()
    ]


def words(trace: Trace) -> str:
    """The idle share, and what moved between slices."""
    idle = 1.0 - float((trace.ended - trace.began).sum()) / (
        trace.slices * float(trace.ended.max()) or 1.0
    )
    slices = "1 slice" if trace.slices == 1 else f"{trace.slices:,} slices"
    moved = _moved(trace)
    moves = "" if trace.slices == 1 else f"; {moved or 'no sample moved'}"
    return f"{slices}, idle for {share(idle, 1.0)} of the time{moves}."


def busy(part: Trace, edges: np.ndarray) -> Busy:
    """What one slice did between `edges` [columns + 1]."""
    kinds = {kind: part.kind == kind for kind in ("generate", "exchange", "inference")}
    ones = np.ones(len(part))
    seconds = {kind: _within(part, chosen, ones, edges) for kind, chosen in kinds.items()}
    rows = _within(part, kinds["generate"], part.rows, edges)
    idle = np.diff(edges) - sum(seconds.values())
    return Busy(seconds["generate"], seconds["inference"], np.maximum(idle, 0.0), rows)


def _lanes(trace: Trace, shown: np.ndarray, right: float, bounds: list[int]) -> list[Lane]:
    """The lanes of these slices, in columns as fine as keeps the picture small."""
    parts = [trace.where(trace.slice == index) for index in shown]

    def bars(columns: int) -> list[list[tuple[str, float, float]]]:
        edges = np.linspace(0.0, right, columns + 1)
        return [_bars(busy(part, edges), edges, bounds) for part in parts]

    def marks(columns: int) -> list[list[float]]:
        came = [part.began[part.kind == "exchange"] for part in parts]
        return [
            (np.unique((columns * at / right).round()) * right / columns).tolist() for at in came
        ]

    edges = np.linspace(0.0, right, min(max(1, TIPS // len(shown)), MOST_TIPS) + 1)
    tips = [_tips(part, index, edges) for index, part in zip(shown, parts, strict=True)]
    ends = [share(busy(part, np.array([0.0, right])).idle[0], right) for part in parts]
    rows = zip(
        map(str, shown), _fitting(bars, BARS), tips, _fitting(marks, MARKS), ends, strict=True
    )
    return [Lane(*row) for row in rows]


def _fitting(draw: Callable[[int], list[list]], most: int) -> list[list]:
    """What is drawn in COLUMNS, or in half of that, half of those and so on, until it is at most so
    much in all.
    """
    columns = COLUMNS
    while sum(map(len, found := draw(columns))) > most and columns > 1:
        columns //= 2
    return found


def _within(part: Trace, chosen: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[columns] weighted seconds of the chosen spans in each column."""
    began = part.began[chosen]
    ended = part.ended[chosen]
    if not len(began):
        return np.zeros(len(edges) - 1)
    so_far = np.cumsum((ended - began) * weights[chosen])
    knots = np.stack([began, ended], 1).reshape(-1)
    values = np.stack([so_far - (ended - began) * weights[chosen], so_far], 1).reshape(-1)
    return np.diff(np.interp(edges, knots, values))


def _bounds(trace: Trace) -> list[int]:
    """Most rows of each shade, the lightest first: powers of two up to the most live rows that
    there were.
    """
    most = int(trace.rows[trace.kind == "generate"].max(initial=1))
    top = (most - 1).bit_length()
    return [1 << power for power in range(max(0, top - SHADES + 1), top + 1)]


def _bars(seen: Busy, edges: np.ndarray, bounds: list[int]) -> list[tuple[str, float, float]]:
    """(class, left, right) of runs of columns alike; none where a slice did neither for most of a
    column.
    """
    shade = np.searchsorted(bounds, np.minimum(seen.rows, bounds[-1]) - 1e-6)
    kind = np.where(seen.inference > seen.generate, len(bounds), shade)
    kind = np.where(seen.inference + seen.generate < np.diff(edges) / 2, -1, kind)
    starts = np.flatnonzero(np.diff(kind, prepend=-2))
    runs = itertools.pairwise([*starts.tolist(), len(kind)])
    names = [*_classes(bounds), "inference"]
    return [(names[kind[a]], float(edges[a]), float(edges[b])) for a, b in runs if kind[a] >= 0]


def _classes(bounds: list[int]) -> list[str]:
    """The class of each shade: the fullest is always of the same colour."""
    return [f"rows-{SHADES - len(bounds) + index}" for index in range(len(bounds))]


def _tips(part: Trace, index: int, edges: np.ndarray) -> list[tuple[str, float, float]]:
    """(text, left, right) of what a slice did between two edges [n + 1]."""
    seen = busy(part, edges)
    ends = itertools.pairwise(edges.tolist())
    return [
        (_tip(part, index, column, seen, *places), *places) for column, places in enumerate(ends)
    ]


def _tip(part: Trace, index: int, column: int, seen: Busy, left: float, right: float) -> str:
    whole = right - left
    inside = (part.began < right) & (part.ended > left)
    lines = [f"slice {index}, {axis_number(left, whole)} to {axis_number(right, whole)} s"]
    if seen.generate[column] > 0:
        names, counts = np.unique(part.name[inside & (part.kind == "generate")], return_counts=True)
        most = names[np.argsort(-counts, kind="stable")][:SPOKEN]
        lines.append(f"{reading(float(seen.rows[column]))} rows, {', '.join(map(_spoken, most))}")
    lines += (
        [f"inference {share(seen.inference[column], whole)}"] if seen.inference[column] > 0 else []
    )
    lines += (
        [came]
        if (came := _moved(part.where((part.began >= left) & (part.began < right)), "came"))
        else []
    )
    lines.append(f"idle {share(seen.idle[column], whole)}")
    return "\n".join(lines)


def _spoken(name: str) -> str:
    """A strategy's name; the parents of a tree are not spelled out."""
    return f"{name.split('-')[0]}-tree of {name.count(',') + 1}" if ":" in name else name


def _moved(part: Trace, word: str = "moved") -> str:
    """'3 samples moved with caches of 1.2 MB'; '' of no exchange."""
    exchanges = part.kind == "exchange"
    count = int(part.rows[exchanges].sum())
    amount = float(part.amount[exchanges].sum())
    return (
        f"{count:,} sample{'s' * (count != 1)} {word} with caches of {volume(amount)}"
        if count
        else ""
    )


def _legend(trace: Trace, bounds: list[int]) -> tuple[tuple[str, str], ...]:
    """(class, text) of what the picture shows."""
    least = [1, *(bound + 1 for bound in bounds)]
    sizes = [
        f"{a}–{b} rows" if a < b else f"{b} row{'s' * (b > 1)}"
        for a, b in zip(least, bounds, strict=False)
    ]
    others = (("inference", "inference", "inference"), ("exchange", "mark", "samples came"))
    found = [(kind, text) for event, kind, text in others if event in trace.kind]
    return (*zip(_classes(bounds), sizes, strict=True), *found, ("idle", "idle"))
