"""Draw the report's section on drafting: choices, predictions and results."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np

from rlhf_jax.report.charts import Chart, line_chart, lines_chart, share_chart, stacked_chart
from rlhf_jax.report.run import Row, RunRecord, Series, series
from rlhf_jax.report.scales import reading, share, strategy_label

K = TypeVar("K", bound=Hashable)

# Drafters with a colour of their own, in drawing order; "none" is plain.
COLOURED = ("none", "lookup", "replay", "model")
OTHER_COLOURS = 4  # shared by all other drafters of a run
# Numbers of drafts up to which a strategy has the three shades of its drafter's colour.
SHADE_DRAFTS = (2, 4, 8)
NAMED = 12  # strategies in the table; the others count together
TIP_NAMES = 6  # strategies in a bar's tip; the others count together
# (key, title, unit) of the gains of drafts.
GAINS = (
    ("generation/tokens_per_round", "Tokens per round", "of a row; plain decoding has 1"),
    ("generation/acceptance", "Draft acceptance", "share of drafted tokens"),
)
# Prefixes of this section's metrics.
DRAFTING_KEYS = (
    "strategy/share_",
    "strategy/acceptance_",
    "drafter/acceptance",
    "drafter/version",
    "drafter/behind",
)


def charts(run: RunRecord) -> list[Chart]:
    """Draw strategies by live rows, and drafters and acceptance by step."""
    kinds = drafter_kinds(run)
    drawn = [_by_live_rows(run.strategies, kinds), _shares(run.metrics, kinds)]
    lines = [
        (kind, series(run.metrics, f"strategy/acceptance_{name}", name))
        for name, kind in kinds.items()
    ]
    note = "of a draft's first token, as the choice takes it"
    drawn.append(lines_chart("Acceptance by drafter", note, lines))
    for key, title, note in GAINS:
        drawn.append(Chart(title, note, line_chart(title, series(run.metrics, key))))
    # The share of the policy's tokens that the student draws too, now and initially.
    lines = [
        ("current", series(run.metrics, "drafter/acceptance", "kept current")),
        ("frozen", series(run.metrics, "drafter/acceptance_frozen", "as it began")),
    ]
    words = ["share of tokens drawn alike"]
    if version := series(run.metrics, "drafter/version"):
        words.append(f"version {version.values[-1]:.0f}")
    if behind := series(run.metrics, "drafter/behind"):
        words.append(f"{behind.values[-1]:.0f} updates of the policy behind")
    drawn.append(lines_chart("Acceptance of the student", ", ".join(words), lines))
    return [chart for chart in drawn if chart.svg]


def drafts(run: RunRecord) -> bool:
    """Return whether this section has content: a round had drafts, or a student learned."""
    chosen = any(row["drafter"] != "none" for row in run.strategies)
    return chosen or bool(series(run.metrics, "drafter/acceptance"))


def drafter_kinds(run: RunRecord) -> dict[str, str]:
    """Return the colour class of each drafter in the run's files."""
    names = {row["drafter"] for row in run.strategies}
    for prefix in ("strategy/share_", "strategy/acceptance_"):
        names |= {
            key.removeprefix(prefix) for row in run.metrics for key in row if key.startswith(prefix)
        }
    others = sorted(names.difference(COLOURED))
    kinds = {name: name for name in COLOURED if name in names}
    return kinds | {name: f"other-{i % OTHER_COLOURS}" for i, name in enumerate(others)}


def table(rows: list[Row]) -> list[dict[str, str]]:
    """Return the predictions and results of each strategy, the most chosen first.

    Rare ones count together.
    """
    sums = _summed(rows, lambda row: (row["drafter"], row["drafts"], row["strategy"]))
    ranked = sorted(sums.items(), key=lambda item: -item[1]["rounds"])
    every = sum(figures["rounds"] for figures in sums.values())
    table_rows = [
        _outcome(strategy_label(key[-1]), key[-1], figures, every)
        for key, figures in ranked[:NAMED]
    ]
    if rare := [figures for _, figures in ranked[NAMED:]]:
        together = sum(rare, collections.Counter())
        table_rows.append(_outcome(f"{len(rare)} others", "", figures=together, every=every))
    return table_rows


def _by_live_rows(rows: list[Row], kinds: dict[str, str]) -> Chart:
    """Draw a bar for each number of live rows, with a layer for each drafter and size of draft."""

    def shaded(row: Row) -> tuple[str, int]:
        return row["drafter"], sum(row["drafts"] > most for most in SHADE_DRAFTS)

    title = "Strategies by live rows"
    sizes = sorted({row["live"] for row in rows})
    rounds = _summed(rows, lambda row: row["live"])
    layered = _summed(rows, lambda row: (row["live"], shaded(row)))
    layers = []
    for drafter, kind in kinds.items():
        for shade in range(len(SHADE_DRAFTS) + 1):
            shares = [
                100 * _ratio(layered[size, (drafter, shade)]["rounds"], rounds[size]["rounds"])
                for size in sizes
            ]
            if any(shares):
                layers.append((f"{kind} shade-{shade}", np.array(shares)))
    tips = [_tip(size, [row for row in rows if row["live"] == size]) for size in sizes]
    svg = share_chart(title, [f"{size}" for size in sizes], layers, tips=tips, height=260)

    drafted = _summed(rows, lambda row: row["drafter"])
    total = sum(figures["rounds"] for figures in drafted.values())
    legend = []
    for drafter, kind in kinds.items():
        if drafter in drafted:
            part = share(drafted[drafter]["rounds"], total)
            legend.append((kind, f"{_readable(drafter)} {part}"))
    note = "% of rounds, by live rows rounded up; fuller colour for longer drafts"
    return Chart(title, note, svg, tuple(legend))


def _tip(size: int, rows: list[Row]) -> str:
    """Describe the choices at up to `size` live rows, the most chosen first."""
    sums = _summed(rows, lambda row: (row["drafter"], row["drafts"], row["strategy"]))
    named = [(figures["rounds"], strategy_label(key[-1])) for key, figures in sums.items()]
    named.sort(reverse=True)
    every = sum(rounds for rounds, _ in named)
    rare = sum(rounds for rounds, _ in named[TIP_NAMES:])
    shown = named[:TIP_NAMES]
    if rare:
        shown.append((rare, f"{len(named) - TIP_NAMES} others"))
    heading = f"{size // 2 + 1} to {size} live rows"
    if size <= 2:
        heading = "1 live row" if size == 1 else "2 live rows"
    lines = [f"{name} {share(rounds, every)}" for rounds, name in shown]
    return "\n".join([f"{heading}, {every:,.0f} rounds", *lines])


def _readable(drafter: str) -> str:
    return "plain" if drafter == "none" else drafter


def _shares(rows: list[Row], kinds: dict[str, str]) -> Chart:
    """Draw each drafter's share of a step's rounds, for the drafters with the most steps."""
    by_drafter = [
        (name, [row for row in rows if f"strategy/share_{name}" in row]) for name in kinds
    ]
    most = max((len(own) for _, own in by_drafter), default=0)
    drawn = []
    layers = []
    for name, own in by_drafter:
        line = series(own, f"strategy/share_{name}", _readable(name))
        if len(own) == most and line:
            drawn.append(kinds[name])
            layers.append(Series(line.name, line.steps, 100 * line.values))
    title = "Drafters"
    svg = stacked_chart(title, layers, kinds=drawn, say=lambda part: f"{part:.0f}%", whole=False)
    legend = tuple((kind, line.name) for kind, line in zip(drawn, layers, strict=True))
    return Chart(title, "% of a step's rounds", svg, legend)


def _outcome(label: str, name: str, figures: collections.Counter, every: float) -> dict[str, str]:
    """Return the table's row of one strategy, given `every` rounds in total.

    Predicted and realised are tokens per second of timed rounds; '—' means not measured.
    """
    predicted = _ratio(figures["predicted_tokens"], figures["predicted_seconds"])
    realised = _ratio(figures["timed_tokens"], figures["seconds"])
    return {
        "label": label,
        "name": name,
        "rounds": f"{figures['rounds']:,.0f}",
        "share": share(figures["rounds"], every),
        "tokens_per_row": f"{_ratio(figures['tokens'], figures['live_rows']):.2f}",
        "predicted": reading(predicted) if predicted else "—",
        "realised": reading(realised) if realised else "—",
        "ratio": f"{realised / predicted:.2f}" if predicted else "—",
    }


def _summed(
    rows: Iterable[Row], key: Callable[[Row], K]
) -> collections.defaultdict[K, collections.Counter]:
    """Return the numbers of rows of the same `key`, added up by name."""
    sums = collections.defaultdict(collections.Counter)
    for row in rows:
        numbers = {name: value for name, value in row.items() if not isinstance(value, str)}
        sums[key(row)].update(numbers)
    return sums


def _ratio(above: float, below: float) -> float:
    """Return a ratio, 0 if the divisor is 0."""
    return above / below if below else 0.0
