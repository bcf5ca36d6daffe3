"""The choice of a strategy, round by round: most expected tokens a second, from what was measured
and nothing else.

The same statistics and situation give the same choice: there is no clock and no randomness here.
The engine asks for round n + 1 while round n runs and round n - 1 is known, so that the device
never waits.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import acceptance as accepting
from rlhf_jax.generation.strategy import candidates as menus
from rlhf_jax.generation.strategy import cost, drain, expected_gain, statistics
from rlhf_jax.generation.strategy.acceptance import CLASSES, NOTHING, Observations
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.generation.strategy.statistics import Tallies
from rlhf_jax.types import Strategy

GAIN = 0.01  # of tokens a second that a switch must bring
# over plain decoding that drafts must promise: what is left of a belief in a useless drafter is
# less
WORTH = 0.02
STAY = 16  # rounds over which the catch-up of a draft model's cache pays
PROBING = 0.01  # of a stage's time that may be lost on probes
FEW = 16.0  # drafts seen, below which a drafter is to be probed ...
OLD = 200  # ... or above so many rounds without evidence,
# rounds, about a stage, for which the text that a drafter read speaks: its own weights do not move
READ = 4000
TRIED = 3  # timed rounds that settle what a call costs; one may have been held up
# by how much a call that was timed less often may be quicker or slower than predicted by the prior
# ...
UNTRIED = 0.3
# ... and by a machine that was fitted to other calls, unless these show it to be less off
UNTRIED_FITTED = 0.05
FIRST_FIT = 8  # timed rounds before the cost model is fitted first; then at every doubling


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a choice depends on besides the statistics."""

    rows: int  # row slots of the program
    live: int  # rows that will gain tokens
    context: float  # known tokens, summed over live rows
    lag: int  # tokens that the draft cache lacks, of the row that lacks most
    # by drafter: [2, CLASSES] live rows by familiar and confidence
    classes: Mapping[str, np.ndarray]
    ready: Callable[[Strategy], bool]  # whether its programs are compiled for these rows
    most_nodes: int = trees.NODE_BUCKETS[-1]  # that there is memory to verify a row
    failed: Collection[Strategy] = ()  # whose programs cannot be compiled
    # As `classes`, of drafters whose classes last: tokens those rows have to come. Empty while
    # samples wait for rows.
    left: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    slice: int = 0  # that chooses: each keeps to its own strategy
    # of `classes`: [D, CLASSES]
    by_device: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy for the next round, what is expected of it, and what plain decoding would give."""

    strategy: Strategy
    tokens: float  # expected of the round, all rows together
    seconds: float
    not_yet_compiled: Strategy | None  # a better strategy, whose programs are not compiled yet
    reason: str  # "best", "kept" (nothing is clearly better) or "probe"
    plain_rate: float  # tokens a second of plain decoding
    best_rate: float  # of the best strategy that is ready
    # Of a packed round's drafts, by class and depth (`packed.allocate_budget`).
    worth: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def why(self) -> str:
        """The choice in one sentence."""
        name = trees.name_of(self.strategy)
        rate = self.tokens / self.seconds
        not_yet_compiled = (
            f"; {trees.name_of(self.not_yet_compiled)} would be better, once compiled"
            if self.not_yet_compiled
            else ""
        )
        predicted = (
            f"{rate:.4g} tokens/s predicted, plain {self.plain_rate:.4g}, best {self.best_rate:.4g}"
        )
        return f"{name} ({self.reason}): {predicted}{not_yet_compiled}"


def select(
    menu: Candidates,
    tokens: np.ndarray,
    seconds: np.ndarray,
    ready: Callable[[Strategy], bool],
    current: Strategy | None,
) -> tuple[int, int, int | None]:
    """(chosen, best, wish) as indices into the menu: most tokens a second among what is ready.

    tokens, seconds [S] expected of a round. `current` stays unless another gains GAIN on it; where
    the outcome is not WORTH more than plain decoding, that is chosen at once. Where nothing is
    ready it is the menu's first strategy: plain, or the only one. `not_yet_compiled` is not ready, and better
    than the chosen one by GAIN; or None.
    """
    rate = tokens / seconds
    order = np.argsort(-rate, kind="stable").tolist()
    best = next((one for one in order if ready(menu.strategies[one])), 0)
    chosen = best
    held = menu.place.get(current)
    if held is not None and held != best and ready(menu.strategies[held]):
        chosen = held if rate[best] <= (1 + GAIN) * rate[held] else best
    if rate[chosen] < (1 + WORTH) * rate[0] and ready(menu.strategies[0]):
        chosen = 0
    top = order[0]
    wished = not ready(menu.strategies[top]) and (
        top == chosen or rate[top] > (1 + GAIN) * rate[chosen]
    )
    return chosen, best, top if wished else None


@dataclasses.dataclass
class _Stage:
    """Figures of the stage that runs."""

    tallies: Tallies = dataclasses.field(default_factory=dict)  # what its rounds gave
    # of its situations, summed
    classes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    elapsed: float = 0.0  # predicted seconds of what was chosen
    lost: float = 0.0  # of these, predicted to be lost on probes
    switches: int = 0
    last: dict[int, Strategy] = dataclasses.field(default_factory=dict)  # by slice
    pending: dict[int, collections.deque] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """What was expected of a round, for each live row."""

    strategy: Strategy
    tokens: float
    drafts: float  # accepted, before calibration
    seconds: float


class Selector:
    """The statistics that choices rest on: acceptance by drafter, costs, and what strategies have
    given so far.
    """

    def __init__(self, menu: Candidates, costs: cost.Costs, frozen_costs: bool = False):
        """`frozen_costs`: no measured time has a say, so that a run's choices repeat."""
        self.menu = menu
        self.costs = costs
        self.frozen_costs = frozen_costs
        self.acceptance = {drafter: accepting.unknown() for drafter in menu.drafters}
        self.silent = dict.fromkeys(menu.drafters, 0)  # rounds since a drafter's last evidence
        self.timed = 0  # rounds whose time is known
        self.earlier: Tallies = {}  # of finished stages, all together
        # rows of the one that finished last (`tally.rows`)
        self.last_stage: list[dict[str, Any]] = []
        self.classes: dict[str, np.ndarray] = {}  # of its situations, summed over rounds
        self.current: dict[int, Strategy] = {}  # by slice
        self.stage = _Stage()
        self._expect()

    def choose(self, situation: Situation) -> Choice:
        """The strategy of the next round."""
        fits = self.menu.nodes <= max(situation.most_nodes, int(self.menu.nodes[0]))
        if situation.failed:
            fits &= np.array(
                [strategy not in situation.failed for strategy in self.menu.strategies]
            )
        pace = self._pace(situation)
        tokens = np.where(fits, self._tokens(situation, pace), 0.0)
        seconds, steady = self._seconds(situation)
        doubt = self._doubt(situation.rows)
        worth = self._worth(situation, pace, tokens, steady)
        chosen, best, not_yet_compiled = select(
            self.menu,
            worth,
            steady * (1 + doubt),
            situation.ready,
            self.current.get(situation.slice),
        )
        rate = worth[best] / steady[best]
        loss = np.where(fits, seconds - worth / rate, np.inf)
        quickest = np.maximum(steady / (1 + doubt), steady[0])
        goal = (1 + GAIN) * max(rate, (1 + WORTH) * worth[0] / steady[0])
        hopeful = (doubt > 0) & (worth > goal * quickest)
        hopeful[chosen] = False
        probe, probe_wish = self._probe(loss, hopeful, situation)
        reason = "probe" if probe is not None else "best" if chosen == best else "kept"
        if probe is None:
            self.current[situation.slice] = self.menu.strategies[chosen]
        else:
            chosen = probe
            self.stage.lost += max(0.0, float(loss[probe]))
        wished = probe_wish if not_yet_compiled is None else not_yet_compiled
        figures = (float(tokens[chosen]), float(seconds[chosen]))
        strategy = self.menu.strategies[chosen]
        choice = Choice(
            strategy,
            *figures,
            not_yet_compiled=None if wished is None else self.menu.strategies[wished],
            reason=reason,
            plain_rate=float(tokens[0] / steady[0]),
            best_rate=float(tokens[best] / steady[best]),
            worth=self.worths[strategy.drafter] if strategy.packed else None,
        )
        self._note(choice, situation)
        return choice

    def _pace(self, situation: Situation) -> np.ndarray:
        """[2 * CLASSES, S] tokens expected of a row's round, by familiar and class."""
        pace = self.expected.copy()
        for drafter, columns in self.menu.packed.items():
            if (counts := situation.classes.get(drafter)) is not None:
                rows = situation.by_device.get(drafter)
                rows = expected_gain.on_one_device(counts, situation.live) if rows is None else rows
                factor = accepting.calibration(self.acceptance[drafter])
                slots = situation.rows, self.menu.nodes[columns]
                pace[:CLASSES, columns] = expected_gain.tokens(
                    self.rankings[drafter], rows, *slots, factor
                )
                pace[CLASSES:, columns] = pace[:CLASSES, columns]
        return pace

    def _tokens(self, situation: Situation, pace: np.ndarray) -> np.ndarray:
        """[S] expected of a round, all live rows together. pace as `_pace` says."""
        # the last row is plain decoding's
        weights = np.zeros((len(self.menu.drafters) + 1, 2 * CLASSES))
        weights[:, 0] = 1.0
        for place, drafter in enumerate(self.menu.drafters):
            counts = situation.classes.get(drafter)
            # quicker than numpy's, of so few
            if counts is not None and (total := sum(counts.ravel().tolist())) > 0:
                weights[place] = counts.ravel() / total
        return situation.live * (weights @ pace)[self.menu.drafter, np.arange(len(self.menu.nodes))]

    def _worth(
        self, situation: Situation, pace: np.ndarray, tokens: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """[S] tokens, but more or fewer where a strategy ends the drain sooner or later than tokens
        a second tell.
        """
        worth = tokens.copy()
        fits = tokens > 0
        for drafter, left in situation.left.items():
            own = self.menu.paths[drafter].columns
            columns = self.menu.paths[drafter].plain_too
            cells = pace[:, columns], situation.classes[drafter].ravel(), left.ravel()
            rows = drain.foreseen(*cells, self.stay[drafter])
            took = seconds[columns]
            if len(rows.counts) > 1:
                ends = drain.seconds_left(rows, took, self._plain_seconds(situation))
                worth[own] = took[1:] / ends[1:] * (situation.live * ends[0] / took[0])
        return worth * fits

    def _plain_seconds(self, situation: Situation) -> Callable[[np.ndarray], np.ndarray]:
        """Of plain rounds, by how many samples their rows hold; of a part of a sample, that part of
        one's.
        """
        halved = [situation.rows >> times for times in range(situation.rows.bit_length())]
        prices = cost.plain_seconds(
            self.costs, int(self.menu.nodes[0]), halved, situation.context / situation.live
        )
        return lambda live: (
            np.minimum(live, 1) * prices[np.log2(situation.rows / np.ceil(live)).astype(int)]
        )

    def _seconds(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        """([S] of the next round, [S] with the draft cache's catch-up spread over the rounds that
        it serves).
        """
        where = self.menu.calls, situation.rows, situation.context
        kept_up = cost.seconds(self.costs, *where, 0)
        # drafts never make a round shorter, whatever was measured of either
        kept_up = np.maximum(kept_up, kept_up[0])
        if situation.lag <= cost.FREE_LAG or not self.menu.calls.steps.any():
            return kept_up, kept_up
        whole = np.maximum(cost.seconds(self.costs, *where, situation.lag), kept_up)
        return whole, kept_up + (whole - kept_up) / STAY

    def _probe(
        self, loss: np.ndarray, hopeful: np.ndarray, situation: Situation
    ) -> tuple[int | None, int | None]:
        """(what to probe, what to compile for a probe): the cheapest of what is not known well,
        within the budget.

        loss [S]: predicted seconds lost against the best; hopeful [S]: better than the best, were
        its call quicker.
        """
        wanted = np.zeros(len(loss), bool)
        for index, drafter in enumerate(self.menu.drafters):
            if self._due(drafter):
                wanted |= (self.menu.drafter == index) & (loss > 0)
        wanted = (wanted | hopeful) & (loss <= PROBING * self.stage.elapsed - self.stage.lost)
        candidates = np.flatnonzero(wanted)
        not_yet_compiled = None
        for one in candidates[np.argsort(loss[candidates], kind="stable")].tolist():
            if situation.ready(self.menu.strategies[one]):
                return one, None
            not_yet_compiled = one if not_yet_compiled is None else not_yet_compiled
        return None, not_yet_compiled

    def _due(self, drafter: str) -> bool:
        return self.silent[drafter] > OLD or self.acceptance[drafter].observations < FEW

    def _doubt(self, rows: int) -> np.ndarray:
        """[S] by which share a round may take more or less than predicted: 0 where calls like it
        were timed.
        """
        if self.frozen_costs:
            return np.zeros(len(self.menu.nodes))
        rounds = cost.rounds_timed(self.costs, self.menu.calls, rows)
        fitted = min(UNTRIED_FITTED, self.costs.error)
        doubt = UNTRIED if self.costs.machine == self.costs.prior else fitted
        return np.where((rounds < TRIED) & (self.menu.drafter >= 0), doubt, 0.0)

    def _note(self, choice: Choice, situation: Situation) -> None:
        """Remember what was expected, for when the round arrives, and of which rows."""
        live = situation.live
        classes = self.stage.classes
        for drafter, counts in situation.classes.items():
            classes[drafter] = classes[drafter] + counts if drafter in classes else counts
        self.stage.elapsed += choice.seconds
        self.stage.switches += (
            self.stage.last.get(situation.slice, choice.strategy) != choice.strategy
        )
        self.stage.last[situation.slice] = choice.strategy
        a_row = choice.tokens / live
        drafter = choice.strategy.drafter
        factor = accepting.calibration(self.acceptance[drafter]) if choice.strategy.parents else 1.0
        pending = self.stage.pending.setdefault(situation.slice, collections.deque(maxlen=8))
        pending.append(_Prediction(choice.strategy, a_row, (a_row - 1) / factor, choice.seconds))

    def arrived(self, report: RoundReport) -> None:
        """Learn from a round: its acceptance, what its tokens say of every drafter, its time."""
        used = report.strategy.drafter
        prediction = self._prediction(report)
        if prediction is not None:
            expected = prediction.tokens * report.live, prediction.seconds
            statistics.add(self.stage.tallies, report, *expected, timed=not self.frozen_costs)
            if used in self.acceptance:
                figures = report.accepted, prediction.drafts * report.live, report.live
                self.acceptance[used] = accepting.realise(self.acceptance[used], *figures)
        for drafter in self.acceptance:
            self._learn(drafter, report.evidence.get(drafter), drafter == used)
        if report.seconds is not None and not self.frozen_costs:
            self._time(report, report.seconds)
        self._expect()

    def _prediction(self, report: RoundReport) -> _Prediction | None:
        """What was expected of the slice's oldest round of this strategy that has not arrived."""
        pending = self.stage.pending.get(report.slice) or collections.deque()
        while pending:
            prediction = pending.popleft()
            if prediction.strategy == report.strategy:
                return prediction
        return None

    def _learn(self, drafter: str, evidence: Observations | None, used: bool) -> None:
        if evidence is None or not len(evidence.seen_prompt):
            self.silent[drafter] += 1
            return
        self.silent[drafter] = min(self.silent[drafter], 0)
        self.acceptance[drafter] = accepting.observe(self.acceptance[drafter], evidence, used)

    def _time(self, report: RoundReport, seconds: float) -> None:
        at = self.menu.place.get(report.strategy)
        if at is None:
            return
        cost.observe(
            self.costs, self.menu.calls.each[at], report.rows, report.context, report.lag, seconds
        )
        self.timed += 1
        if self.timed >= FIRST_FIT and self.timed & (self.timed - 1) == 0:
            cost.fit(self.costs)

    def _expect(self) -> None:
        """Expected tokens a row's round, [2 * CLASSES, S] by familiar and class, from the
        acceptance of now.
        """
        self.expected = np.ones((2 * CLASSES, len(self.menu.strategies)))
        for drafter, paths in self.menu.paths.items():
            known = self.acceptance[drafter]
            drafts = menus.expected_drafts(paths, known.rates) * accepting.calibration(known)
            if drafter != "model":
                # what knows nothing to draft drafts nothing; a model always does
                drafts[:, NOTHING] = 0.0
            self.expected[:, paths.columns] += drafts.reshape(2 * CLASSES, -1)
        self.expected = np.minimum(self.expected, 1 + self.menu.depth)
        self.stay = {
            name: accepting.likeliest(known, 1, drain.FOLLOWS)
            for name, known in self.acceptance.items()
        }
        self.worths = {}
        self.rankings = {}
        for drafter, columns in self.menu.packed.items():
            self.worths[drafter] = expected_gain.worths(self.acceptance[drafter].rates[1, ..., 0])
            self.rankings[drafter] = expected_gain.ranked(
                self.worths[drafter][:, : self.menu.depth[columns[0]]]
            )

    def begin(self, costs: cost.Costs) -> None:
        """Take a run's own prior costs, after a possible restore: what was measured of the same
        models stays.
        """
        if self.costs.prior != costs.prior:
            self.costs = costs
            self.timed = 0

    def taught(self, drafter: str, evidence: Observations) -> None:
        """Learn from finished text that the drafter has read: what it would have drafted against
        what was drawn.
        """
        self._learn(drafter, evidence, used=False)
        self.silent[drafter] = -READ
        self._expect()

    def stage_ended(self, kept: float = 1.0) -> None:
        """Between two stages: fit the costs, find the trees anew; counts weigh `kept` once the
        policy has moved.
        """
        if not self.frozen_costs:
            cost.fit(self.costs)
        if len(self.menu.strategies) > 1:
            known = [drafter for drafter in self.menu.drafters if not self._due(drafter)]
            self.menu = menus.with_trees(
                self.menu, {name: accepting.pooled(self.acceptance[name]) for name in known}
            )
        self.acceptance = {
            drafter: accepting.forget(known, kept) for drafter, known in self.acceptance.items()
        }
        self.earlier = statistics.merged(self.earlier, self.stage.tallies)
        self.last_stage, self.classes = statistics.rows(self.stage.tallies), self.stage.classes
        self.stage = _Stage()
        self._expect()

    def typical(self, live: int, rows: int, most_nodes: int) -> Situation:
        """A situation as rounds of about so many live rows have had it, or all where there were
        none such.

        Rows have the mean context of those rounds, and drafters the confidence that they had over
        the last stage.
        """
        known = statistics.merged(self.earlier, self.stage.tallies)
        alike = statistics.total(
            figures for (_, size), figures in known.items() if size == statistics.bucket(live)
        )
        alike = alike if alike["live_rows"] else statistics.total(known.values())
        context = live * statistics.ratio(alike["context"], alike["live_rows"])
        return Situation(rows, live, context, 0, self.classes, lambda strategy: True, most_nodes)

    def pace(self, live: int, rows: int, most_nodes: int) -> float:
        """Tokens a second that one of `live` rows is expected to gain by the best strategy."""
        situation = self.typical(live, rows, most_nodes)
        fits = self.menu.nodes <= max(most_nodes, int(self.menu.nodes.min()))
        return float(
            (self._tokens(situation, self._pace(situation)) / self._seconds(situation)[0])[
                fits
            ].max()
            / live
        )

    def table(self, situation: Situation) -> list[dict[str, Any]]:
        """One row a strategy that fits, the best first: what is predicted here, and what it gave
        with about as many live rows so far.
        """
        tokens = self._tokens(situation, self._pace(situation))
        (seconds, _) = self._seconds(situation)
        rows = [
            {
                "strategy": trees.name_of(strategy),
                "tokens_per_row": float(tokens[i] / situation.live),
                "seconds": float(seconds[i]),
                "tokens_per_second": float(tokens[i] / seconds[i]),
                "ready": situation.ready(strategy),
            }
            | self._realised(strategy, statistics.bucket(situation.live))
            for i, strategy in enumerate(self.menu.strategies)
            if self.menu.nodes[i] <= situation.most_nodes
        ]
        return sorted(rows, key=lambda row: -row["tokens_per_second"])

    def _realised(self, strategy: Strategy, live: int) -> dict[str, float]:
        """Rounds so far, tokens a row's round, tokens a second and those predicted, 0 where there
        were none.
        """
        place = strategy, live
        found = statistics.total([self.earlier.get(place, {}), self.stage.tallies.get(place, {})])
        return {
            "rounds": found["rounds"],
            "realised_tokens_per_row": statistics.ratio(found["tokens"], found["live_rows"]),
            "realised_tokens_per_second": statistics.ratio(found["timed_tokens"], found["seconds"]),
            "predicted_tokens_per_second": statistics.ratio(
                found["predicted_tokens"], found["predicted_seconds"]
            ),
        }

    def metrics(self) -> dict[str, float]:
        """Figures of the stage so far: who drafted, how much, and, of timed rounds, how true the
        predictions were.
        """
        tallies = self.stage.tallies
        ratio = statistics.ratio
        total = statistics.total(tallies.values())
        rounds = statistics.total(
            {strategy.drafter: figures["rounds"]} for (strategy, _), figures in tallies.items()
        )
        shares = {
            drafter: ratio(rounds[drafter], total["rounds"])
            for drafter in ("none", *self.menu.drafters)
        }
        timed = {
            "strategy/predicted_tokens_per_second": ratio(
                total["predicted_tokens"], total["predicted_seconds"]
            ),
            "strategy/tokens_per_second": ratio(total["timed_tokens"], total["seconds"]),
        }
        return {
            **{f"strategy/share_{drafter}": share for drafter, share in shares.items()},
            **{
                f"strategy/acceptance_{name}": float(accepting.pooled(a)[0, 0])
                for name, a in self.acceptance.items()
            },
            "strategy/draft_length": ratio(total["drafted"], total["live_rows"]),
            **(timed if total["timed_rounds"] else {}),
            "strategy/switches": float(self.stage.switches),
            "strategy/probe_share": ratio(self.stage.lost, self.stage.elapsed),
        }

    def state(self) -> dict[str, Any]:
        """What the next stage's choices rest on, as JSON values and numpy arrays; taken between
        stages.
        """
        return {
            "acceptance": {
                drafter: accepting.state(known) for drafter, known in self.acceptance.items()
            },
            "silent": dict(self.silent),
            "trees": [
                trees.name_of(one) for one in self.menu.strategies if not trees.is_chain(one)
            ],
            "timed": self.timed,
            "tallies": statistics.state(self.earlier),
            "classes": dict(self.classes),
            "current": {
                str(number): trees.name_of(strategy) for number, strategy in self.current.items()
            },
            "costs": cost.state(self.costs),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` saved; what it knows of drafters that are not in this menu is
        dropped.
        """
        for drafter in self.acceptance.keys() & saved["acceptance"].keys():
            self.acceptance[drafter] = accepting.restore(saved["acceptance"][drafter])
            self.silent[drafter] = saved["silent"][drafter]
        if len(self.menu.strategies) > 1:
            found = [
                one for one in map(trees.parse, saved["trees"]) if one.drafter in self.acceptance
            ]
            self.menu = menus.build(
                [*filter(trees.is_chain, self.menu.strategies), *found], self.menu.longest
            )
        self.timed = saved["timed"]
        self.earlier = statistics.restore(saved["tallies"])
        self.classes = {drafter: np.array(counts) for drafter, counts in saved["classes"].items()}
        current = saved["current"] or {}
        # as it was saved before there were slices
        current = current if isinstance(current, dict) else {"0": current}
        self.current = {int(number): trees.parse(name) for number, name in current.items()}
        self.costs = cost.restore(saved["costs"])
        self._expect()
