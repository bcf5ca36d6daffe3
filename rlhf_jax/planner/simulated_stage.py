"""Simulate slices that drain a stage's samples, for any placing policy.

Modelled: all live rows of a slice gain tokens at one rate, by their number and mean context; there
is at most one decision per round; a move stops the moving sample and everything on both of its
slices for its duration. Not modelled: prefills (the same for all policies), the luck of single
drafts, errors of the rates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from rlhf_jax.generation.reallocation.planner import Reallocation

ROUND = 0.01  # seconds between two checks for finished samples: about a round
RATED_EVERY = 0.2  # seconds after which rates follow the context
GRAIN = 64  # context tokens between two entries of the rates
# places of samples on no slice
WAITS = -1
FINISHED = -2


@dataclasses.dataclass(frozen=True)
class SimulatedSlice:
    """Describe one slice, and the wires between slices."""

    # [rows + 1, T] tokens per second of a row, at 0, GRAIN, 2 GRAIN ... context per row; rates[0]
    # is 0
    rates: np.ndarray
    token_bytes: float  # of context that a move carries
    bandwidth: float  # bytes per second
    latency: float  # fixed seconds of a move

    @property
    def rows(self) -> int:
        """Count the row slots of a slice."""
        return len(self.rates) - 1

    def rate(self, live: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Return the tokens per second [n] of a row, for live [n] rows of mean context [n].

        Between two entries of the rates it is linear.
        """
        low, part = np.divmod(np.minimum(context / GRAIN, self.rates.shape[1] - 1.001), 1)
        low = low.astype(int)
        return self.rates[live, low] * (1 - part) + self.rates[live, low + 1] * part

    def move_seconds(self, context: np.ndarray) -> np.ndarray:
        """Return the seconds [n] to move samples with context [n] tokens."""
        return self.latency + context * self.token_bytes / self.bandwidth


@dataclasses.dataclass
class SimulatedStage:
    """Hold the state for a policy, and `total` for those that know the future."""

    machine: SimulatedSlice
    slices: int
    prompt: float  # tokens of every prompt
    total: np.ndarray  # [n] response tokens
    done: np.ndarray  # [n] of these, known
    place: np.ndarray  # [n] slice, WAITS or FINISHED
    freed: np.ndarray  # [slices] bool
    seconds: float = 0.0  # since the stage began
    unscored: float = 0.0  # tokens of finished samples that wait for inference

    @property
    def live(self) -> np.ndarray:
        """Count the rows [slices] of each slice."""
        return np.bincount(self.place[self.place >= 0], minlength=self.slices)

    def context(self) -> np.ndarray:
        """Return the mean known tokens [slices] of a row; a fresh prompt's if there is none."""
        on = self.place >= 0
        sums = np.bincount(self.place[on], self.done[on], minlength=self.slices)
        return self.prompt + sums / np.maximum(self.live, 1)


Policy = Callable[[SimulatedStage], Reallocation]


@dataclasses.dataclass
class Outcome:
    """Hold the figures of a finished stage."""

    seconds: float = 0.0  # until the last sample has ended
    busy: float = 0.0  # slice seconds with live rows
    moves: int = 0
    moved_bytes: float = 0.0
    paused: float = 0.0  # slice seconds lost to moves
    decisions: list[float] = dataclasses.field(default_factory=list)  # seconds that each took
    # tokens that still wait for inference at the end, if idle slices did some
    unscored: float = 0.0


def simulate(
    machine: SimulatedSlice,
    slices: int,
    total: np.ndarray,
    prompt: float,
    policy: Policy,
    scoring: float = 0.0,
    charged: bool = False,
) -> Outcome:
    """Drain samples with total [n] tokens to write, after prompts of equal length.

    scoring: inference seconds per token on one slice without rows to decode. charged: whether the
    host's seconds for the first decision stop all slices, and those of a later one its own, as far
    as they exceed the round in flight there. Raises RuntimeError if a policy does something
    impossible.
    """
    count = len(total)
    nowhere = np.full(count, WAITS)
    stage = SimulatedStage(
        machine, slices, prompt, total, np.zeros(count), nowhere, np.zeros(slices, bool)
    )
    outcome = Outcome()
    pause = np.zeros(slices)
    changed = True
    while (stage.place != FINISHED).any():
        if changed:
            began = time.perf_counter()
            plan = policy(stage)
            outcome.decisions.append(time.perf_counter() - began)
            late = outcome.decisions[-1] - (ROUND if outcome.seconds else 0.0)
            pause[: 1 if outcome.seconds else slices] += max(0.0, late) * charged
            _apply(stage, plan, pause, outcome)
        live = stage.live
        rate = machine.rate(live, stage.context())
        rows = np.flatnonzero(stage.place >= 0)
        if not len(rows):
            raise RuntimeError("The policy lets samples wait for nothing.")
        places = stage.place[rows]
        ends = pause[places] + (total[rows] - stage.done[rows]) / rate[places]
        step = float(np.clip(ends.min(), ROUND, RATED_EVERY))
        gained = rate * np.maximum(step - pause, 0.0)
        pause = np.maximum(pause - step, 0.0)
        stage.done[rows] = np.minimum(stage.done[rows] + gained[places], total[rows])
        over = rows[stage.done[rows] >= total[rows] - 1e-9]
        stage.place[over] = FINISHED
        changed = len(over) > 0
        outcome.seconds += step
        stage.seconds = outcome.seconds
        outcome.busy += step * np.count_nonzero(live)
        if scoring:  # by slices that decode nothing
            scored = step * np.count_nonzero(live == 0) / scoring
            stage.unscored = max(0.0, stage.unscored - scored)
        stage.unscored += float((prompt + total[over]).sum())
    outcome.unscored = stage.unscored
    return outcome


def _apply(stage: SimulatedStage, plan: Reallocation, pause: np.ndarray, outcome: Outcome) -> None:
    """Carry out a plan; pause [slices] seconds that slices stand still."""
    if any(stage.freed[there] for _, there in plan.admissions + plan.moves):
        raise RuntimeError("A slice that was given away was to decode more.")
    for sample, there in plan.admissions:
        if stage.place[sample] != WAITS:
            raise RuntimeError("A sample was admitted twice.")
        stage.place[sample] = there
    for sample, there in plan.moves:
        context = float(stage.prompt + stage.done[sample])
        seconds = float(stage.machine.move_seconds(np.array(context)))
        pause[[stage.place[sample], there]] += seconds
        stage.place[sample] = there
        outcome.moves += 1
        outcome.moved_bytes += context * stage.machine.token_bytes
        outcome.paused += 2 * seconds
    stage.freed |= plan.freed
    if (stage.live > stage.machine.rows).any():
        raise RuntimeError("A slice has more rows than it has room for.")
