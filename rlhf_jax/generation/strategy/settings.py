"""Hold the tuning figures of the choice of a strategy, each with what chose it.

"By hand" means that no benchmark swept the figure. The commands named after "checked by" show what
the figures give together:

    python benchmarks/strategy.py --acceptance 0.5,0.7,0.9
    python benchmarks/rollout.py --part replay --samples 96
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SelectorSettings:
    """Hold when `select.Selector` switches, probes, and refits the costs."""

    # Share of tokens a second that a switch must gain; by hand, checked by benchmarks/strategy.py.
    switch_gain: float = 0.01
    # Share by which drafts must beat plain decoding: a useless drafter's prior promises less.
    # By hand, checked by benchmarks/strategy.py.
    gain_over_plain: float = 0.02
    # Rounds over which catching up a draft cache is paid off; by hand.
    catch_up_rounds: int = 16
    # Share of a stage's predicted seconds that probes may lose; by hand, held to by
    # tests/benchmarks/test_strategy_benchmark.py, which runs benchmarks/strategy.py.
    probe_share: float = 0.01
    # Drafts observed, below which a drafter is due for a probe; by hand.
    few_drafts: float = 16.0
    # Rounds without observations after which a drafter is due for a probe; by hand.
    old_rounds: int = 200
    # Rounds, about a stage, for which finished text speaks for the model that read it; by hand.
    text_rounds: int = 4000
    # Timed rounds of a call that settle its seconds, as one may have been held up; by hand.
    settling_rounds: int = 3
    # Share by which a call timed less often may differ from an unfitted machine; by hand.
    untried_doubt: float = 0.3
    # The same share for a fitted machine, unless its error is smaller; by hand.
    untried_doubt_fitted: float = 0.05
    # Timed rounds before the machine is first fitted; then at every doubling. By hand.
    first_fit: int = 8


@dataclasses.dataclass(frozen=True)
class CostSettings:
    """Hold how measured rounds correct the predicted seconds of a round."""

    # Rounds remembered of each call at each number of rows; by hand.
    window: int = 25
    # Error-free rounds that every call is taken to begin with; by hand.
    prior_rounds: int = 2
    # Weight of a log parameter's distance from the prior, one measured point being 1; by hand,
    # checked by the held-out errors of benchmarks/strategy.py.
    prior_weight: float = 0.02
    # Points, along the context, by which a fit sees one call; by hand.
    fit_points: int = 3
    # Squared log contexts, summed, at which a measured slope counts half; by hand, after a run in
    # which rounds timed at long contexts made calls look dear
    # (tests/generation/strategy/test_cost.py).
    slope_prior: float = 1.0
    # Log seconds beyond which an error says that a round was held up; by hand.
    held_up: float = 0.2


@dataclasses.dataclass(frozen=True)
class AcceptanceSettings:
    """Hold how observed drafts become acceptance rates, and when a drafter has changed."""

    # Drafts that count for one rate, older ones fade; by hand, checked by benchmarks/strategy.py.
    window: float = 1200.0
    # Predicted draft tokens that the calibration remembers; by hand.
    calibration_window: float = 256.0
    # Tokens accepted as predicted that a calibration begins with, as few rounds are luck; by hand.
    calibration_prior: float = 64.0
    # Least and largest calibration, accepted over predicted tokens; by hand.
    calibration_bounds: tuple[float, float] = (0.1, 1.5)
    # Scored drafts after which an unused drafter's calibration has lost its hold; by hand.
    calibration_fade: float = 64.0
    # Drafts expected to be right that count for one band of positions; by hand.
    band_window: float = 1200.0
    # Drafts right as expected that a band begins with, as few are luck; by hand, checked by
    # benchmarks/positions.py.
    band_prior: float = 32.0
    # Acceptance rate of rank 0 where nothing is known, and of each rank over the one before;
    # by hand.
    prior_rate: float = 0.3
    prior_rank_ratio: float = 0.3
    # Observations that the more general estimate weighs; by hand.
    prior_weight: float = 4.0
    # Highest rate; by hand.
    highest_rate: float = 0.99
    # Odds of acceptance that a sudden change multiplies or divides; by hand, held to twenty rounds
    # by tests/generation/strategy/test_acceptance.py.
    change_odds: float = 8.0
    # Log likelihood ratio at which a sudden change is believed; by hand, likewise.
    alarm: float = 9.0


@dataclasses.dataclass(frozen=True)
class CandidateSettings:
    """Hold which shapes of drafts are candidates, beside the short chains."""

    # Draft tokens of the long chains of drafters without a model; by hand.
    long_chains: tuple[int, ...] = (16, 32)
    # Draft nodes of the trees found from measured rates; by hand.
    tree_sizes: tuple[int, ...] = (4, 8, 16)
    # Expected tokens of a new tree over the shape that it replaces; by hand.
    better_tree: float = 1.02
    # Draft tokens of a packed round's chains; by hand, checked by benchmarks/rollout.py.
    packed_chain: int = 8
    # Nodes a row that packed rounds verify on average; by hand, checked by benchmarks/rollout.py.
    packed_nodes: tuple[int, ...] = (2, 3, 5)


SELECTOR_SETTINGS = SelectorSettings()
COST_SETTINGS = CostSettings()
ACCEPTANCE_SETTINGS = AcceptanceSettings()
CANDIDATE_SETTINGS = CandidateSettings()
