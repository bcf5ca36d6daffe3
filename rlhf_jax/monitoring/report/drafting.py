"""The report's section on drafting: what was chosen at how many live rows, and whether what was
predicted came true.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
from markupsafe import Markup

from rlhf_jax.monitoring.report.charts import (
    Chart,
    line_chart,
    lines_chart,
    share_chart,
    stacked_chart,
)
from rlhf_jax.monitoring.report.run import THIRDS, Row, RunRecord, Series, series
from rlhf_jax.monitoring.report.scales import reading, share

# as a reader calls them
DRAFTERS = {"none": "plain", "lookup": "lookup", "replay": "replay", "model": "model"}
# drafts up to which a strategy has the first, second and third shade of its drafter's colour
SHADES = (2, 4, 8)
# strategies that the table and a bar's tip name; the others count together
NAMED = 12
SPOKEN = 6
# (key, title, what it counts) of what drafts bring.
GAINS = (
    ("generation/tokens_per_round", "Tokens per round", "of a row; plain decoding has 1"),
    ("generation/acceptance", "Draft acceptance", "share of drafted tokens"),
)
DRAFTING_KEYS = (
    "strategy/share_",
    "strategy/acceptance_",
    "drafter/acceptance",
    "drafter/version",
    "drafter/behind",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table: a strategy, how often it was played, and what it gave; '—' for what was
    not measured.
    """

    label: str
    name: str
    rounds: str
    share: str
    tokens_per_row: str
    predicted: str  # tokens a second of timed rounds
    realised: str
    ratio: str  # realised over predicted


def charts(run: RunRecord) -> list[Chart]:
    """Strategies by live rows, over all steps and in the first and last third; drafters and
    acceptance by step.
    """
    drawn = [_by_live_rows("Strategies by live rows", run.strategies, run.strategies)]
    parts = [[row for row in run.strategies if row["third"] == third] for third in (0, THIRDS - 1)]
    if all(parts):
        titles = "First third of the steps", "Last third of the steps"
        drawn += [
            _by_live_rows(title, part, run.strategies)
            for title, part in zip(titles, parts, strict=True)
        ]
    gains = [
        Chart(title, note, Markup(line_chart(title, series(run.metrics, key))))
        for key, title, note in GAINS
    ]
    found = [*drawn, _shares(run.metrics), _acceptance(run.metrics), *gains, _student(run.metrics)]
    return [chart for chart in found if chart.svg]


def drafts(run: RunRecord) -> bool:
    """Whether there is anything for this section: a strategy was chosen, or a student learned."""
    return bool(run.strategies or series(run.metrics, "drafter/acceptance"))


def table(rows: list[Row]) -> list[Outcome]:
    """What each strategy was predicted to give and gave, the most played first; rare ones
    together.
    """
    sums = _summed(rows, lambda row: (row["drafter"], row["drafts"], row["strategy"]))
    played = sorted(sums.items(), key=lambda item: -item[1]["rounds"])
    every = sum(figures["rounds"] for figures in sums.values())
    found = [_outcome(_label(*key), key[-1], figures, every) for key, figures in played[:NAMED]]
    if rare := [figures for _, figures in played[NAMED:]]:
        found.append(_outcome(f"{len(rare)} others", "", sum(rare, collections.Counter()), every))
    return found


def _by_live_rows(title: str, rows: list[Row], every: list[Row]) -> Chart:
    """A bar for each number of live rows that the run had, a layer for each drafter and size of
    draft.
    """
    sizes = sorted({row["live"] for row in every})
    rounds = _summed(rows, lambda row: row["live"])
    layered = _summed(rows, lambda row: (row["live"], _kind(row)))
    kinds = [f"{drafter} shade-{shade}" for drafter in DRAFTERS for shade in range(len(SHADES) + 1)]
    layers = [
        (k, np.array([_per_cent(layered[n, k]["rounds"], rounds[n]["rounds"]) for n in sizes]))
        for k in kinds
    ]
    tips = [_tip(size, [row for row in rows if row["live"] == size]) for size in sizes]
    drawn = [(kind, shares) for kind, shares in layers if shares.any()]
    svg = share_chart(
        title, [f"{size}" for size in sizes], drawn, tips, height=260 if rows is every else 190
    )
    legend = tuple((drafter, f"{name} {part}") for drafter, name, part in _drafter_shares(rows))
    note = (
        "% of rounds, by live rows rounded up; fuller colour for longer drafts"
        if rows is every
        else ""
    )
    return Chart(title, note, Markup(svg), legend)


def _drafter_shares(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(drafter, what it is called, its share of all rounds) of those that drafted."""
    rounds = _summed(rows, lambda row: row["drafter"])
    every = sum(figures["rounds"] for figures in rounds.values())
    return [
        (key, name, share(rounds[key]["rounds"], every))
        for key, name in DRAFTERS.items()
        if key in rounds
    ]


def _tip(size: int, rows: list[Row]) -> str:
    sums = _summed(rows, lambda row: (row["drafter"], row["drafts"], row["strategy"]))
    played = sorted(
        ((figures["rounds"], _label(*key)) for key, figures in sums.items()), reverse=True
    )
    every = sum(rounds for rounds, _ in played)
    heading = (
        "1 live row"
        if size == 1
        else f"{size // 2 + 1} to {size} live rows"
        if size > 2
        else "2 live rows"
    )
    rare = sum(rounds for rounds, _ in played[SPOKEN:])
    named = [*played[:SPOKEN], *([(rare, f"{len(played) - SPOKEN} others")] if rare else [])]
    return "\n".join(
        [f"{heading}, {every:,.0f} rounds", *(f"{name} {share(n, every)}" for n, name in named)]
    )


def _shares(rows: list[Row]) -> Chart:
    found = [(key, [row for row in rows if f"strategy/share_{key}" in row]) for key in DRAFTERS]
    most = max((own for _, own in found), key=len)
    layers = [
        (key, series(own, f"strategy/share_{key}", DRAFTERS[key]))
        for key, own in found
        if len(own) == len(most)
    ]
    scaled = [Series(line.name, line.steps, 100 * line.values) for _, line in layers]
    kinds = [key for key, line in layers if line]
    title = "Drafters"
    svg = stacked_chart(title, scaled, kinds=kinds, say=lambda part: f"{part:.0f}%", whole=False)
    return Chart(
        title, "% of a step's rounds", Markup(svg), tuple((key, DRAFTERS[key]) for key in kinds)
    )


def _acceptance(rows: list[Row]) -> Chart:
    found = [
        (key, series(rows, f"strategy/acceptance_{key}", name)) for key, name in DRAFTERS.items()
    ]
    lines = [(key, line) for key, line in found if line]
    title = "Acceptance by drafter"
    note = "of a draft's first token, as the choice takes it"
    return Chart(
        title,
        note,
        Markup(lines_chart(title, lines)),
        tuple((key, line.name) for key, line in lines),
    )


def _student(rows: list[Row]) -> Chart:
    """The share of the policy's tokens that the student draws too, beside that of the student as it
    began.
    """
    keys = {
        "current": ("drafter/acceptance", "kept current"),
        "frozen": ("drafter/acceptance_frozen", "as it began"),
    }
    lines = [
        (kind, line) for kind, (key, name) in keys.items() if (line := series(rows, key, name))
    ]
    said = {name: series(rows, f"drafter/{name}") for name in ("version", "behind")}
    known = {name: line.values[-1] for name, line in said.items() if line}
    words = [f"version {known['version']:.0f}"] if "version" in known else []
    words += [f"{known['behind']:.0f} updates of the policy behind"] if "behind" in known else []
    note = ", ".join(["share of tokens drawn alike", *words])
    title = "Acceptance of the student"
    return Chart(
        title,
        note,
        Markup(lines_chart(title, lines)),
        tuple((kind, line.name) for kind, line in lines),
    )


def _outcome(label: str, name: str, figures: collections.Counter, every: float) -> Outcome:
    predicted = _ratio(figures["predicted_tokens"], figures["predicted_seconds"])
    realised = _ratio(figures["timed_tokens"], figures["seconds"])
    return Outcome(
        label=label,
        name=name,
        rounds=f"{figures['rounds']:,.0f}",
        share=share(figures["rounds"], every),
        tokens_per_row=f"{_ratio(figures['tokens'], figures['live_rows']):.2f}",
        predicted=reading(predicted) if predicted else "—",
        realised=reading(realised) if realised else "—",
        ratio=f"{realised / predicted:.2f}" if predicted else "—",
    )


def _summed(rows: Iterable[Row], key) -> dict:
    """The numbers of rows of the same `key`, added up by name."""
    sums = collections.defaultdict(collections.Counter)
    for row in rows:
        sums[key(row)].update(
            {name: value for name, value in row.items() if not isinstance(value, str)}
        )
    return sums


def _kind(row: Row) -> str:
    return f"{row['drafter']} shade-{sum(row['drafts'] > most for most in SHADES)}"


def _label(drafter: str, drafts: int, name: str) -> str:
    """A strategy's name; the parents of a tree are not spelled out."""
    return f"{drafter}-tree of {drafts}" if ":" in name else name


def _per_cent(part: float, whole: float) -> float:
    return 100 * _ratio(part, whole)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
