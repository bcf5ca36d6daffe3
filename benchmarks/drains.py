"""Slices of a measured machine that drain a stage's samples under some policy: the simulator of
`makespan.py`.

What is modelled: all live rows of a slice gain tokens at one rate, the measured one at their number
and mean context; a decision falls at most once a round; a move stops the moving sample and
everything on both of its slices for as long as it takes. What is not: prefills (the same for all
policies), the luck of single drafts, errors of the cost model.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.latency_table import DRAFT, Points, possible_lengths, surface
from rlhf_jax.reallocation.planner import Reallocation

# The table of percentiles that benchmarks read where none is named.
LENGTHS_TABLE = str(pathlib.Path(__file__).parent / "tables" / "response_lengths.csv")
ROWS = 64
ROUND = 0.01  # seconds between two looks at what has finished: about a round
FRESH = 0.2  # seconds after which rates follow the context
GRAIN = 64  # context tokens between two entries of the rates
LOGNORMAL = "lognormal:"
LOGNORMAL_PROMPT = 200.0  # tokens of a prompt, where lengths follow such a law
ALIKE = 0.85  # correlation of normal scores of lengths of one prompt
# places of samples on no slice
WAITS = -1
FINISHED = -2


@dataclasses.dataclass(frozen=True)
class Machine:
    """One slice of the machine, and the wires between slices."""

    # [rows + 1, T] tokens a second of a row, at 0, GRAIN, 2 GRAIN ... context a row; rates[0] is 0
    rates: np.ndarray
    token_bytes: float  # of context that a move carries
    bandwidth: float  # bytes a second
    latency: float  # seconds of a move besides

    @property
    def rows(self) -> int:
        """Row slots of a slice."""
        return len(self.rates) - 1

    def rate(self, live: np.ndarray, context: np.ndarray) -> np.ndarray:
        """[n] tokens a second of a row of slices with live [n] rows of mean context [n]."""
        low, part = np.divmod(np.minimum(context / GRAIN, self.rates.shape[1] - 1.001), 1)
        low = low.astype(int)
        return self.rates[live, low] * (1 - part) + self.rates[live, low + 1] * part

    def move_seconds(self, context: np.ndarray) -> np.ndarray:
        """[n] seconds to move samples that know context [n] tokens."""
        return self.latency + context * self.token_bytes / self.bandwidth


def rates_of(
    points: Points, chance: float, longest: float, drafts: bool, free_drafter: bool
) -> np.ndarray:
    """[rows + 1, T] tokens a second of a row with the best draft length of each round, or none.

    `longest`: context tokens that must be covered; `chance`: that a draft is right, if those before
    it are.
    """
    lives = np.arange(1, min(ROWS, points.batch.max()) + 1)
    seqs = np.arange(0, longest + 2 * GRAIN, GRAIN)
    lengths = possible_lengths(points) if drafts else np.zeros(1, int)
    times = surface(points[points.mode != DRAFT], lengths + 1, lives, seqs)
    if drafts and not free_drafter and DRAFT in points.mode:
        times = times + lengths[:, None, None] * surface(
            points[points.mode == DRAFT], np.zeros(1), lives, seqs
        )
    tokens = np.cumsum(chance ** np.arange(lengths[-1] + 1))[lengths]
    best = (tokens[:, None, None] / times).max(axis=0)
    return np.concatenate([np.zeros((1, len(seqs))), best])


def read_percentiles(path: str) -> tuple[np.ndarray, np.ndarray, float]:
    """(percentiles [k], response tokens [k], mean prompt tokens) of a table; raises ValueError on
    another file.
    """
    if path.startswith(LOGNORMAL):
        return lognormal_percentiles(path)
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            f"There is no table of lengths {path}; --lengths takes the path of a CSV file, or"
            f" {LOGNORMAL}MEDIAN:SIGMA:MOST."
        )
    with pathlib.Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        prompt = next(float(row["prompt_tokens"]) for row in rows if row["percentile"] == "mean")
        table = [
            (float(row["percentile"]), float(row["response_tokens"]))
            for row in rows
            if row["percentile"] != "mean"
        ]
    except (KeyError, StopIteration, ValueError) as error:
        wanted = "columns percentile, prompt_tokens, response_tokens, and a row of means"
        raise ValueError(f"{path} is no table of lengths ({error!r}): {wanted}.") from error
    percentiles, tokens = np.array(sorted(table)).T
    return percentiles, tokens, prompt


def lognormal_percentiles(law: str) -> tuple[np.ndarray, np.ndarray, float]:
    """What `read_percentiles` returns, of a law lognormal:MEDIAN:SIGMA:MOST; raises ValueError."""
    try:
        median, sigma, most = map(float, law.removeprefix(LOGNORMAL).split(":"))
    except ValueError as error:
        raise ValueError(f"{law} is not {LOGNORMAL}MEDIAN:SIGMA:MOST, three numbers.") from error
    normal = statistics.NormalDist(math.log(median), sigma)
    percentiles = np.append(np.linspace(0, 100, 20_001)[1:-1], 100.0)
    tokens = [math.exp(normal.inv_cdf(each / 100)) for each in percentiles[:-1]]
    return percentiles, np.minimum([*tokens, most], most), LOGNORMAL_PROMPT


def draw_lengths(
    percentiles: np.ndarray,
    tokens: np.ndarray,
    count: int,
    luck: np.random.Generator,
    alike: int = 1,
) -> np.ndarray:
    """[count] response tokens: linear between the percentiles, from 1 below the first, the last one
    above it. Each `alike` in a row are of a prompt, by a normal copula of correlation ALIKE.
    """
    chance = luck.random(count)
    if alike > 1:
        own = luck.normal(0, math.sqrt(1 - ALIKE), count)
        prompt = luck.normal(0, math.sqrt(ALIKE), -(-count // alike)).repeat(alike)[:count]
        chance = np.vectorize(statistics.NormalDist().cdf)(prompt + own)
    drawn = np.interp(100 * chance, [0, *percentiles], [1, *tokens])
    return np.maximum(np.round(drawn), 1)


@dataclasses.dataclass
class Stage:
    """What a policy sees, and more: `total` is for those that know the future."""

    machine: Machine
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
        """[slices] rows."""
        return np.bincount(self.place[self.place >= 0], minlength=self.slices)

    def context(self) -> np.ndarray:
        """[slices] mean known tokens of a row, that of a fresh prompt where there is none."""
        on = self.place >= 0
        sums = np.bincount(self.place[on], self.done[on], minlength=self.slices)
        return self.prompt + sums / np.maximum(self.live, 1)


Policy = Callable[[Stage], Reallocation]


@dataclasses.dataclass
class Outcome:
    """Figures of a stage that is done."""

    seconds: float = 0.0  # until the last sample has ended
    busy: float = 0.0  # slice seconds with live rows
    moves: int = 0
    moved_bytes: float = 0.0
    paused: float = 0.0  # slice seconds lost to moves
    decisions: list[float] = dataclasses.field(default_factory=list)  # seconds that each took
    # tokens that still wait for inference at the end, where idle slices did some
    unscored: float = 0.0


def run(
    machine: Machine,
    slices: int,
    total: np.ndarray,
    prompt: float,
    policy: Policy,
    scoring: float,
    charged: bool = False,
) -> Outcome:
    """Drain the samples; scoring: seconds of inference a token on one slice that has no rows to
    decode. charged: whether the host's seconds for the first decision stop all slices, and those
    of a later one its own, as far as they are more than the round that is in flight there.
    """
    count = len(total)
    stage = Stage(
        machine,
        slices,
        prompt,
        total,
        np.zeros(count),
        np.full(count, WAITS),
        np.zeros(slices, bool),
    )
    outcome = Outcome()
    pause = np.zeros(slices)
    changed = True
    while (stage.place != FINISHED).any():
        if changed:
            began = time.perf_counter()
            plan = policy(stage)
            outcome.decisions.append(time.perf_counter() - began)
            if charged:
                in_flight = ROUND if outcome.seconds else 0.0
                late = max(0.0, outcome.decisions[-1] - in_flight)
                pause[: 1 if outcome.seconds else slices] += late
            _apply(stage, plan, pause, outcome)
        live = stage.live
        rate = machine.rate(live, stage.context())
        rows = np.flatnonzero(stage.place >= 0)
        if not len(rows):
            raise RuntimeError("The policy lets samples wait for nothing.")
        own = stage.place[rows]
        ends = pause[own] + (total[rows] - stage.done[rows]) / rate[own]
        step = float(np.clip(ends.min(), ROUND, FRESH))
        gained = rate * np.maximum(step - pause, 0.0)
        pause = np.maximum(pause - step, 0.0)
        stage.done[rows] = np.minimum(stage.done[rows] + gained[own], total[rows])
        over = rows[stage.done[rows] >= total[rows] - 1e-9]
        stage.place[over] = FINISHED
        changed = len(over) > 0
        outcome.seconds += step
        stage.seconds = outcome.seconds
        outcome.busy += step * np.count_nonzero(live)
        _score(
            stage, step * np.count_nonzero(live == 0), scoring, float((prompt + total[over]).sum())
        )
    outcome.unscored = stage.unscored
    return outcome


def _score(stage: Stage, idle: float, scoring: float, finished: float) -> None:
    """Idle slice seconds do inference on what waits for it; `finished` tokens join."""
    if scoring:
        stage.unscored = max(0.0, stage.unscored - idle / scoring)
    stage.unscored += finished


def _apply(stage: Stage, plan: Reallocation, pause: np.ndarray, outcome: Outcome) -> None:
    """Do what a plan says; pause [slices] seconds that slices stand still."""
    if any(stage.freed[there] for _, there in plan.admissions + plan.moves):
        raise RuntimeError("A slice that was given away was to decode more.")
    for sample, there in plan.admissions:
        if stage.place[sample] != WAITS:
            raise RuntimeError("A sample was admitted twice.")
        stage.place[sample] = there
    for sample, there in plan.moves:
        seconds = float(stage.machine.move_seconds(stage.prompt + stage.done[sample]))
        pause[[stage.place[sample], there]] += seconds
        stage.place[sample] = there
        outcome.moves += 1
        outcome.moved_bytes += float(stage.prompt + stage.done[sample]) * stage.machine.token_bytes
        outcome.paused += 2 * seconds
    stage.freed |= plan.freed
    if (stage.live > stage.machine.rows).any():
        raise RuntimeError("A slice has more rows than it has room for.")
