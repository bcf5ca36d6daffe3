"""Part d: generation of random models, by plain decoding, fixed chains and the adaptive choice."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import kernels
from benchmarks.contest import Run, fixed, new_selector, run, spread, taken, tokens_a_round
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import (
    Sizes,
    acceptance,
    decoding_case,
    layouts,
    random_model,
    with_earlier,
)
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.strategy.roofline import ModelWork
from rlhf_jax.types import ModelConfig

# Random text repeats nothing: of the first chain hardly a draft is accepted, of the second, which
# replays the text, nearly all are. They bound the loss and the gain of drafts.
STRATEGIES = ("plain", "lookup-chain-4", "replay-chain-4")


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield each model without and with kernels; the contenders take turns within a case."""
    for name in sizes.decoded:
        for how in layouts(sizes.models[name])[0]:
            yield Case(f"{name}, {how}", functools.partial(time_contenders, sizes, name, how))


def time_contenders(sizes: Sizes, name: str, how: str) -> dict[str, Any]:
    """Let plain, fixed and adaptive generation of a model take turns on the same samples.

    All have room for earlier texts, so that they share their programs.
    """
    config = sizes.models[name]
    found, why = layouts(config)
    case = decoding_case(random_model(config), sizes.decoding, found[how], *STRATEGIES)
    # the first run is the text that is replayed, and compiles plain rounds
    case = with_earlier(case, run(fixed(case, tree.PLAIN)))
    contenders = {name: fixed(case, tree.parse(name)) for name in STRATEGIES}
    selector = new_selector(case, lengths=[0])  # no tree is added, which would be another program
    for contender in contenders.values():
        run(contender)
    for _ in range(2):  # the first compiles, which the selector takes for slow rounds
        run(case, selector)
        selector.stage_ended(kept=1.0)

    runs: dict[str, list[Run]] = {name: [] for name in (*contenders, "adaptive")}
    for _, contender in itertools.product(range(sizes.decoding.repeats), runs):
        chooser = copy.deepcopy(selector) if contender == "adaptive" else None
        runs[contender].append(run(contenders.get(contender, case), chooser))
    weights = case.target.embed.dtype.itemsize
    return {
        "batch": dataclasses.asdict(sizes.decoding),
        "contenders": {name: figures(done, config, weights) for name, done in runs.items()},
        "no_kernels": why,
    }


def figures(runs: list[Run], config: ModelConfig, itemsize: int) -> dict[str, Any]:
    """Return the figures of one contender's runs.

    Bytes are those that no round can do without: all weights but the embedding, and the live caches
    up to their lengths. Seconds of a round are from the first dispatch to the last result.
    """
    model = ModelWork.of(config, itemsize)
    rates = []
    speeds = []
    for one in runs:
        reports = [report for report in one.reports if report.live]
        read = sum(model.weight_bytes + model.context_bytes * one.context for one in reports)
        span = max(report.ended for report in reports) - min(report.began for report in reports)
        rates.append(read / span)
        speeds.append(sum(report.tokens for report in reports) / one.seconds)
    rate = statistics.median(rates)
    peaks = kernels.peaks_of(jax.devices()[0].device_kind)
    return {
        "tokens_per_second": spread(speeds),
        "seconds": spread([one.seconds for one in runs]),
        "rounds": statistics.median(len(one.reports) for one in runs),
        "bytes_per_second": rate,
        "of_bandwidth": peaks and rate / peaks[0],
        "tokens_per_round": tokens_a_round(runs),
        "acceptance": acceptance(runs),
        "strategies": taken(runs),
    }
