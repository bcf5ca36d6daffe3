"""Sum the predictions and results of rounds, by strategy and by live rows."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.types import Strategy

RoundCounts = dict[str, float]  # sums over rounds, by name
# by strategy and live rows, rounded up to a power of two
StrategyCounts = dict[tuple[Strategy, int], RoundCounts]

# The figures of rounds in a row of `rows`, besides `live` and `strategy`. The timed ones are of the
# rounds whose time is known, so that predictions and results are comparable.
COUNTS = ("rounds", "live_rows", "tokens", "accepted")
TIMED = ("timed_rounds", "seconds", "timed_tokens", "predicted_tokens", "predicted_seconds")


def bucket(live: int) -> int:
    """Round live rows (1 or more) up to a power of two."""
    return 1 << (live - 1).bit_length()


def add(
    counts: StrategyCounts, report: RoundReport, tokens: float, seconds: float, timed: bool
) -> None:
    """Count a round with predicted `tokens` and `seconds`, if any row gained tokens.

    timed: whether its measured time counts, if the report has one.
    """
    if not report.live:
        return
    figures = dict(
        rounds=1,
        live_rows=report.live,
        tokens=report.tokens,
        accepted=report.accepted,
        drafted=report.drafted,
        context=report.context,
    )
    if timed and report.seconds is not None:
        figures |= dict(
            timed_rounds=1,
            seconds=report.seconds,
            timed_tokens=report.tokens,
            predicted_tokens=tokens,
            predicted_seconds=seconds,
        )
    place = report.strategy, bucket(report.live)
    counts[place] = total([counts.get(place, {}), figures])


def merged(one: StrategyCounts, other: StrategyCounts) -> StrategyCounts:
    """Return the sums of the counts of two stages or more, place by place."""
    return {place: total([one.get(place, {}), other.get(place, {})]) for place in one | other}


def total(counts: Iterable[Mapping[str, float]]) -> RoundCounts:
    """Return the sum of counts, name by name; 0 for a name that none has."""
    sums: RoundCounts = collections.defaultdict(int)
    for figures in counts:
        for name, figure in figures.items():
            sums[name] += figure
    return sums


def ratio(above: float, below: float) -> float:
    """Divide two sums; return 0 if the divisor is 0."""
    return float(above / below) if below else 0.0


def rows(counts: StrategyCounts) -> list[dict[str, Any]]:
    """List one row for each strategy at each number of live rows, fewest first.

    A row has names, the figures of `COUNTS`, and those of `TIMED` if any round was timed.
    """
    table = []
    for (strategy, live), sums in counts.items():
        names = {"live": live, "strategy": trees.name_of(strategy), "drafter": strategy.drafter}
        figures = {name: sums[name] for name in COUNTS + TIMED if name in sums}
        table.append(names | {"drafts": len(strategy.parents)} | figures)
    return sorted(
        table, key=lambda row: (row["live"], row["drafter"], row["drafts"], row["strategy"])
    )


def state(counts: StrategyCounts) -> list[list]:
    """Return all of the counts as JSON values, for a checkpoint."""
    return [
        [trees.name_of(strategy), live, dict(sums)] for (strategy, live), sums in counts.items()
    ]


def restore(saved: list[list]) -> StrategyCounts:
    """Return the counts that `state` saved."""
    return {(trees.parse(name), live): dict(sums) for name, live, sums in saved}
