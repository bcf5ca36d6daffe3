"""Simulated machines and drafters whose costs and acceptance are known."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, RANKS, Observations
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.types import Strategy

READING = roofline.Machine(  # a GPU: few rows wait for the weights to be read
    roofline.Roofline(8e-3, 4e-8, 2.5e-5, 1e-10, 2e-5, 1e-3),
    roofline.Roofline(6e-4, 8e-9, 3e-6, 2e-11, 4e-6, 2e-4),
    1e-4,
)
CLASS = 2  # the confidence of every simulated draft


def rates(first: float, ratio: float = 0.3) -> np.ndarray:
    """[DEPTHS, RANKS] the same at every depth."""
    return np.tile(first * min(ratio, 1 - first) ** np.arange(RANKS), (DEPTHS, 1))


def draw_ranks(truth: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, 32] the rank of the true token at each depth; -1: none."""
    depth = np.minimum(np.arange(32), DEPTHS - 1)
    edges = np.cumsum(truth[depth], axis=-1)
    rank = (rng.random((rows, 32, 1)) > edges).sum(axis=-1)
    return np.where(rank < RANKS, rank, -1)


def walk(strategy: Strategy, rank: np.ndarray) -> tuple[int, list[int]]:
    """(drafts of the strategy that a row accepts, siblings offered at each depth until it fell)."""
    node = 0
    offered = []
    while below := trees.children(strategy, node):
        offered.append(len(below))
        if not 0 <= rank[len(offered) - 1] < len(below):
            return len(offered) - 1, offered
        node = below[rank[len(offered) - 1]]
    return len(offered), offered


def observed_live(strategy: Strategy, drawn: np.ndarray) -> Observations:
    """What a model's own round shows: each depth while rank 0 was right before."""
    ranks = np.full((len(drawn), DEPTHS), -1)
    offered = np.zeros((len(drawn), DEPTHS), int)
    for row, rank in enumerate(drawn):
        for depth, count in enumerate(walk(strategy, rank)[1][:DEPTHS]):
            ranks[row, depth] = rank[depth] if rank[depth] < count else -1
            offered[row, depth] = min(count, RANKS)
            if rank[depth] != 0:
                break
    return observations(ranks, offered)


def scored(truth: np.ndarray, rows: int, rng: np.random.Generator) -> Observations:
    """What looking back, or a teacher-forced pass, shows of `rows` drafts: all ranks of each
    depth.
    """
    ranks = draw_ranks(truth, rows, rng)[:, :DEPTHS]
    before = np.cumprod(np.pad(ranks[:, :-1] == 0, ((0, 0), (1, 0)), constant_values=True), axis=1)
    return observations(np.where(before, ranks, -1), RANKS * before)


def observations(ranks: np.ndarray, offered: np.ndarray) -> Observations:
    count = len(ranks)
    none = np.zeros(count, int)
    return Observations(none.astype(bool), np.full(count, CLASS), ranks, offered, band=none)


@dataclasses.dataclass
class World:
    """A machine and what its drafters are worth; rounds arrive one behind, as in the engine."""

    machine: roofline.Machine
    truth: dict[str, np.ndarray]
    noise: float = 0.03
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(1))
    ready: Callable[[Strategy], bool] = lambda strategy: True
    length: float = 200.0
    lag: int = 0
    seconds: float = 0.0  # true ones, of the rounds taken
    ideal: float = 0.0  # of the best strategy for as many expected tokens
    taken: list = dataclasses.field(default_factory=list)
    probes: int = 0
    flight: collections.deque = dataclasses.field(default_factory=collections.deque)

    def situation(self, live: int) -> Situation:
        counts = np.zeros((2, CLASSES))
        counts[0, CLASS] = live
        bucket = 1 << (live - 1).bit_length()
        classes = dict.fromkeys(self.truth, counts)
        return Situation(bucket, live, self.length * live, self.lag, classes, self.ready)

    def true_rates(
        self, choices: candidates.Candidates, at: Situation
    ) -> tuple[np.ndarray, np.ndarray]:
        """[S] expected tokens a row and true seconds."""
        tokens = np.ones(len(choices.strategies))
        for drafter, paths in choices.paths.items():
            tokens[paths.columns] += candidates.expected_drafts(paths, self.truth[drafter])
        truth = cost.Costs(self.machine, self.machine)
        return tokens, cost.seconds(truth, choices.calls, at.rows, at.context, 0)

    def round(self, selector: Selector, live: int) -> np.ndarray:
        """[live] tokens of one round that the selector chooses."""
        at = self.situation(live)
        choice = selector.choose(at)
        if len(self.flight) == 1:
            selector.observe_round(self.flight.popleft())
        strategy = choice.strategy
        drafter = strategy.drafter
        drawn = draw_ranks(self.truth.get(drafter, rates(0.0)), live, self.rng)
        accepted = np.array([walk(strategy, rank)[0] for rank in drawn])
        shown = {
            name: scored(self.truth[name], live, self.rng) for name in self.truth if name != "model"
        }
        if drafter == "model":
            shown["model"] = observed_live(strategy, drawn)
        tokens, seconds = self.true_rates(selector.candidates, at)
        i = selector.candidates.strategies.index(strategy)
        self.seconds += seconds[i]
        self.ideal += tokens[i] / (tokens / seconds).max()
        self.taken.append(strategy)
        self.probes += choice.reason == "probe"
        timed = float(seconds[i] * np.exp(self.noise * self.rng.standard_normal()))
        total = int(accepted.sum())
        drafts = live * len(strategy.parents)
        figures = (at.rows, live, total + live, total, drafts, round(at.context), self.lag, timed)
        self.flight.append(RoundReport(strategy, *figures, shown))
        return accepted + 1

    def rounds(self, selector: Selector, live: int, count: int) -> list[Strategy]:
        for _ in range(count):
            self.round(selector, live)
        return self.taken[-count:]

    def drain(self, selector: Selector, samples: int = 64) -> float:
        """The seconds that the oracle would have needed over those taken, until every sample has
        ended.
        """
        left = np.minimum(self.rng.lognormal(5.0, 0.6, samples), 600)
        while len(left):
            left = left - self.round(selector, len(left))
            left = left[left > 0]
        return self.ideal / self.seconds


def scaled(machine: roofline.Machine, factor: float) -> cost.Costs:
    """Costs whose prior is wrong: computing is `factor` times as dear as in truth, reading as
    cheap.
    """

    def wrong(line: roofline.Roofline) -> roofline.Roofline:
        return line._replace(compute=line.compute * factor, read=line.read / factor)

    assert machine.drafter is not None
    machine = roofline.Machine(wrong(machine.target), wrong(machine.drafter), machine.look)
    return cost.Costs(machine, machine)


def selector(world: World, **options) -> Selector:
    """Of strategies that treat all rows alike, as this world does."""
    choices = candidates.build(
        one for one in candidates.adaptive(world.truth).strategies if not one.packed
    )
    return Selector(choices, scaled(world.machine, 1.3), **options)


def distill_drafter(chooser: Selector, truth: np.ndarray, rows: int = 1000) -> None:
    chooser.observe_text("model", scored(truth, rows, np.random.default_rng(5)))
