"""Hold the tuning constants of the choice of a strategy, each with its origin.

"By hand" means that no benchmark swept the constant. The commands named after "checked by" measure
their joint effect:

    python benchmarks/strategy.py --acceptance 0.5,0.7,0.9
    python benchmarks/rollout.py --part replay --samples 96
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SelectorSettings:
    """Hold the constants of switching, probing, and refitting the costs in `select.Selector`."""

    # Least gain in tokens per second of a switch; by hand, checked by benchmarks/strategy.py.
    switch_gain: float = 0.01
    # Least gain over plain decoding: a useless drafter's prior promises less. By hand, checked by
    # benchmarks/strategy.py.
    gain_over_plain: float = 0.02
    # Rounds over which catching up a draft cache is amortised; by hand.
    catch_up_rounds: int = 16
    # Share of a stage's predicted seconds that probes may lose; by hand, held to by
    # tests/benchmarks/test_strategy_benchmark.py, which runs benchmarks/strategy.py.
    probe_share: float = 0.01
    # Observed drafts below which a drafter is due for a probe; by hand.
    few_drafts: float = 16.0
    # Rounds without observations after which a drafter is due for a probe; by hand.
    old_rounds: int = 200
    # Rounds, about a stage, for which finished text counts for the model that read it; by hand.
    text_rounds: int = 4000
    # Timed rounds of a call that settle its seconds, as one may be an outlier; by hand.
    settling_rounds: int = 3
    # Share by which a call timed less often may differ from an unfitted machine; by hand.
    untried_doubt: float = 0.3
    # The same share for a fitted machine, unless its error is smaller; by hand.
    untried_doubt_fitted: float = 0.05
    # Timed rounds before the machine is first fitted; then at every doubling. By hand.
    first_fit: int = 8


@dataclasses.dataclass(frozen=True)
class CostSettings:
    """Hold the constants of the correction of costs by measured rounds."""

    # Rounds kept of each call at each number of rows; by hand.
    window: int = 25
    # Initial error-free rounds of every call; by hand.
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
    # Log seconds beyond which an error marks a round as an outlier; by hand.
    held_up: float = 0.2


@dataclasses.dataclass(frozen=True)
class AcceptanceSettings:
    """Hold the constants of acceptance rates, and of the detection of changes."""

    # Drafts that count for one rate, older ones fade; by hand, checked by benchmarks/strategy.py.
    window: float = 1200.0
    # Predicted draft tokens in the window of the calibration; by hand.
    calibration_window: float = 256.0
    # Initial tokens of a calibration, accepted as predicted, as few rounds are luck; by hand.
    calibration_prior: float = 64.0
    # Least and largest calibration, accepted over predicted tokens; by hand.
    calibration_bounds: tuple[float, float] = (0.1, 1.5)
    # Scored drafts after which an unused drafter's calibration has faded; by hand.
    calibration_fade: float = 64.0
    # Drafts expected to be right that count for one band of positions; by hand.
    band_window: float = 1200.0
    # Initial drafts of a band, right as expected, as few are luck; by hand, checked by
    # benchmarks/positions.py.
    band_prior: float = 32.0
    # Prior acceptance rate of rank 0, and of each rank over the one before; by hand.
    prior_rate: float = 0.3
    prior_rank_ratio: float = 0.3
    # Weight of the more general estimate in observations; by hand.
    prior_weight: float = 4.0
    # Highest rate; by hand.
    highest_rate: float = 0.99
    # Odds of acceptance that a sudden change multiplies or divides; by hand, held to twenty rounds
    # by tests/generation/strategy/test_acceptance.py.
    change_odds: float = 8.0
    # Log likelihood ratio at which a sudden change is detected; by hand, likewise.
    alarm: float = 9.0


@dataclasses.dataclass(frozen=True)
class CandidateSettings:
    """Hold the shapes of drafts that are candidates, besides the short chains."""

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
