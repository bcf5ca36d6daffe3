"""One set of samples rolled out by all contenders: plain, fixed chains, adaptive. Compiled first,
then turn by turn.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import cast

import jax

from benchmarks import pricing
from rlhf_jax.generation import scheduler
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.precompile import first_programs
from rlhf_jax.generation.requests import GenerationConfig, Request, RoundReport, Sample
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import candidates, cost
from rlhf_jax.generation.strategy.roofline import ModelWork
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import Layout
from rlhf_jax.types import Model, Strategy

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Case:
    """Samples to roll out and all that decodes them."""

    target: Model
    drafter: Model | None
    wanted: list[Request]
    # its strategies are the candidates; the first is used without a selector
    decoding: GenerationConfig
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Run:
    """One roll-out."""

    samples: list[Sample]
    reports: list[RoundReport]
    seconds: float


# ---- one roll-out


def run(case: Case, selector=None) -> Run:
    """Roll out; samples in request order. `pricing.Forced` may replace the selector."""
    reports = []
    start = time.perf_counter()
    chooser = cast(Selector | None, selector)
    found = generate(
        case.target, case.drafter, case.wanted, case.decoding, case.layout, reports.append, chooser
    )
    samples = {sample.sample_id: sample for sample in found}
    took = time.perf_counter() - start
    return Run(
        [samples[one] for request in case.wanted for one in request.sample_ids], reports, took
    )


def fixed(case: Case, strategy: Strategy) -> Case:
    """The case with one strategy, with programs of the same shapes."""
    others = [one for one in case.decoding.strategies if one != strategy]
    return dataclasses.replace(
        case, decoding=dataclasses.replace(case.decoding, strategies=(strategy, *others))
    )


def plain(case: Case) -> Case:
    """The case without any drafter."""
    decoding = dataclasses.replace(case.decoding, strategies=(trees.PLAIN,), history=0)
    return dataclasses.replace(case, drafter=None, decoding=decoding)


def first(case: Case, count: int) -> Case:
    """The first `count` samples of the case."""
    wanted = []
    left = count
    for request in case.wanted:
        if ids := request.sample_ids[:left]:
            wanted.append(dataclasses.replace(request, sample_ids=ids))
        left -= len(ids)
    return dataclasses.replace(case, wanted=wanted)


def prepare(case: Case, strategies: Sequence[Strategy], table: pricing.Table | None = None) -> None:
    """Compile the strategies' rounds at all row counts of the shrinking batch; time those missing
    in the table."""
    rows = samples = case.decoding.max_rows
    run(first(case, rows + 1))  # a row that is reused
    jobs, _ = first_programs(
        (case.target, case.drafter),
        samples,
        [len(case.wanted[0].prompt)],
        case.decoding,
        case.layout,
        looks_back=table is not None,
    )
    for compile_program in jobs:
        compile_program()
    while True:
        speculative_round = functools.partial(run, first(case, rows))
        pricing.compile_rounds(speculative_round, strategies, rows)
        if table is not None:
            pricing.measure(table, speculative_round, strategies, rows)
        rows, before = scheduler.row_bucket(rows // 2, samples, case.decoding, case.layout), rows
        if rows == before:
            return


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of each program that is compiled meanwhile."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_) -> None:
        if event == COMPILED:
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# ---- plain, fixed and adaptive, side by side


def compare(case: Case, options: argparse.Namespace) -> dict:
    """The figures of each contender over `options.repeats` turns, with rounds priced by one table.

    Adaptive begins each turn with its measurements from `options.earlier` roll-outs.
    """
    # programs of earlier cases: Linux grants a process only so many maps of memory
    jax.clear_caches()
    selector = new_selector(case, options.lengths)
    table = pricing.Table()
    contenders = prepared(case, selector, options.lengths, table)
    cold = learn_from(case, selector, table)
    for _ in range(options.earlier - 1):
        learn_from(case, selector, table)
    runs = {name: [] for name in ("adaptive", *contenders)}
    with compilations() as compiled:
        for turn, name in itertools.product(range(options.repeats), runs):
            tell(f"  {name}, repeat {turn + 1}")
            chooser = copy.deepcopy(selector) if name == "adaptive" else None
            runs[name].append(run(contenders.get(name, case), chooser))
    return described(case, runs, table) | {"cold": cold, "compilations": len(compiled)}


def take_turn(
    case: Case, selector: Selector, table: pricing.Table, turn: int, lengths: Sequence[int]
) -> dict:
    """One roll-out by each contender, the `turn`th of them first; the selector learns, but its
    stage is left open.
    """
    contenders = prepared(case, selector, lengths, table)
    order = collections.deque(["adaptive", *contenders])
    order.rotate(-turn)
    runs = {}
    with compilations() as compiled:
        for name in order:
            runs[name] = [run(contenders.get(name, case), selector if name == "adaptive" else None)]
    return described(case, runs, table) | {
        "compilations": len(compiled),
        "samples": runs["plain"][0].samples,
    }


def prepared(
    case: Case, selector: Selector, lengths: Sequence[int], table: pricing.Table
) -> dict[str, Case]:
    """The contenders but adaptive, all programs compiled."""
    contenders = contenders_of(case, lengths)
    tell("  compiles and times rounds")
    prepare(contenders["plain"], (trees.PLAIN,))
    prepare(case, selector.candidates.strategies, table)
    for contender in contenders.values():  # without a selector a round's results are fewer
        run(first(contender, case.decoding.max_rows))
    return contenders


def contenders_of(case: Case, lengths: Sequence[int]) -> dict[str, Case]:
    """Plain, and the chains of these lengths by each drafter of the case."""
    chains = [
        one for one in case.decoding.strategies if one.parents and len(one.parents) in lengths
    ]
    return {"plain": plain(case)} | {trees.name_of(one): fixed(case, one) for one in chains}


def new_selector(case: Case, lengths: Sequence[int]) -> Selector:
    """A selector that knows nothing yet."""
    size = case.target.embed.dtype.itemsize
    drafter = case.drafter and ModelWork.of(case.drafter.config, size)
    costs = cost.prior(jax.default_backend(), ModelWork.of(case.target.config, size), drafter)
    return Selector(candidates.build(case.decoding.strategies, max(lengths)), costs)


def learn_from(case: Case, selector: Selector, table: pricing.Table) -> dict:
    """One roll-out that the selector learns from; the trees that it then finds are compiled and
    timed."""
    tell("  adaptive learns")
    done = run(case, selector)
    selector.stage_ended(kept=1.0)
    prepare(case, selector.candidates.strategies, table)
    priced = pricing.price(table, done.reports)
    return {"seconds": done.seconds, "priced": priced, "strategies": taken([done])}


def described(case: Case, runs: dict[str, list[Run]], table: pricing.Table) -> dict:
    """The figures of runs that took turns, adaptive among them."""
    priced = {name: prices(table, done) for name, done in runs.items()}
    wall = {name: statistics.median(one.seconds for one in done) for name, done in runs.items()}
    best = min((name for name in runs if name != "adaptive"), key=wall.__getitem__)
    tokens = {name: tokens_a_round(done) for name, done in runs.items()}
    strategies = [one for one in case.decoding.strategies if one.parents]
    everything = [report for done in runs.values() for one in done for report in one.reports]
    return {
        "seconds": {name: spread([one.seconds for one in done]) for name, done in runs.items()},
        "priced": priced,
        "best": best,
        "ratio": {"wall": versus(runs["adaptive"], runs[best]), "priced": priced_ratio(priced)},
        "speedup": {
            "wall": versus(runs["plain"], runs["adaptive"]),
            "priced": quotient(priced, "plain", "adaptive"),
        },
        "tokens_per_round": tokens,
        "acceptance_by_depth": acceptance(everything, case),
        "strategies": taken(runs["adaptive"]),
        "ceiling": pricing.ceilings(table, case.decoding.max_rows, strategies, tokens),
        "differing_samples": sum(
            differing(one, runs["plain"][0]) for done in runs.values() for one in done
        ),
        "table": pricing.as_rows(table),
    }


def prices(table: pricing.Table, runs: Sequence[Run]) -> float | None:
    """The median price of the runs."""
    found = [pricing.price(table, one.reports) for one in runs]
    return None if None in found else statistics.median(cast(list[float], found))


def priced_ratio(priced: dict[str, float | None]) -> float | None:
    """Adaptive over the best of the others, None if one of them is not known."""
    others = [name for name in priced if name != "adaptive"]
    known = all(priced[name] is not None for name in others)
    return (
        quotient(priced, "adaptive", min(others, key=lambda name: priced[name] or 0.0))
        if known
        else None
    )


def quotient(figures: dict[str, float | None], above: str, below: str) -> float | None:
    """One figure over another, None if one of them is not known."""
    over = figures[above]
    under = figures[below]
    return None if over is None or not under else over / under


def versus(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, float]:
    """Seconds of ours over theirs, turn by turn."""
    return spread([one.seconds / other.seconds for one, other in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def tokens_a_round(runs: Sequence[Run]) -> float:
    """Tokens of one row in one round."""
    reports = [report for one in runs for report in one.reports]
    return sum(report.tokens for report in reports) / max(1, sum(report.live for report in reports))


def acceptance(reports: Sequence[RoundReport], case: Case) -> dict[str, list[float | None]]:
    """By drafter, as `pricing.accepted`, over all observations of these rounds."""
    drafters = dict.fromkeys(one.drafter for one in case.decoding.strategies if one.parents)
    by_drafter = {
        name: [report.observations[name] for report in reports if name in report.observations]
        for name in drafters
    }
    return {
        name: pricing.accepted(observations)
        for name, observations in by_drafter.items()
        if observations
    }


def taken(runs: Sequence[Run]) -> dict[str, int]:
    """Rounds by strategy."""
    return dict(
        collections.Counter(
            trees.name_of(report.strategy) for one in runs for report in one.reports
        )
    )


def differing(ours: Run, theirs: Run) -> int:
    """Samples whose texts are not equal."""
    return sum(
        one.tokens != other.tokens for one, other in zip(ours.samples, theirs.samples, strict=True)
    )


def tell(line: str) -> None:
    """Progress, for who waits."""
    print(line, file=sys.stderr, flush=True)
