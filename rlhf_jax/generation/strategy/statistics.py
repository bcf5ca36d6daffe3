"""What rounds were predicted to give and what they gave, summed by strategy and by live rows."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.types import Strategy

GenerationCounts = dict[str, float]  # sums over rounds, by name
# by strategy and live rows, rounded up to a power of two
Tallies = dict[tuple[Strategy, int], GenerationCounts]

# What a row of `rows` says of its rounds, beside `live` and `strategy`. The timed figures are of
# the rounds whose time is known, so that what was predicted of them compares with what they gave.
COUNTS = ("rounds", "live_rows", "tokens", "accepted")
TIMED = ("timed_rounds", "seconds", "timed_tokens", "predicted_tokens", "predicted_seconds")


def bucket(live: int) -> int:
    """Live rows (1 or more), rounded up to a power of two."""
    return 1 << (live - 1).bit_length()


def add(tallies: Tallies, report: RoundReport, tokens: float, seconds: float, timed: bool) -> None:
    """Count a round of which `tokens` and `seconds` were predicted; one that gave no row anything
    is not one.

    `timed`: its measured time counts, where the report has one.
    """
    if not report.live:
        return
    figures = dict(rounds=1, live_rows=report.live, tokens=report.tokens, accepted=report.accepted)
    figures |= dict(drafted=report.drafted, context=report.context)
    if timed and report.seconds is not None:
        figures |= dict(timed_rounds=1, seconds=report.seconds, timed_tokens=report.tokens)
        figures |= dict(predicted_tokens=tokens, predicted_seconds=seconds)
    place = report.strategy, bucket(report.live)
    tallies[place] = total([tallies.get(place, {}), figures])


def merged(one: Tallies, other: Tallies) -> Tallies:
    """The sums of two stages or more, place by place."""
    return {place: total([one.get(place, {}), other.get(place, {})]) for place in one | other}


def total(tallies: Iterable[Mapping[str, float]]) -> GenerationCounts:
    """The sum of tallies, name by name; 0 for a name that none has."""
    sums: GenerationCounts = collections.defaultdict(int)
    for tally in tallies:
        for name, figure in tally.items():
            sums[name] += figure
    return sums


def ratio(above: float, below: float) -> float:
    """Of two sums, 0 where there is nothing to divide by."""
    return float(above / below) if below else 0.0


def rows(tallies: Tallies) -> list[dict[str, Any]]:
    """One row for each strategy at each number of live rows, fewest first: names, COUNTS, and TIMED
    ones if any.
    """
    found = []
    for (strategy, live), tally in tallies.items():
        names = {"live": live, "strategy": trees.name_of(strategy), "drafter": strategy.drafter}
        figures = {name: tally[name] for name in COUNTS + TIMED if name in tally}
        found.append(names | {"drafts": len(strategy.parents)} | figures)
    return sorted(
        found, key=lambda row: (row["live"], row["drafter"], row["drafts"], row["strategy"])
    )


def state(tallies: Tallies) -> list[list]:
    """All of it as JSON values, for a checkpoint."""
    return [
        [trees.name_of(strategy), live, dict(tally)] for (strategy, live), tally in tallies.items()
    ]


def restore(saved: list[list]) -> Tallies:
    """The tallies that `state` saved."""
    return {(trees.parse(name), live): dict(tally) for name, live, tally in saved}
