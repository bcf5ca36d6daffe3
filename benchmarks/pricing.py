"""Rounds priced by one measured table: the cost of a run's choices, independent of other load.

All calls are timed in turn, a round each, within the same roll-outs, so that they share the
machine's drift. A price is the sum of the medians over the rounds that a run took.
"""

from __future__ import annotations

import collections
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import candidates, roofline
from rlhf_jax.generation.strategy.acceptance import Observations
from rlhf_jax.generation.strategy.predict import Choice, Situation
from rlhf_jax.types import Strategy

ROUNDS = 7  # of a call that are to be timed
TRIES = 3  # most rounds run, on average, for one whose time is known
UNFED = (trees.PLAIN,) * 4  # rounds after which a draft model has something to catch up on


class Call(NamedTuple):
    """The facts that determine the time of a round."""

    rows: int
    nodes: int  # a row that the target verifies
    steps: int  # draft-model calls
    fed: int  # nodes a row that they are fed
    grid: int  # nodes of a row that attention has room for
    chunks: int  # draft-model calls that only catch up


Table = dict[Call, list[float]]  # seconds of each round that was timed


class Forced:
    """Replaces a selector: runs `turns` one after the other, each at `rows` rows, and keeps the
    reports.

    A round whose time is not known is run again, `spare` times in total; elsewhere decoding is
    plain.
    """

    def __init__(self, turns: Iterable[Strategy], rows: int, spare: int = 0):
        self.turns = collections.deque(turns)
        self.rows = rows
        self.spare = spare
        self.reports: list[RoundReport] = []

    def choose(self, situation: Situation) -> Choice:
        """The next turn."""
        mine = bool(self.turns) and situation.rows == self.rows
        return Choice(
            self.turns.popleft() if mine else trees.PLAIN, 1.0, 1.0, None, "told", 1.0, 1.0
        )

    def observe_round(self, report: RoundReport) -> None:
        """Keep the report."""
        self.reports.append(report)
        if report.seconds is None and report.rows == self.rows and self.spare > 0:
            self.turns.append(report.strategy)
            self.spare -= 1


Play = Callable[[Forced], object]  # rolls out as many samples as the rows that it forces


def compile_rounds(speculative_round: Play, strategies: Iterable[Strategy], rows: int) -> None:
    """Run each strategy once."""
    forced = Forced(strategies, rows)
    while forced.turns:
        speculative_round(forced)


def measure(
    table: Table, speculative_round: Play, strategies: Iterable[Strategy], rows: int
) -> None:
    """Time the calls of compiled strategies at `rows` rows that are missing in the table, ROUNDS
    rounds each."""
    one_a_call = {Call(rows, *figures(strategy), 0): strategy for strategy in strategies}
    missing = [strategy for call, strategy in one_a_call.items() if call not in table]
    drafting = [strategy for strategy in missing if strategy.drafter == "model"]
    turns = (*missing, *UNFED, drafting[0]) if drafting else tuple(missing)
    forced = Forced(turns * ROUNDS, rows, spare=(TRIES - 1) * ROUNDS * len(turns))
    while forced.turns:
        speculative_round(forced)
    for report in forced.reports:
        if report.seconds is not None:
            table.setdefault(call_of(report), []).append(report.seconds)


@functools.cache
def figures(strategy: Strategy) -> roofline.Call:
    """The call of a round by the strategy."""
    return candidates.build([strategy]).calls.each[0]


def call_of(report: RoundReport) -> Call:
    """The call of a round."""
    call = figures(report.strategy)
    behind = call.steps and report.draft_lag > roofline.FREE_LAG
    return Call(
        report.rows, *call, chunks=math.ceil(report.draft_lag / roofline.CATCH_UP) if behind else 0
    )


def price(table: Table, reports: Iterable[RoundReport]) -> float | None:
    """Seconds of all rounds by the table; None if one is of a call that was never timed."""
    prices = [
        (seconds(table, call), count)
        for call, count in collections.Counter(map(call_of, reports)).items()
    ]
    return (
        None
        if any(one is None for one, _ in prices)
        else sum(one * count for one, count in prices if one)
    )


def seconds(table: Table, call: Call) -> float | None:
    """Median seconds of a call. A call that was not timed while it caught up is one without, plus
    the catch-up."""
    if call in table:
        return statistics.median(table[call])
    if not call.chunks:
        return None
    kept_up = seconds(table, call._replace(chunks=0))
    chunk = catch_up(table, call.rows)
    return None if kept_up is None or chunk is None else kept_up + call.chunks * chunk


def catch_up(table: Table, rows: int) -> float | None:
    """Seconds of one call of the draft model that only catches up."""
    pairs = [
        (call, call._replace(chunks=0)) for call in table if call.rows == rows and call.chunks == 1
    ]
    extra = [
        statistics.median(table[call]) - statistics.median(table[base])
        for call, base in pairs
        if base in table
    ]
    return max(0.0, statistics.median(extra)) if extra else None


def ceilings(
    table: Table, rows: int, strategies: Iterable[Strategy], tokens: dict[str, float]
) -> dict:
    """Best of tokens a row's round over relative cost, plain being 1: were every draft right, and
    as measured.

    tokens: measured tokens of a row's round, by strategy name.
    """
    plain = seconds(table, Call(rows, *figures(trees.PLAIN), 0))
    certain = [1.0]
    measured = [1.0]
    for strategy in strategies:
        own = seconds(table, Call(rows, *figures(strategy), 0))
        if plain is not None and own is not None:
            certain.append((1 + int(trees.depths(strategy).max())) * plain / own)
            measured.append(tokens.get(trees.name_of(strategy), 0.0) * plain / own)
    return {"all_right": max(certain), "as_accepted": max(measured)}


def accepted(observations: Sequence[Observations]) -> list[float | None]:
    """By depth, the share of likeliest drafts that were right where all before them were; None
    if none was seen.
    """
    tried = sum((one.offered > 0).sum(axis=0) for one in observations)
    right = sum(((one.offered > 0) & (one.ranks == 0)).sum(axis=0) for one in observations)
    pairs = zip(np.atleast_1d(right).tolist(), np.atleast_1d(tried).tolist(), strict=True)
    return [hits / seen if seen else None for hits, seen in pairs]


def as_rows(table: Table) -> list[dict]:
    """The table for JSON: one row a call."""
    return [
        call._asdict() | {"seconds": statistics.median(timed), "rounds": len(timed)}
        for call, timed in sorted(table.items())
    ]
