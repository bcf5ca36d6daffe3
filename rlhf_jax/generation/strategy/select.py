"""Choose a strategy round by round: most expected tokens per second, from measurements alone.

The same statistics and situation give the same choice: there is no clock and no randomness here.
The engine requests round n + 1 while round n runs and round n - 1 is known, so that the device
never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import acceptance, candidates, cost, predict, statistics
from rlhf_jax.generation.strategy.acceptance import Acceptance, Observations
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.generation.strategy.predict import Choice, Predictions, Situation
from rlhf_jax.generation.strategy.settings import SELECTOR_SETTINGS
from rlhf_jax.generation.strategy.statistics import StageRounds, StrategyCounts
from rlhf_jax.types import Strategy


class Selector:
    """Hold the statistics behind choices, and choose.

    These are acceptance by drafter, costs, and the results of strategies so far.
    """

    def __init__(self, choices: Candidates, costs: cost.Costs, frozen_costs: bool = False):
        """Begin without measurements of the drafters.

        frozen_costs: whether measured times are ignored, so that a run's choices are reproducible.
        """
        self.candidates: Candidates = choices
        self.costs: cost.Costs = costs
        self.frozen_costs: bool = frozen_costs
        self.acceptance: dict[str, Acceptance] = {
            drafter: acceptance.unknown() for drafter in choices.drafters
        }
        self.rounds_unobserved: dict[str, int] = dict.fromkeys(choices.drafters, 0)
        # rounds not yet used to update acceptance, with the drafts expected to be accepted
        self.unlearned: list[tuple[RoundReport, float]] = []
        self.timed: int = 0  # rounds whose time is known
        self.earlier: StrategyCounts = {}  # of finished stages, all together
        # rows of the stage that finished last (`statistics.rows`)
        self.last_stage: list[dict[str, Any]] = []
        # of its situations, summed over rounds
        self.classes: dict[str, np.ndarray] = {}
        self.bands: np.ndarray = np.zeros(acceptance.BANDS)
        self.current: dict[int, Strategy] = {}  # by slice
        self.stage: StageRounds = StageRounds()
        self.expectations: predict.Expectations = predict.expect(self.candidates, self.acceptance)

    def choose(self, situation: Situation) -> Choice:
        """Return the strategy of the next round."""
        strategies = self.candidates.strategies
        predicted = predict.predict(
            self.candidates,
            self.expectations,
            self.costs,
            situation=situation,
            frozen_costs=self.frozen_costs,
        )
        chosen, best, not_yet_compiled = predict.best_of(
            self.candidates,
            predicted.valued,
            predicted.steady * (1 + predicted.doubt),
            ready=situation.ready,
            current=self.current.get(situation.slice),
        )

        probe, uncompiled_probe = self._probe(predicted, chosen, best, situation=situation)
        if probe is None:
            reason = "best" if chosen == best else "kept"
            self.current[situation.slice] = strategies[chosen]
        else:
            reason = "probe"
            chosen = probe
        wished = uncompiled_probe if not_yet_compiled is None else not_yet_compiled

        strategy = strategies[chosen]
        tokens = float(predicted.tokens[chosen])
        seconds = float(predicted.seconds[chosen])
        calibration = self.expectations.calibrations[strategy.drafter] if strategy.parents else 1.0
        self.stage.note(situation, strategy, tokens, seconds=seconds, calibration=calibration)
        return Choice(
            strategy,
            tokens,
            seconds,
            not_yet_compiled=None if wished is None else strategies[wished],
            reason=reason,
            plain_rate=float(predicted.tokens[0] / predicted.steady[0]),
            best_rate=float(predicted.tokens[best] / predicted.steady[best]),
            expected_gain=self.expectations.expected_gains.get(strategy.drafter)
            if strategy.packed
            else None,
        )

    def _probe(
        self, predicted: Predictions, chosen: int, best: int, situation: Situation
    ) -> tuple[int | None, int | None]:
        """Return the probe, and the strategy to compile for one: the cheapest within the budget.

        Candidates are drafters with few observations, and strategies that would be the best if
        their calls were as fast as the doubt allows.
        """
        tokens = predicted.valued
        steady = predicted.steady
        rate = tokens[best] / steady[best]
        loss = np.where(predicted.fits, predicted.seconds - tokens / rate, np.inf)

        quickest = np.maximum(steady / (1 + predicted.doubt), steady[0])
        plain = (1 + SELECTOR_SETTINGS.gain_over_plain) * tokens[0] / steady[0]
        goal = (1 + SELECTOR_SETTINGS.switch_gain) * max(rate, plain)
        wanted = tokens > goal * quickest
        wanted[chosen] = False
        for index, drafter in enumerate(self.candidates.drafters):
            if self._due(drafter):
                wanted |= (self.candidates.drafter == index) & (loss > 0)

        wanted &= loss <= SELECTOR_SETTINGS.probe_share * self.stage.elapsed - self.stage.lost
        places = np.flatnonzero(wanted)
        not_yet_compiled = None
        for one in places[np.argsort(loss[places], kind="stable")].tolist():
            if situation.ready(self.candidates.strategies[one]):
                self.stage.lost += max(0.0, float(loss[one]))
                return one, None
            not_yet_compiled = one if not_yet_compiled is None else not_yet_compiled
        return None, not_yet_compiled

    def _due(self, drafter: str) -> bool:
        """Return whether a drafter has too few observations, or no recent ones."""
        old = self.rounds_unobserved[drafter] > SELECTOR_SETTINGS.old_rounds
        return old or self.acceptance[drafter].drafts < SELECTOR_SETTINGS.few_drafts

    def observe_round(self, report: RoundReport) -> None:
        """Learn from a round: its time now, its acceptance once every slice has reported.

        Updating acceptance takes the host as long as a choice does.
        """
        expected = self.stage.take_expected(report)
        if expected is not None:
            statistics.add(
                self.stage.counts,
                report,
                expected.tokens * report.live,
                seconds=expected.seconds,
                timed=not self.frozen_costs,
            )
        if report.seconds is not None and not self.frozen_costs:
            self._observe_seconds(report, report.seconds)
        again = any(earlier.slice == report.slice for earlier, _ in self.unlearned)
        drafts = expected.drafts * report.live if expected else 0.0
        self.unlearned.append((report, drafts))
        if again or len(self.unlearned) >= len(self.stage.last):
            self._learn()

    def _learn(self) -> None:
        """Update the drafters' acceptance from the rounds since the last time."""
        for drafter in self.acceptance:
            observed_rounds = [
                one for one in self.unlearned if one[0].strategy.drafter == drafter and one[1]
            ]
            known = acceptance.calibrate(
                self.acceptance[drafter],
                sum(report.accepted for report, _ in observed_rounds),
                sum(drafts for _, drafts in observed_rounds),
                rows=sum(report.live for report, _ in observed_rounds),
            )
            shown: dict[bool, list[Observations]] = {True: [], False: []}
            for report, _ in self.unlearned:
                observations = report.observations.get(drafter)
                if observations is None or not len(observations.seen_prompt):
                    self.rounds_unobserved[drafter] += 1
                else:
                    self.rounds_unobserved[drafter] = min(self.rounds_unobserved[drafter], 0)
                    shown[report.strategy.drafter == drafter].append(observations)
            for used, observed in shown.items():
                if observed:
                    known = acceptance.observe(known, acceptance.joined(observed), used)
            self.acceptance[drafter] = known
        self.unlearned = []
        self.expectations = predict.expect(self.candidates, self.acceptance)

    def _observe_seconds(self, report: RoundReport, seconds: float) -> None:
        """Observe the time of a call; the machine is refitted whenever the timed rounds doubled."""
        at = self.candidates.place.get(report.strategy)
        if at is None:
            return
        call = self.candidates.calls.each[at]
        cost.observe(
            self.costs,
            call,
            report.rows,
            context=report.context,
            draft_lag=report.draft_lag,
            seconds=seconds,
        )
        self.timed += 1
        if self.timed >= SELECTOR_SETTINGS.first_fit and self.timed & (self.timed - 1) == 0:
            cost.fit(self.costs)

    def observe_text(self, drafter: str, observations: Observations) -> None:
        """Learn from finished text that a drafter has read: the drafts it would have made there."""
        self.acceptance[drafter] = acceptance.observe(self.acceptance[drafter], observations)
        self.rounds_unobserved[drafter] = -SELECTOR_SETTINGS.text_rounds
        self.expectations = predict.expect(self.candidates, self.acceptance)

    def begin(self, costs: cost.Costs) -> None:
        """Take a run's own prior costs, after a possible restore.

        Measurements of the same models on the same machine stay.
        """
        if self.costs.prior != costs.prior:
            self.costs = costs
            self.timed = 0

    def stage_ended(self, kept: float) -> None:
        """Fit the costs and rebuild the trees, between two stages.

        kept: the weight of acceptance counts from now on, as the policy has moved.
        """
        self._learn()
        if not self.frozen_costs:
            cost.fit(self.costs)
        if len(self.candidates.strategies) > 1:
            rates = {
                drafter: acceptance.pooled_rates(self.acceptance[drafter])
                for drafter in self.candidates.drafters
                if not self._due(drafter)
            }
            self.candidates = candidates.with_trees(self.candidates, rates)
        self.acceptance = {
            drafter: acceptance.forget(known, kept) for drafter, known in self.acceptance.items()
        }
        self.earlier = statistics.merged(self.earlier, self.stage.counts)
        self.last_stage = statistics.rows(self.stage.counts)
        self.classes = self.stage.classes
        self.bands = self.stage.bands
        self.stage: StageRounds = StageRounds()
        self.expectations: predict.Expectations = predict.expect(self.candidates, self.acceptance)

    def typical_situation(
        self, live: int, rows: int, most_nodes: int, at: np.ndarray | None = None
    ) -> Situation:
        """Return the mean situation of rounds with about this many live rows, or of all rounds.

        Rows have the mean context of those rounds, and drafters their confidence over the last
        stage. at: shares [BANDS] of the rows' positions, if they differ from then.
        """
        known = statistics.merged(self.earlier, self.stage.counts)
        size = statistics.bucket(live)
        alike = statistics.total(figures for place, figures in known.items() if place[1] == size)
        alike = alike if alike["live_rows"] else statistics.total(known.values())
        context = live * statistics.ratio(alike["context"], alike["live_rows"])
        return Situation(
            rows,
            live,
            context,
            draft_lag=0,
            classes=self.classes,
            ready=lambda strategy: True,
            most_nodes=most_nodes,
            bands=self.bands if at is None else at,
        )

    def pace(self, live: int, rows: int, most_nodes: int, at: np.ndarray | None = None) -> float:
        """Return the tokens per second that one of `live` rows gains by the best strategy.

        at: as in `typical_situation`.
        """
        choices = self.candidates
        situation = self.typical_situation(live, rows, most_nodes, at)
        tokens, seconds = self._tokens_and_seconds(situation)
        fits = choices.nodes <= max(most_nodes, int(choices.nodes.min()))
        return float((tokens / seconds)[fits].max() / live)

    def _tokens_and_seconds(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        """Predict the tokens and the seconds of a round, [S] each, whatever fits."""
        choices = self.candidates
        row_tokens = predict.tokens_of_rows(choices, self.expectations, situation)
        tokens = predict.tokens_of_round(choices, situation, row_tokens)
        seconds, _ = predict.seconds_of_round(choices, self.costs, situation)
        return tokens, seconds

    def table(self, situation: Situation) -> list[dict[str, Any]]:
        """List one row per strategy that fits, the best first: predictions and results.

        The results are of the rounds so far with about as many live rows, 0 if there were none.
        """
        tokens, seconds = self._tokens_and_seconds(situation)
        live = statistics.bucket(situation.live)
        ratio = statistics.ratio
        rows = []
        for i, strategy in enumerate(self.candidates.strategies):
            if self.candidates.nodes[i] <= situation.most_nodes:
                place = strategy, live
                gave = statistics.total(
                    [self.earlier.get(place, {}), self.stage.counts.get(place, {})]
                )
                predicted = ratio(gave["predicted_tokens"], gave["predicted_seconds"])
                rows.append(
                    {
                        "strategy": trees.name_of(strategy),
                        "tokens_per_row": float(tokens[i] / situation.live),
                        "seconds": float(seconds[i]),
                        "tokens_per_second": float(tokens[i] / seconds[i]),
                        "ready": situation.ready(strategy),
                        "rounds": gave["rounds"],
                        "realised_tokens_per_row": ratio(gave["tokens"], gave["live_rows"]),
                        "realised_tokens_per_second": ratio(gave["timed_tokens"], gave["seconds"]),
                        "predicted_tokens_per_second": predicted,
                    }
                )
        return sorted(rows, key=lambda row: -row["tokens_per_second"])

    def metrics(self) -> dict[str, float]:
        """Return metrics of the stage so far, as `StageRounds.metrics` does."""
        return self.stage.metrics(self.acceptance)

    def state(self) -> dict[str, Any]:
        """Return the basis of the next stage's choices, as JSON values and numpy arrays.

        It is taken between stages.
        """
        return {
            "acceptance": {
                drafter: acceptance.state(known) for drafter, known in self.acceptance.items()
            },
            "silent": dict(self.rounds_unobserved),
            "trees": [
                trees.name_of(one) for one in self.candidates.strategies if not trees.is_chain(one)
            ],
            "timed": self.timed,
            "tallies": statistics.state(self.earlier),
            "classes": dict(self.classes),
            "bands": self.bands,
            "current": {
                str(number): trees.name_of(strategy) for number, strategy in self.current.items()
            },
            "costs": cost.state(self.costs),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` saved; drafters that are not among the candidates are dropped."""
        for drafter in self.acceptance.keys() & saved["acceptance"].keys():
            self.acceptance[drafter] = acceptance.restore(saved["acceptance"][drafter])
            self.rounds_unobserved[drafter] = saved["silent"][drafter]

        def known(name: str) -> bool:
            return name == "plain" or name.partition("-")[0] in self.acceptance

        if len(self.candidates.strategies) > 1:
            chains = filter(trees.is_chain, self.candidates.strategies)
            grown = map(trees.parse, filter(known, saved["trees"]))
            self.candidates = candidates.build([*chains, *grown], self.candidates.longest)
        self.timed = saved["timed"]
        self.earlier = statistics.restore(saved["tallies"])
        self.classes = {drafter: np.array(counts) for drafter, counts in saved["classes"].items()}
        self.bands = np.array(saved.get("bands", self.bands))
        current = saved["current"] or {}
        # Before there were slices, one strategy was saved.
        current = current if isinstance(current, dict) else {"0": current}
        self.current = {
            int(number): trees.parse(name) for number, name in current.items() if known(name)
        }
        self.costs = cost.restore(saved["costs"])
        self.expectations = predict.expect(self.candidates, self.acceptance)
