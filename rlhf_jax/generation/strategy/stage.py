"""Follow the rounds of one stage: expectations and results."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.strategy import acceptance, statistics
from rlhf_jax.generation.strategy.acceptance import Acceptance
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.statistics import StrategyCounts
from rlhf_jax.types import Strategy

_MOST_PENDING = 8  # Pending rounds of a slice that are kept until their reports come.


@dataclasses.dataclass(frozen=True)
class ExpectedRound:
    """Hold the expectations for a round, per live row."""

    strategy: Strategy
    tokens: float
    drafts: float  # accepted, before calibration
    seconds: float


@dataclasses.dataclass
class StageRounds:
    """Hold the figures of the running stage."""

    counts: StrategyCounts = dataclasses.field(default_factory=dict)  # results of its rounds
    # of its situations, summed
    classes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    bands: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(acceptance.BANDS))
    elapsed: float = 0.0  # predicted seconds of the chosen strategies
    lost: float = 0.0  # of these, predicted loss on probes
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

        tokens: of all live rows; calibration: accepted over predicted drafts, included in them.
        """
        place = situation.slice
        for drafter, counts in situation.classes.items():
            known = self.classes.get(drafter)
            self.classes[drafter] = counts if known is None else known + counts
        self.bands = self.bands + situation.bands
        self.elapsed += seconds
        self.switches += self.last.get(place, strategy) != strategy
        self.last[place] = strategy

        of_row = tokens / situation.live
        pending = self.pending.setdefault(place, collections.deque(maxlen=_MOST_PENDING))
        pending.append(ExpectedRound(strategy, of_row, (of_row - 1) / calibration, seconds=seconds))

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
        ratio = statistics.ratio
        total = statistics.total(self.counts.values())
        rounds = statistics.total(
            {strategy.drafter: figures["rounds"]} for (strategy, _), figures in self.counts.items()
        )
        metrics = {
            f"strategy/share_{drafter}": ratio(rounds[drafter], total["rounds"])
            for drafter in ("none", *known)
        }
        for drafter, one in known.items():
            metrics[f"strategy/acceptance_{drafter}"] = float(acceptance.pooled_rates(one)[0, 0])
        metrics["strategy/draft_length"] = ratio(total["drafted"], total["live_rows"])
        if total["timed_rounds"]:
            predicted = ratio(total["predicted_tokens"], total["predicted_seconds"])
            metrics["strategy/predicted_tokens_per_second"] = predicted
            gave = ratio(total["timed_tokens"], total["seconds"])
            metrics["strategy/tokens_per_second"] = gave
        metrics["strategy/switches"] = float(self.switches)
        metrics["strategy/probe_share"] = ratio(self.lost, self.elapsed)
        return metrics
