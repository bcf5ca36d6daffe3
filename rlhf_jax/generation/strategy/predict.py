"""Predict the tokens and seconds of a round by each candidate strategy, and compare them.

All is numpy on a few hundred numbers: pure functions of the acceptance of the drafters, the costs,
and the situation.

The remaining time of a batch is predicted, too, once no waiting sample joins it. Its rows gain at
different paces and end at different times, so that most tokens per second now is not the earliest
end: rows with good drafts end first, and the others are left over in a small batch, which uses the
machine badly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.speculative import budget
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.budget import Ranking
from rlhf_jax.generation.speculative.protocol import DRAFTERS
from rlhf_jax.generation.strategy import acceptance, candidates, cost
from rlhf_jax.generation.strategy.acceptance import BANDS, CLASSES, NOTHING, Acceptance
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.generation.strategy.cost import Costs
from rlhf_jax.generation.strategy.roofline import FREE_LAG
from rlhf_jax.generation.strategy.settings import SELECTOR_SETTINGS
from rlhf_jax.types import Strategy

_FEWER = 0.95  # Factor on the rates at which drafts are counted again for their slope.
# The cells, of 2 * CLASSES, of rows of a seen prompt whose text has left their earlier one, and
# whose text follows it.
DIVERGED = 1 - CLASSES
FOLLOWING = -1
# Of the rows that will diverge, the parts that have done so by the middle of each third.
_DIVERGED_PARTS = (1 / 6, 3 / 6, 5 / 6)


@dataclasses.dataclass(frozen=True)
class Situation:
    """Hold the inputs of a choice besides the statistics."""

    rows: int  # of the program, idle ones included
    live: int  # rows that will gain tokens
    context: float  # known tokens, summed over live rows
    draft_lag: int  # most tokens that the draft cache lacks in a row
    # by drafter: [2, CLASSES] live rows by seen prompt and confidence
    classes: Mapping[str, np.ndarray]
    ready: Callable[[Strategy], bool]  # whether its programs are compiled for these rows
    most_nodes: int = trees.NODE_BUCKETS[-1]  # most nodes per row that memory allows
    failed: Collection[Strategy] = ()  # whose programs cannot be compiled
    # As `classes`, of drafters whose classes last: remaining tokens of those rows. Empty while
    # samples wait for rows.
    left: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    slice: int = 0  # the choosing slice: each keeps its own strategy
    # of `classes`: [D, CLASSES] rows of seen prompts on each of D devices
    by_device: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # [BANDS] live rows by band of their responses, in any unit; all 0 if unknown
    bands: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BANDS))


@dataclasses.dataclass(frozen=True)
class Expectations:
    """Hold the consequences of the drafters' acceptance, valid in any situation."""

    tokens: np.ndarray  # [2 * CLASSES, S] of a row's round, by seen prompt and class
    of_bands: np.ndarray  # [BANDS, 2 * CLASSES, S] factors on its drafts by position
    calibrations: dict[str, float]  # by drafter: accepted over predicted drafts
    # by drafter: chance that a text that follows its earlier one does so for one more token
    stay: dict[str, float]
    # by drafter with packed rounds: [CLASSES, longest chain] chances of drafts, and their order
    expected_gains: dict[str, np.ndarray]
    rankings: dict[str, Ranking]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Hold the expectations for S strategies in one situation, [S] each."""

    fits: np.ndarray  # bool, whether memory suffices and it compiles
    tokens: np.ndarray  # of the next round, all live rows together; 0 if it does not fit
    # Tokens, adjusted if a strategy ends a drain earlier or later than its tokens suggest.
    valued: np.ndarray
    seconds: np.ndarray  # of the next round
    steady: np.ndarray  # the same, with the draft cache's catch-up spread over the rounds it serves
    doubt: np.ndarray  # share by which a round may take more or less; 0 if such rounds were timed


class RowGroups(NamedTuple):
    """Hold C groups of rows, each of which gains at one pace until it ends."""

    # [C, S] tokens of a row's round by each strategy, the first being plain decoding
    pace: np.ndarray
    counts: np.ndarray  # [C] rows
    left: np.ndarray  # [C] remaining tokens of a row


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold a strategy for the next round, its expected figures, and those of plain decoding."""

    strategy: Strategy
    tokens: float  # expected of the round, all rows together
    seconds: float
    not_yet_compiled: Strategy | None  # a better strategy, whose programs are not compiled yet
    reason: str  # "best", "kept" (nothing is clearly better) or "probe"
    plain_rate: float  # tokens per second of plain decoding
    best_rate: float  # of the best strategy that is ready
    # Of a packed round's drafts, by class and depth (`budget.allocate_budget`).
    expected_gain: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def why(self) -> str:
        """Describe the choice in one sentence."""
        name = trees.name_of(self.strategy)
        rate = self.tokens / self.seconds
        others = f"plain {self.plain_rate:,.1f}, best {self.best_rate:,.1f}"
        predicted = f"{rate:,.1f} tokens/s predicted, {others}"
        better = ""
        if self.not_yet_compiled:
            better = f"; {trees.name_of(self.not_yet_compiled)} would be better, once compiled"
        return f"{name} ({self.reason}): {predicted}{better}"


def expect(choices: Candidates, known: Mapping[str, Acceptance]) -> Expectations:
    """Compute the consequences of the drafters' acceptance for all candidates."""
    calibrations = {name: acceptance.calibration(one) for name, one in known.items()}
    tokens = np.ones((2 * CLASSES, len(choices.strategies)))
    of_bands = np.ones((BANDS, *tokens.shape))
    for drafter, paths in choices.paths.items():
        drafts = candidates.expected_drafts(paths, known[drafter].rates)
        fewer = candidates.expected_drafts(paths, known[drafter].rates * _FEWER)
        # The power by which a factor on the rates multiplies the drafts.
        power = (np.log(fewer / drafts) / math.log(_FEWER)).reshape(2 * CLASSES, -1)
        of_bands[..., paths.columns] = known[drafter].of_bands[:, None, None] ** power
        drafts *= calibrations[drafter]
        if DRAFTERS[drafter].has_hindsight:
            # This class means that there is nothing to draft.
            drafts[:, NOTHING] = 0.0
        tokens[:, paths.columns] += drafts.reshape(2 * CLASSES, -1)

    gains = {
        drafter: budget.expected_gains(known[drafter].rates[1, ..., 0])
        for drafter in choices.packed
    }
    rankings = {
        drafter: budget.rank_drafts(gains[drafter][:, : choices.depth[columns[0]]])
        for drafter, columns in choices.packed.items()
    }
    return Expectations(
        tokens=np.minimum(tokens, 1 + choices.depth),
        of_bands=of_bands,
        calibrations=calibrations,
        stay={name: acceptance.likeliest_rate(one, 1, FOLLOWING) for name, one in known.items()},
        expected_gains=gains,
        rankings=rankings,
    )


def predict(
    choices: Candidates,
    expectations: Expectations,
    costs: Costs,
    situation: Situation,
    frozen_costs: bool = False,
) -> Predictions:
    """Predict the next round by every candidate.

    frozen_costs: whether measured times are ignored, so that nothing is in doubt.
    """
    fits = choices.nodes <= max(situation.most_nodes, int(choices.nodes[0]))
    if situation.failed:
        fits &= np.array([strategy not in situation.failed for strategy in choices.strategies])
    row_tokens = tokens_of_rows(choices, expectations, situation)
    tokens = np.where(fits, tokens_of_round(choices, situation, row_tokens), 0.0)
    seconds, steady = seconds_of_round(choices, costs, situation)

    doubt = np.zeros(len(choices.nodes))
    if not frozen_costs:
        rounds = cost.rounds_timed(costs, choices.calls, situation.rows)
        fitted = min(SELECTOR_SETTINGS.untried_doubt_fitted, costs.error)
        untried = SELECTOR_SETTINGS.untried_doubt if costs.machine == costs.prior else fitted
        unsettled = (rounds < SELECTOR_SETTINGS.settling_rounds) & (choices.drafter >= 0)
        doubt = np.where(unsettled, untried, 0.0)

    valued = tokens.copy()
    for drafter in situation.left:
        groups = group_rows(
            row_tokens[:, choices.paths[drafter].columns_and_plain],
            situation.classes[drafter].ravel(),
            situation.left[drafter].ravel(),
            stay=expectations.stay[drafter],
        )
        if len(groups.counts) > 1:
            own = choices.paths[drafter].columns
            took = steady[choices.paths[drafter].columns_and_plain]
            ends = seconds_left(groups, took, _plain_seconds(choices, costs, situation))
            valued[own] = took[1:] / ends[1:] * (situation.live * ends[0] / took[0])
    return Predictions(
        fits, tokens, valued * (tokens > 0), seconds=seconds, steady=steady, doubt=doubt
    )


def tokens_of_rows(
    choices: Candidates, expectations: Expectations, situation: Situation
) -> np.ndarray:
    """Return [2 * CLASSES, S] tokens expected of a row's round, by seen prompt and class.

    Those of packed rounds depend on how many rows of each class share the budget. The rows are
    taken to be at the positions of the situation, whatever their class.
    """
    tokens = expectations.tokens.copy()
    for drafter, columns in choices.packed.items():
        if (counts := situation.classes.get(drafter)) is not None:
            rows = situation.by_device.get(drafter)
            if rows is None:
                # All on one device: live rows in the classes' shares of the counts.
                shares = counts.sum(axis=0)[None]
                rows = shares * (situation.live / max(1, shares.sum()))
            tokens[:CLASSES, columns] = budget.packed_tokens(
                expectations.rankings[drafter],
                rows,
                situation.rows,
                nodes=choices.nodes[columns],
                factor=expectations.calibrations[drafter],
            )
            tokens[CLASSES:, columns] = tokens[:CLASSES, columns]
    if situation.bands.any():
        shares = situation.bands / situation.bands.sum()
        factors = np.tensordot(shares, expectations.of_bands, 1)
        tokens = np.minimum(1 + (tokens - 1) * factors, 1 + choices.depth)
    return tokens


def tokens_of_round(
    choices: Candidates, situation: Situation, row_tokens: np.ndarray
) -> np.ndarray:
    """Return [S] tokens expected of a round, all live rows together.

    row_tokens [2 * CLASSES, S], from `tokens_of_rows`.
    """
    # The share of rows in each cell, by drafter; the last row is plain decoding's.
    weights = np.zeros((len(choices.drafters) + 1, 2 * CLASSES))
    weights[:, 0] = 1.0
    for place, drafter in enumerate(choices.drafters):
        counts = situation.classes.get(drafter)
        # The sum of a list, which is faster than numpy's for so few.
        if counts is not None and (total := sum(counts.ravel().tolist())) > 0:
            weights[place] = counts.ravel() / total
    by_drafter = weights @ row_tokens
    return situation.live * by_drafter[choices.drafter, np.arange(len(choices.nodes))]


def seconds_of_round(
    choices: Candidates, costs: Costs, situation: Situation
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of the next round, and the seconds used for a choice, each [S].

    The latter spread the catch-up of a draft cache over the rounds that it serves.
    """
    calls = choices.calls
    rows = situation.rows
    context = situation.context
    kept_up = cost.seconds(costs, calls, rows, context, draft_lag=0)
    # Drafts never make a round shorter, whatever the measurements.
    kept_up = np.maximum(kept_up, kept_up[0])
    if situation.draft_lag <= FREE_LAG or not calls.steps.any():
        return kept_up, kept_up
    whole = np.maximum(
        cost.seconds(costs, calls, rows, context, draft_lag=situation.draft_lag), kept_up
    )
    return whole, kept_up + (whole - kept_up) / SELECTOR_SETTINGS.catch_up_rounds


def _plain_seconds(
    choices: Candidates, costs: Costs, situation: Situation
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from the number of samples to the seconds of a plain round.

    Batches shrink by halves; part of a sample takes that part of one sample's seconds.
    """
    halved = [situation.rows >> times for times in range(situation.rows.bit_length())]
    context = situation.context / situation.live
    by_halvings = cost.plain_seconds(costs, int(choices.nodes[0]), halved, context)

    def seconds(live: np.ndarray) -> np.ndarray:
        halvings = np.log2(situation.rows / np.ceil(live)).astype(int)
        return np.minimum(live, 1) * by_halvings[halvings]

    return seconds


def group_rows(pace: np.ndarray, counts: np.ndarray, left: np.ndarray, stay: float) -> RowGroups:
    """Group rows by cell, and split those that follow their earlier text by expected divergence.

    pace [2 * CLASSES, S] tokens of a row's round, by seen prompt and class; counts, left [2 *
    CLASSES]: rows, and their remaining tokens, summed; stay: the chance that a text that follows
    its earlier one does so for one more token.
    """
    # Lists are faster than arrays for so few numbers.
    rows = counts.tolist()
    tokens = left.tolist()
    some = [cell for cell, count in enumerate(rows) if count]
    group_counts = [rows[cell] for cell in some]
    spans = [tokens[cell] / rows[cell] for cell in some]
    if not rows[FOLLOWING]:
        return RowGroups(pace[some], np.array(group_counts, float), np.array(spans))

    # The point of divergence is geometric; `whole` of them never diverge within their span.
    span = spans[-1]
    whole = stay**span
    parts = [[math.log(1 - part * (1 - whole)) / math.log(stay)] for part in _DIVERGED_PARTS]
    where = np.array(parts)
    diverging = span / (where / pace[FOLLOWING] + (span - where) / pace[DIVERGED])
    shares = (whole, *[(1 - whole) / len(parts)] * len(parts))
    split = [group_counts[-1] * share for share in shares]
    return RowGroups(
        pace=np.concatenate((pace[some], diverging)),
        counts=np.array(group_counts[:-1] + split),
        left=np.array(spans + [span] * len(parts)),
    )


def seconds_left(
    rows: RowGroups, seconds: np.ndarray, plain: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return [S] seconds until the last row has ended, if each strategy is kept at first.

    seconds [S] of a round of all rows; plain(n): seconds of a plain round of n rows. The ratio of a
    round with drafts to a plain one is assumed constant. Once the first rows have ended, the others
    go on with the strategy or decode plainly, whichever is faster.
    """
    ends = rows.left[:, None] / rows.pace
    # Plain indexing, as take_along_axis is slow.
    order = np.argsort(ends, axis=0, kind="stable")
    columns = np.arange(len(seconds))
    ends = ends[order, columns]
    pace = rows.pace[order, columns]
    live = rows.counts[order[::-1]].cumsum(axis=0)[::-1]  # in each phase
    times_plain = np.minimum(seconds / seconds[0], pace[1:])
    return ends[0] * seconds + ((ends[1:] - ends[:-1]) * times_plain * plain(live[1:])).sum(axis=0)


def best_of(
    choices: Candidates,
    tokens: np.ndarray,
    seconds: np.ndarray,
    ready: Callable[[Strategy], bool],
    current: Strategy | None,
) -> tuple[int, int, int | None]:
    """Return (chosen, best, not_yet_compiled) as indices: most tokens per second of those ready.

    tokens, seconds [S] expected of a round. `current` stays unless another is clearly better
    (`SelectorSettings.switch_gain`); if the outcome is not clearly better than plain decoding
    (`gain_over_plain`), that is chosen at once. If nothing is ready it is the first candidate:
    plain, or the only one. `not_yet_compiled` is not ready, and clearly better than the chosen one;
    or None.
    """
    strategies = choices.strategies
    switch = 1 + SELECTOR_SETTINGS.switch_gain
    rate = tokens / seconds
    order = np.argsort(-rate, kind="stable").tolist()
    best = next((one for one in order if ready(strategies[one])), 0)

    chosen = best
    held = choices.place.get(current)
    if held is not None and held != best and ready(strategies[held]):
        chosen = held if rate[best] <= switch * rate[held] else best
    if rate[chosen] < (1 + SELECTOR_SETTINGS.gain_over_plain) * rate[0] and ready(strategies[0]):
        chosen = 0

    top = order[0]
    better = top == chosen or rate[top] > switch * rate[chosen]
    return chosen, best, top if better and not ready(strategies[top]) else None
