"""Follow the rounds of a stage: expectations and results, summed by strategy and by live rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import acceptance
from rlhf_jax.generation.strategy.acceptance import Acceptance
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.types import Strategy

RoundCounts = dict[str, float]  # sums over rounds, by name
# by strategy and live rows, rounded up to a power of two
StrategyCounts = dict[tuple[Strategy, int], RoundCounts]

# The figures of rounds in a row of `rows`, besides `live` and `strategy`. The timed ones are of the
# rounds whose time is known, so that predictions and results are comparable.
COUNTS = ("rounds", "live_rows", "tokens", "accepted")
TIMED = ("timed_rounds", "seconds", "timed_tokens", "predicted_tokens", "predicted_seconds")

_MOST_PENDING = 8  # Pending rounds of a slice that are kept until their reports come.


def bucket(live: int) -> int:
    """Round live rows (1 or more) up to a power of two."""
    return 1 << (live - 1).bit_length()


def add(
    counts: StrategyCounts, report: RoundReport, tokens: float, seconds: float, timed: bool
) -> None:
    """Count a round, if any row gained tokens.

    tokens, seconds: those predicted for it, of all its live rows. timed: whether its measured time
    counts, if the report has one.
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
    key = report.strategy, bucket(report.live)
    counts[key] = total([counts.get(key, {}), figures])


def merged(first: StrategyCounts, second: StrategyCounts) -> StrategyCounts:
    """Return the sums of the counts of two stages, or of more in each, key by key."""
    return {key: total([first.get(key, {}), second.get(key, {})]) for key in first | second}


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


@dataclasses.dataclass(frozen=True)
class ExpectedRound:
    """Hold the expectations for a round."""

    strategy: Strategy
    tokens: float  # of a live row
    drafts: float  # accepted ones of a live row, before calibration
    seconds: float  # of the round


@dataclasses.dataclass
class StageRounds:
    """Hold the figures of the running stage."""

    counts: StrategyCounts = dataclasses.field(default_factory=dict)  # results of its rounds
    # of its situations, summed: by drafter [2, CLASSES] rows by seen prompt and confidence, and
    # [BANDS] rows by band of their responses
    classes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    bands: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(acceptance.BANDS))
    elapsed: float = 0.0  # predicted seconds of the chosen strategies
    lost: float = 0.0  # of these, the predicted loss of probes against the best strategy
    switches: int = 0
    last: dict[int, Strategy] = dataclasses.field(default_factory=dict)  # by slice
    # by slice: the `ExpectedRound`s whose reports have not come
    pending: dict[int, collections.deque[ExpectedRound]] = dataclasses.field(default_factory=dict)

    def note(
        self,
        situation: Situation,
        strategy: Strategy,
        tokens: float,
        seconds: float,
        calibration: float,
    ) -> None:
        """Record the expectations for a round until its report comes, and its rows.

        tokens: of all live rows; seconds: of the round; calibration: accepted over predicted
        drafts, included in `tokens`.
        """
        slice_number = situation.slice
        for drafter, counts in situation.classes.items():
            known = self.classes.get(drafter)
            self.classes[drafter] = counts if known is None else known + counts
        self.bands = self.bands + situation.bands
        self.elapsed += seconds
        self.switches += self.last.get(slice_number, strategy) != strategy
        self.last[slice_number] = strategy

        of_row = tokens / situation.live
        drafts = (of_row - 1) / calibration  # One token of a row is the target's own.
        pending = self.pending.setdefault(slice_number, collections.deque(maxlen=_MOST_PENDING))
        pending.append(ExpectedRound(strategy, of_row, drafts, seconds=seconds))

    def take_expected(self, report: RoundReport) -> ExpectedRound | None:
        """Take the expectations for the slice's oldest pending round of the report's strategy."""
        pending = self.pending.get(report.slice) or collections.deque()
        while pending:
            expected = pending.popleft()
            if expected.strategy == report.strategy:
                return expected
        return None

    def metrics(self, known: Mapping[str, Acceptance]) -> dict[str, float]:
        """Return metrics of the stage so far, with the acceptance by drafter.

        They are the share of each drafter, the tokens, and the accuracy of predictions of timed
        rounds.
        """
        sums = total(self.counts.values())
        rounds = total(
            {strategy.drafter: figures["rounds"]} for (strategy, _), figures in self.counts.items()
        )
        metrics = {
            f"strategy/share_{drafter}": ratio(rounds[drafter], sums["rounds"])
            for drafter in ("none", *known)
        }
        for drafter, estimate in known.items():
            # of the first draft: depth 0, rank 0
            rate = acceptance.pooled_rates(estimate)[0, 0]
            metrics[f"strategy/acceptance_{drafter}"] = float(rate)
        metrics["strategy/draft_length"] = ratio(sums["drafted"], sums["live_rows"])
        if sums["timed_rounds"]:
            predicted = ratio(sums["predicted_tokens"], sums["predicted_seconds"])
            metrics["strategy/predicted_tokens_per_second"] = predicted
            measured = ratio(sums["timed_tokens"], sums["seconds"])
            metrics["strategy/tokens_per_second"] = measured
        metrics["strategy/switches"] = float(self.switches)
        metrics["strategy/probe_share"] = ratio(self.lost, self.elapsed)
        return metrics
