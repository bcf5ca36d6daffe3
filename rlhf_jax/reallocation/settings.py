"""Hold the tuning figures of reallocation, each with what chose it.

"By hand" means that no benchmark swept the figure. The commands named after "checked by" show what
the figures give together:

    python benchmarks/makespan.py --slices 64 --samples 64 --acceptance 0.7 --prediction noisy:0.5
    python benchmarks/moves.py
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LengthSettings:
    """Hold what is believed of response lengths before they are seen."""

    # Responses that the prior weighs in each bin; by hand.
    prior_responses: float = 1.0
    # Tokens after which half of the responses have ended, by the prior; by hand.
    prior_median: float = 256.0
    # Standard deviation of log lengths between roll-outs of one prompt; by hand, checked by
    # benchmarks/makespan.py.
    spread: float = 0.5
    # Weight of a length that earlier roll-outs say nothing of; by hand.
    least_weight: float = 1e-4


@dataclasses.dataclass(frozen=True)
class DrainSettings:
    """Hold how far a drain is looked ahead."""

    # Chance of the outcome that the horizon reaches for every sample; by hand.
    likely: float = 0.75
    # Rows of all slices that may be expected to have more tokens than the horizon; by hand.
    rows_beyond: float = 0.1
    # Samples from which the horizon is estimated; by hand, for the time that it takes.
    horizon_samples: int = 512
    # Steps of the time in which all slices end, for the deadline; by hand.
    ticks: int = 256


@dataclasses.dataclass(frozen=True)
class PackingSettings:
    """Hold which ways to place all samples are compared; all by hand.

    Each bounds the host's time; benchmarks/makespan.py checks them together.
    """

    # Groups of slices that are packed alike, at most.
    groups: int = 16
    # Cuts of the samples in order of length, and the power by which the first are closer together.
    cuts: int = 72
    cut_power: float = 1.7
    # Cuts from one start to the next, from which the rest may be dealt out.
    start_every: int = 5
    # Numbers of slices that the rest may be dealt out to.
    sharers: int = 10
    # Parts of a slice's rows that begin one after the other.
    pieces: int = 8
    # Deadlines that are tried at once, and how often they close in.
    deadlines: int = 4
    rounds: int = 5
    # Halvings by which the deadline of a refill closes in.
    halvings: int = 12
    # Seconds later that a first placement may end for a second that all slices and rows spare.
    idle_price: float = 1e-5


@dataclasses.dataclass(frozen=True)
class PlannerSettings:
    """Hold what a decision looks at, and what a move must gain."""

    # Moves of a decision; by hand, checked by benchmarks/makespan.py, by which moves that cost
    # nothing would gain 0.8 % at most.
    most_moves: int = 4
    # Late slices that nothing helps, after which a decision looks no further; by hand.
    most_stuck: int = 4
    # Rows of a slice that is emptied to be given away; by hand.
    most_gathered: int = 8
    # Rounds of admissions of a decision, one sample a slice each; by hand.
    admission_rounds: int = 4
    # Rows that are tried of the late slice; by hand, for the time that it takes.
    rows_tried: int = 16
    # Slices that are tried for such a row; by hand, likewise.
    slices_tried: int = 12
    # Times the seconds that a move stops its slices, that it must gain; by hand.
    move_price: float = 4.0
    # Share of what is late on its two slices, that a move must gain besides; by hand, checked by
    # benchmarks/makespan.py.
    least_gain: float = 0.2
    # Deadline of admissions over the soonest possible, for what waits; by hand.
    slack: float = 1.03


@dataclasses.dataclass(frozen=True)
class TransferSettings:
    """Hold how rows travel."""

    # Bytes of a row in a piece, but for larger leaves: much fresh memory at once is slow on a CPU.
    # Chosen by benchmarks/moves.py.
    piece_bytes: int = 1 << 22


LENGTH_SETTINGS = LengthSettings()
DRAIN_SETTINGS = DrainSettings()
PACKING_SETTINGS = PackingSettings()
PLANNER_SETTINGS = PlannerSettings()
TRANSFER_SETTINGS = TransferSettings()
