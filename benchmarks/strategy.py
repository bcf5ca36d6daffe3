"""How well the strategy selector prices rounds and chooses, on a table of measured call times: one
JSON document.

    python benchmarks/strategy.py --acceptance 0.5,0.7,0.9 --held-out-fraction 0.5

The table (`--latency`, else that of benchmarks/tables; CSV with columns batch, seq, gamma, mode,
median_ms or mean_ms) is split at random. The cost
model is fitted to one part, and its error on the other is reported. Then the drains of some batches
are replayed, each from the table's largest batch (at most 64 rows) to one row, with chains whose
drafts are each right with the given chance: by plain decoding, each fixed length, TLT's rule,
SmartSpec's goodput, ours, and an oracle that knows true times and the chance and takes the best
expected goodput of each round. A round of length k takes one verification of k+1 tokens a row and k
drafter steps, interpolated in the table and clamped outside it; `--free-drafter` makes drafting
free, as lookup is.

What policies see of a round is drawn, and its time 2 % off; what the rows gain is the choice's
expectation, so that no policy is ahead by luck. Goodput is tokens a second of true time. Costs that
policies start from are fitted to the same part of the table. The main figures are of the stages
after the first, as in a run: acceptance and costs are known from the stage before, and a draft
model has read some of its finished text. "first_stage" has the figures of the first, in which
nothing is known of acceptance. A draft cache never lags here: no table says what catching up costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.latency_table import (
    DECODE,
    DRAFT,
    LATENCY_TABLE,
    ROWS,
    VERIFY,
    Points,
    expected,
    linear,
    possible_lengths,
    read_table,
    round_seconds,
)
from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, RANKS, Observations
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.types import Strategy

STAGES = 4  # batches after the first
PROMPT = 256  # tokens of every prompt
# of the responses: median, sigma of the logarithm, cut
TYPICAL = 290
SPREAD = 0.8
LONGEST = 4000
GRAIN = 32  # context tokens between two entries of the true times
NOISE = 0.02  # of the times that policies see
TEXT_POSITIONS = 512  # positions of finished text that a draft model reads between two stages
KEPT = 0.5  # weight of acceptance counts after a stage: the policy has moved
CLASS = 2  # of confidence, for all drafts: one is as good as another here


def main() -> None:
    """Print the document."""
    options = arguments()
    try:
        print(json.dumps(document(read_table(options.latency), options), indent=1))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", default=LATENCY_TABLE, help="CSV of measured call times")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9", help="chances that a draft is right")
    parser.add_argument(
        "--held-out-fraction", type=float, default=0.5, help="share of the table kept from the fit"
    )
    parser.add_argument("--free-drafter", action="store_true", help="drafting costs nothing")
    parser.add_argument(
        "--typical-length", type=int, default=TYPICAL, help="median response tokens"
    )
    parser.add_argument(
        "--stages", type=int, default=STAGES, help="batches drained after the first"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    options.acceptance = [float(chance) for chance in options.acceptance.split(",")]
    if (
        not all(0 <= chance <= 1 for chance in options.acceptance)
        or not 0 < options.held_out_fraction < 1
    ):
        parser.error(
            "--acceptance takes chances from 0 to 1, --held-out-fraction a share between 0 and 1."
        )
    return options


# ---- the cost model


def fitted(points: Points) -> cost.Costs:
    """Our costs after these points, started from nothing but the fastest call."""
    scale = points.seconds.min() * cost.RATES["gpu"][0]
    work = roofline.ModelWork(
        weight_bytes=scale,
        context_bytes=scale * 1e-5,
        token_flops=scale,
        context_flops=scale * 3e-5,
    )
    small = dataclasses.replace(work, weight_bytes=scale / 4, token_flops=scale / 4)
    costs = cost.prior("gpu", work, small)
    for mode, nodes, batch, seq, seconds in zip(*dataclasses.astuple(points), strict=True):
        steps = int(mode == DRAFT)
        cost.observe(
            costs,
            roofline.Call(int(nodes), steps, steps, int(nodes)),
            batch,
            batch * seq,
            0,
            seconds,
        )
    cost.fit(costs)
    return costs


def errors(costs: cost.Costs, points: Points) -> dict:
    """Relative errors of predicted seconds, by mode and in all."""
    predicted = []
    for mode, nodes, batch, seq, _ in zip(*dataclasses.astuple(points), strict=True):
        steps = np.array([mode == DRAFT], int)
        verified = np.array([nodes])
        calls = roofline.Calls(verified, steps, steps, verified)
        predicted += cost.seconds(costs, calls, batch, batch * seq, 0).tolist()
    off = np.abs(np.array(predicted) / points.seconds - 1)
    parts = {mode: off[points.mode == mode] for mode in (DECODE, VERIFY, DRAFT)} | {"all": off}
    return {
        mode: {
            "median": round(float(np.median(part)), 4),
            "p90": round(float(np.quantile(part, 0.9)), 4),
        }
        for mode, part in parts.items()
        if len(part)
    }


# ---- the true machine


@dataclasses.dataclass(frozen=True)
class Machine:
    """The true behaviour of the machine."""

    lengths: np.ndarray  # [S] draft lengths, 0 first
    # [S, rows, T] seconds of a round of 1 and more live rows, at 0, GRAIN, 2 GRAIN ... context a
    # row
    times: np.ndarray
    chance: float  # that a draft is right, if those before it are

    def seconds(self, live: int, context: float) -> np.ndarray:
        """[S] seconds of a round of `live` rows with `context` tokens in all, by length."""
        low, part = divmod(context / live / GRAIN, 1)
        pair = self.times[:, live - 1, int(low) : int(low) + 2]
        return pair[:, 0] + (pair[:, 1] - pair[:, 0]) * part

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """[S] expected of a row's round."""
        return expected(self.chance, self.lengths)


def machine_of(points: Points, chance: float, options: argparse.Namespace) -> Machine:
    """The machine of the table."""
    lengths = possible_lengths(points)
    seqs = np.arange(0, PROMPT + LONGEST + 2 * GRAIN, GRAIN)
    lives = np.arange(1, min(ROWS, points.batch.max()) + 1)
    times = round_seconds(points, lengths, lives, seqs, options.free_drafter)
    return Machine(lengths, times, chance)


def batches_of(machine: Machine, options: argparse.Namespace) -> list[np.ndarray]:
    """[rows] response tokens of the batch of each stage."""
    luck = np.random.default_rng(options.seed)
    rows = machine.times.shape[1]
    drawn = np.exp(luck.normal(np.log(options.typical_length), SPREAD, (1 + options.stages, rows)))
    return list(np.clip(drawn.astype(int), 4, LONGEST))


def free_drafter(points: Points, options: argparse.Namespace) -> bool:
    """Whether drafting costs nothing: by option, or because it is not in the table."""
    return options.free_drafter or DRAFT not in points.mode


# ---- the drain


@dataclasses.dataclass(frozen=True)
class Round:
    """A policy's view of a finished round."""

    choice: int  # index of the length
    live: int
    context: float
    accepted: np.ndarray  # [live] drafts
    # [live] drafts whose path was right before and that the text was long enough for
    tried: np.ndarray
    tokens: int
    seconds: float
    observations: Observations


# From (live rows, context, the last Round or, as a stage begins, None) to a choice.
Policy = Generator[int, tuple[int, float, Any], None]


class Drained(NamedTuple):
    """A finished batch."""

    tokens: int
    seconds: float  # true ones
    rounds: int


def drain(
    machine: Machine, batches: list[np.ndarray], policy: Policy, retrospect: bool, seed: int
) -> list[Drained]:
    """A policy's results on the batches, one after the other.

    `retrospect`: possible drafts are scored in rounds that draft nothing (lookup, replay).
    """
    luck = np.random.default_rng(seed + 1)
    next(policy)
    return [_drained(machine, ends, policy, retrospect, luck) for ends in batches]


def _drained(
    machine: Machine, ends: np.ndarray, policy: Policy, retrospect: bool, luck: np.random.Generator
) -> Drained:
    place = np.zeros(len(ends))
    spent = 0.0
    rounds = 0
    last = None
    while (rows := np.flatnonzero(place < ends)).size:
        context = float((PROMPT + place[rows]).sum())
        choice = policy.send((len(rows), context, last))
        seconds = float(machine.seconds(len(rows), context)[choice])
        last = seen(machine, choice, ends[rows] - place[rows], context, seconds, retrospect, luck)
        place[rows] += machine.tokens[choice]
        spent = spent + seconds
        rounds = rounds + 1
    return Drained(int(ends.sum()), spent, rounds)


def seen(
    machine: Machine,
    choice: int,
    left: np.ndarray,
    context: float,
    seconds: float,
    retrospect: bool,
    luck: np.random.Generator,
) -> Round:
    """A round in a policy's view, with the luck of the draws; left [live] remaining tokens of the
    texts."""
    length = int(machine.lengths[choice])
    left = np.ceil(left).astype(int)
    right = luck.random((len(left), length)) < machine.chance
    accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), left)
    tried = np.minimum(np.minimum(accepted + 1, length), left)
    observations = observations_of(right[:, :DEPTHS], left)
    if retrospect and not length:
        observations = observations_of(
            luck.random((len(left), DEPTHS)) < machine.chance, np.full(len(left), DEPTHS)
        )
    tokens = int(np.minimum(accepted + 1, left).sum())
    return Round(
        choice,
        len(left),
        context,
        accepted,
        tried,
        tokens,
        seconds * luck.lognormal(0, NOISE),
        observations,
    )


def observations_of(right: np.ndarray, left: np.ndarray, siblings: int = 1) -> Observations:
    """Observations of chains: right [n, K] bool, of texts that have left [n] tokens to come.

    `siblings`: ranks that were tried at each place; none but the first is ever right.
    """
    count, depth = right.shape
    ranks = np.full((count, DEPTHS), -1)
    offered = np.zeros((count, DEPTHS), int)
    through = np.cumprod(right, axis=1).astype(bool)
    reached = np.hstack([np.ones((count, 1), bool), through])[:, :depth] & (
        np.arange(depth) < left[:, None]
    )
    ranks[:, :depth] = np.where(through & reached, 0, -1)
    offered[:, :depth] = siblings * reached
    none = np.zeros(count, int)
    return Observations(none.astype(bool), np.full(count, CLASS), ranks, offered, band=none)


# ---- the policies


def fixed(choice: int) -> Policy:
    """The same length always."""
    while True:
        yield choice


def oracle(machine: Machine) -> Policy:
    """The best expected goodput of each round, true times and chance known."""
    live, context, _ = yield 0
    while True:
        live, context, _ = yield int(np.argmax(machine.tokens / machine.seconds(live, context)))


def tlt(lengths: np.ndarray, seed: int) -> Policy:
    """TLT's rule: nothing above 32 live rows, below by bucket of rows the length of the best
    measured goodput so far.

    Each length is tried once, then one round in ten is (BEG-MAB: a bandit by bucket, greedy but for
    a share epsilon).
    """
    # tokens, seconds
    luck = np.random.default_rng(seed + 2)
    sums = np.zeros((6, len(lengths), 2))
    live, _, _ = yield 0
    while True:
        tokens, seconds = sums[bucket := int(np.log2(live)) if live <= 32 else 0].T
        best = int(np.argmax(np.where(seconds > 0, tokens / np.maximum(seconds, 1e-9), np.inf)))
        choice = (
            (int(luck.integers(len(lengths))) if luck.random() < 0.1 else best) if live <= 32 else 0
        )
        live, _, last = yield choice
        if last is not None and last.live <= 32:
            sums[bucket, last.choice] += last.tokens, last.seconds


def smartspec(lengths: np.ndarray, target: np.ndarray, drafter: np.ndarray) -> Policy:
    """SmartSpec: the length of the best goodput by linear costs and a moving average of the
    acceptance.

    target, drafter [3]: seconds of a call = dot([context, tokens, 1]) (`linear`).
    """
    chance = 0.7  # until a draft was verified
    live, context, _ = yield 0
    while True:
        verify = target[0] * context + target[1] * live * (lengths + 1) + target[2]
        draft = lengths * (drafter @ [context, live, 1])
        live, context, last = yield int(np.argmax(expected(chance, lengths) / (verify + draft)))
        if last is not None and last.tried.sum():
            chance += 0.1 * (last.accepted.sum() / last.tried.sum() - chance)


def ours(
    lengths: np.ndarray, costs: cost.Costs, drafter: str, texts: Texts, decisions: list[float]
) -> Policy:
    """The project's selector, which begins without observations; appends the seconds of each
    decision."""
    choices = candidates.build(
        Strategy(tree.chain(length), drafter if length else "none") for length in lengths.tolist()
    )
    # The table's engine pads no nodes.
    unpadded = dataclasses.replace(choices.calls, nodes=lengths + 1, grid=lengths + 1)
    choices = dataclasses.replace(choices, calls=unpadded)
    selector = Selector(choices, costs)
    live, context, _ = yield 0
    while True:
        situation = Situation(
            live, live, context, 0, {drafter: rows_by_class(live)}, ready=lambda _: True
        )
        began = time.perf_counter()
        strategy = selector.choose(situation).strategy
        decisions.append(time.perf_counter() - began)
        live, context, last = yield selector.candidates.strategies.index(strategy)
        if last is not None:
            selector.observe_round(report(last, strategy, drafter))
        else:
            end_stage(selector, texts)
            selector.candidates = choices


@dataclasses.dataclass(frozen=True)
class Texts:
    """Finished text, of which a draft is right with this chance."""

    luck: np.random.Generator
    chance: float


def end_stage(selector: Selector, texts: Texts) -> None:
    """Between two stages: a draft model reads finished text, all fades as if the policy had
    moved.
    """
    if "model" in selector.acceptance:
        right = texts.luck.random((TEXT_POSITIONS, DEPTHS)) < texts.chance
        selector.observe_text(
            "model", observations_of(right, np.full(TEXT_POSITIONS, DEPTHS), siblings=RANKS)
        )
    selector.stage_ended(KEPT)


def rows_by_class(live: int) -> np.ndarray:
    """[2, CLASSES] rows by the facts known before they draft: all are alike."""
    counts = np.zeros((2, CLASSES), int)
    counts[0, CLASS] = live
    return counts


def report(last: Round, strategy: Strategy, drafter: str) -> RoundReport:
    """A round as the engine reports it."""
    return RoundReport(
        strategy=strategy,
        rows=last.live,
        live=last.live,
        tokens=last.tokens,
        accepted=int(last.accepted.sum()),
        drafted=last.live * len(strategy.parents),
        context=round(last.context),
        draft_lag=0,
        seconds=last.seconds,
        observations={drafter: last.observations},
    )


# ---- the document


def document(points: Points, options: argparse.Namespace) -> dict:
    """All measurements of the benchmark."""
    held_out = (
        np.random.default_rng(options.seed).random(len(points.mode)) < options.held_out_fraction
    )
    train = points[~held_out]
    test = points[held_out]
    if not {DECODE, VERIFY} <= set(train.mode) or not len(test.mode):
        raise ValueError(
            f"{options.latency} has too few points to hold out"
            f" {options.held_out_fraction:g} of them."
        )
    drains = {
        str(chance): drains_at(chance, points, train, options) for chance in options.acceptance
    }
    return {
        "table": pathlib.Path(options.latency).name,
        "drafter": "free" if free_drafter(points, options) else "the table's",
        "cost_model": {
            "trained_on": len(train.mode),
            "held_out": len(test.mode),
            "relative_error": errors(fitted(train), test),
        },
        "acceptance": drains,
    }


def drains_at(chance: float, points: Points, train: Points, options: argparse.Namespace) -> dict:
    """The drains by every policy at one acceptance, and how ours compares: first the later stages,
    then the first.
    """
    machine = machine_of(points, chance, options)
    free = free_drafter(points, options)
    decisions = []
    lengths = machine.lengths
    drafter = "lookup" if free else "model"
    draft = linear(train[train.mode == DRAFT]) * (not free)
    texts = Texts(np.random.default_rng(options.seed + 3), chance)
    policies = {
        **{
            f"length {length}" if length else "plain": fixed(i)
            for i, length in enumerate(lengths.tolist())
        },
        "tlt": tlt(lengths, options.seed),
        "smartspec": smartspec(lengths, linear(train[train.mode != DRAFT]), draft),
        "ours": ours(lengths, fitted(train), drafter, texts, decisions),
        "oracle": oracle(machine),
    }
    batches = batches_of(machine, options)
    drained = {
        name: drain(machine, batches, policy, free, options.seed)
        for name, policy in policies.items()
    }
    microseconds = {"decision_microseconds": round(statistics.median(decisions) * 1e6, 1)}
    return (
        compared({name: stages[1:] for name, stages in drained.items()})
        | microseconds
        | {"first_stage": compared({name: stages[:1] for name, stages in drained.items()})}
    )


def compared(drained: dict[str, list[Drained]]) -> dict:
    """Goodput over some stages, by policy, and how ours compares."""
    totals = {name: Drained(*np.sum(stages, axis=0).tolist()) for name, stages in drained.items()}
    goodput = {name: total.tokens / total.seconds for name, total in totals.items()}
    best_fixed = max(
        (name for name in goodput if name.startswith("length")), key=goodput.__getitem__
    )
    return {
        "tokens": int(totals["ours"].tokens),
        "rounds": {name: int(total.rounds) for name, total in totals.items()},
        "goodput": {name: round(rate, 2) for name, rate in goodput.items()},
        "best_fixed": best_fixed,
        "ours_to_oracle": round(goodput["ours"] / goodput["oracle"], 4),
        "ours_to_best_fixed": round(goodput["ours"] / goodput[best_fixed], 4),
        "ours_to_plain": round(goodput["ours"] / goodput["plain"], 4),
        "regret_seconds": round(totals["ours"].seconds - totals["oracle"].seconds, 4),
    }


if __name__ == "__main__":
    main()
