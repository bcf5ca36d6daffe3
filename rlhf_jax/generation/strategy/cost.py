"""Predict the seconds of a round: a roofline, corrected by measured rounds.

Measurements act twice: as a correction of the measured call (`observe`), and on the roofline's own
parameters (`fit`), which price calls that were never tried.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from rlhf_jax.generation.strategy.roofline import RATES, Call, Calls, Machine, ModelWork, Roofline
from rlhf_jax.generation.strategy.settings import COST_SETTINGS
from rlhf_jax.types import ModelConfigs


@dataclasses.dataclass
class TimedRounds:
    """Hold the last rounds of one call at about the same number of rows."""

    rounds: collections.deque  # of (rows, context, draft_lag, log seconds)
    errors: collections.deque  # log of measured over predicted, of the same rounds


class Growth(NamedTuple):
    """Describe the growth of seconds with a row's context beyond the roofline.

    Log seconds = slope * (log of a row's context - middle).
    """

    slope: float
    middle: float

    def log_seconds(self, rows: int, context: float) -> float:
        """Return the log seconds to add at this context, summed over rows."""
        return self.slope * (_log_length(rows, context) - self.middle)


NO_GROWTH = Growth(0.0, 0.0)


@dataclasses.dataclass
class Costs:
    """Hold the cost model and its measurements, by size (a half octave of rows) and call.

    `corrections` are log factors on the machine's seconds. `trends` are those of calls that were
    not measured at that size, by `Call.kind`. `growth` is how seconds of a size grow with a row's
    context beyond the roofline: without it, times at other contexts would be taken as times at
    these.
    """

    prior: Machine
    machine: Machine
    cells: dict[int, dict[Call, TimedRounds]] = dataclasses.field(default_factory=dict)
    corrections: dict[int, dict[Call, float]] = dataclasses.field(default_factory=dict)
    trends: dict[int, dict[tuple[Any, ...], float]] = dataclasses.field(default_factory=dict)
    growth: dict[int, Growth] = dataclasses.field(default_factory=dict)
    # the 90th percentile of the size of corrections: the error of the roofline
    error: float = math.inf


def prior(platform: str, target: ModelWork, drafter: ModelWork | None = None) -> Costs:
    """Return the costs before any measurement, on "cpu", "gpu" or "tpu".

    target, drafter: the work of the policy and of a draft model, if one drafts. Raises ValueError
    for another platform.
    """
    if platform not in RATES:
        raise ValueError(
            f"No rates are known for the platform {platform!r}; one of {', '.join(RATES)} is"
            " needed."
        )
    of_target = Roofline.of_work(target, platform)
    of_drafter = drafter and Roofline.of_work(drafter, platform)
    # Drafting without a model is taken for the fixed cost of a call, until it is measured.
    machine = Machine(of_target, of_drafter, look=of_target.call)
    return Costs(machine, machine)


def prior_of_models(
    models: ModelConfigs,
    platform: str,
    itemsize: int,
    analysis: Mapping[str, float],
    rows: int,
    cache_length: int,
) -> Costs:
    """Return the costs before any measurement, from the shapes of the models.

    itemsize: bytes of a number of the weights and the cache. analysis: XLA's `cost_analysis` of a
    plain round of the policy over `rows` of `cache_length` tokens, or {}: the round reads and
    multiplies more than the necessary weights and cache. The calls of a draft model are assumed to
    do more by the same factors.
    """
    policy = ModelWork.of(models.policy, itemsize)
    read = policy.weight_bytes + rows * cache_length * policy.context_bytes
    flops = rows * (policy.token_flops + cache_length * policy.context_flops)
    # Without an analysis, or if it leaves something out, the necessary work is the least.
    more_bytes = max(analysis.get("bytes accessed", 0.0) / read, 1.0)
    more_flops = max(analysis.get("flops", 0.0) / flops, 1.0)
    drafter = models.drafter and ModelWork.of(models.drafter, itemsize)
    return prior(
        platform,
        policy.times(more_bytes, more_flops),
        drafter and drafter.times(more_bytes, more_flops),
    )


def seconds(costs: Costs, calls: Calls, rows: int, context: float, draft_lag: int) -> np.ndarray:
    """Return [S] expected seconds of a round of each of S calls.

    rows: of the program, idle ones included; context: known tokens summed over rows; draft_lag: the
    most tokens that the draft cache lacks in a row.
    """
    size = _size(rows)
    corrections = costs.corrections.get(size, {})
    trends = costs.trends.get(size, {})
    factors = [
        corrections.get(call, trends.get(kind, 0.0))
        for call, kind in zip(calls.each, calls.kinds, strict=True)
    ]
    grown = costs.growth.get(size, NO_GROWTH).log_seconds(rows, context)
    return costs.machine.seconds(calls, rows, context, draft_lag) * np.exp(
        np.array(factors) + grown
    )


def plain_seconds(costs: Costs, nodes: int, rows: list[int], context: float) -> np.ndarray:
    """Return [n] seconds of rounds without drafts, like `seconds` but faster.

    rows [n]: of each round's program; context: known tokens of one row.
    """
    factors = []
    call = Call(nodes, 0, 0, grid=nodes)
    length = _log_length(1, context)
    for size in map(_size, rows):
        factor = costs.corrections.get(size, {}).get(call)
        if factor is None:
            factor = costs.trends.get(size, {}).get(call.kind, 0.0)
        growth = costs.growth.get(size, NO_GROWTH)
        factors.append(factor + growth.slope * (length - growth.middle))
    row_counts = np.array(rows)
    plain = costs.machine.target.seconds(nodes, nodes, row_counts, row_counts * context)
    return plain * np.exp(factors)


def rounds_timed(costs: Costs, calls: Calls, rows: int) -> np.ndarray:
    """Return [S] measured rounds, up to the window, that the price of each call rests on."""
    cells = costs.cells.get(_size(rows), {})
    return np.array([len(cells[call].rounds) if call in cells else 0 for call in calls.each])


def observe(
    costs: Costs, call: Call, rows: int, context: float, draft_lag: int, seconds: float
) -> None:
    """Add one measured round, in the terms of `seconds` (above 0).

    An outlier changes almost nothing, as corrections are medians.
    """
    size = _size(rows)
    cells = costs.cells.setdefault(size, {})
    if call not in cells:
        window = COST_SETTINGS.window
        cells[call] = TimedRounds(
            collections.deque(maxlen=window), collections.deque(maxlen=window)
        )
    cell = cells[call]
    cell.rounds.append((int(rows), float(context), int(draft_lag), math.log(seconds)))
    cell.errors.extend(_errors(costs, size, [(*call, *cell.rounds[-1])]))
    _correct(costs, size, call)


def fit(costs: Costs) -> None:
    """Refit the roofline to all measured rounds by robust least squares of log seconds.

    The prior regularises it weakly. It takes milliseconds, so call it between two stages or after
    many rounds.
    """
    if not costs.cells:
        return
    # a sixth of a process's start time, and most processes never fit
    from scipy.optimize import least_squares

    calls, rows, context, draft_lag, measured = _points(costs)
    # The least is for figures of 0, which have no log.
    prior_logs, start = (
        np.log(np.maximum(machine.figures(), 1e-15)) for machine in (costs.prior, costs.machine)
    )

    def terms(logs: np.ndarray) -> np.ndarray:
        """Return [parameters, n] the seconds of each round by parameter."""
        machine = Machine.of_figures(np.exp(logs).tolist())
        return machine.terms(calls, rows, context, draft_lag)

    def residuals(logs: np.ndarray) -> np.ndarray:
        error = np.log(terms(logs).sum(axis=0)) - measured
        return np.concatenate([error, COST_SETTINGS.prior_weight * (logs - prior_logs)])

    def slopes(logs: np.ndarray) -> np.ndarray:
        parts = terms(logs)
        shares = (parts / parts.sum(axis=0)).T
        return np.concatenate([shares, COST_SETTINGS.prior_weight * np.eye(len(logs))])

    # Log errors above 0.05 count linearly, as those of outliers; the rest bounds the host's time.
    robust = {"loss": "soft_l1", "f_scale": 0.05, "ftol": 1e-5, "max_nfev": 40}
    solution = least_squares(residuals, start, jac=cast(Any, slopes), **robust)
    costs.machine = Machine.of_figures(np.exp(solution.x).tolist())
    _recorrect(costs)


def state(costs: Costs) -> dict:
    """Return all of the costs as JSON-able lists, for a checkpoint."""
    cells = [
        [size, *call, [list(entry) for entry in cell.rounds]]
        for size, cells in costs.cells.items()
        for call, cell in cells.items()
    ]
    return {"prior": costs.prior.figures(), "machine": costs.machine.figures(), "cells": cells}


def restore(saved: dict) -> Costs:
    """Return the costs that `state` saved."""
    costs = Costs(Machine.of_figures(saved["prior"]), Machine.of_figures(saved["machine"]))
    for size, nodes, steps, fed, *grid, rounds in saved["cells"]:
        # Before rounds were packed no grid was saved.
        call = Call(nodes, steps, fed, *(grid or [nodes]))
        entries = collections.deque(map(tuple, rounds), maxlen=COST_SETTINGS.window)
        errors = collections.deque(maxlen=COST_SETTINGS.window)
        costs.cells.setdefault(size, {})[call] = TimedRounds(entries, errors)
    _recorrect(costs)
    return costs


def _size(rows: int) -> int:
    """Return the half octave of rows."""
    return round(2 * math.log2(rows))


def _log_length(rows: int, context: float) -> float:
    """Return the log of one row's context."""
    return math.log(max(context / rows, 1.0))


def _errors(costs: Costs, size: int, rounds: list[tuple]) -> list[float]:
    """Return the log of measured over predicted seconds of rounds of one size.

    A round is (*call, rows, context, draft_lag, log seconds).
    """
    *call, rows, context, draft_lag, measured = np.array(rounds, float).reshape(-1, 8).T
    growth = costs.growth.get(size, NO_GROWTH)
    grown = np.array([growth.log_seconds(rows, context) for *_, rows, context, _, _ in rounds])
    predicted = costs.machine.seconds(Calls(*call), rows, context, draft_lag)
    return (measured - np.log(predicted) - grown).tolist()


def _correct(costs: Costs, size: int, call: Call) -> None:
    """Correct a call by the median of its errors and by the trend of its kind.

    The trend counts as a number of rounds from the settings.
    """
    trends = costs.trends.setdefault(size, {})
    corrections = costs.corrections.setdefault(size, {})
    kind = call.kind
    suggested = [trends.get(kind, 0.0)] * COST_SETTINGS.prior_rounds
    corrections[call] = statistics.median([*costs.cells[size][call].errors, *suggested])
    alike = [correction for other, correction in corrections.items() if other.kind == kind]
    trends[kind] = sum(alike) / (len(alike) + 1)


def _points(costs: Costs) -> tuple[Calls, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (calls, rows, context, draft_lag, log seconds), all [n], of a few parts of each call.

    Parts are along the context; the median error of each represents its rounds.
    """
    places = []
    errors = []
    for size, cells in costs.cells.items():
        growth = costs.growth.get(size, NO_GROWTH)
        for call, cell in cells.items():
            pairs = zip(cell.rounds, cell.errors, strict=True)
            rounds = sorted(pairs, key=lambda pair: pair[0][1])
            length = -(-len(rounds) // COST_SETTINGS.fit_points)
            for part in (rounds[i : i + length] for i in range(0, len(rounds), length)):
                rows, context, draft_lag, _ = part[len(part) // 2][0]
                places.append((*call, rows, context, draft_lag))
                error = statistics.median(error for _, error in part)
                errors.append(error + growth.log_seconds(rows, context))
    *call, rows, context, draft_lag = np.array(places, float).reshape(-1, 7).T
    calls = Calls(*call)
    predicted = costs.machine.seconds(calls, rows, context, draft_lag)
    return calls, rows, context, draft_lag, np.log(predicted) + errors


def _recorrect(costs: Costs) -> None:
    """Recompute growth, errors and corrections against the current machine."""
    costs.corrections = {}
    costs.trends = {}
    costs.growth = {}
    for size, cells in costs.cells.items():
        rounds = [[(*call, *each) for each in cell.rounds] for call, cell in cells.items()]
        errors = [np.array(_errors(costs, size, each)) for each in rounds]
        lengths = [
            np.array([_log_length(rows, context) for rows, context, *_ in cell.rounds])
            for cell in cells.values()
        ]

        # The slope of errors against log lengths: one for all calls, each of which has its own
        # level.
        held_up = COST_SETTINGS.held_up
        span = np.concatenate([each - each.mean() for each in lengths])
        off = np.concatenate(
            [np.clip(each - np.median(each), -held_up, held_up) for each in errors]
        )
        slope = float(span @ off / (span @ span + COST_SETTINGS.slope_prior))
        costs.growth[size] = Growth(slope, float(np.concatenate(lengths).mean()))

        for (call, cell), each in zip(cells.items(), rounds, strict=True):
            cell.errors = collections.deque(_errors(costs, size, each), maxlen=COST_SETTINGS.window)
            _correct(costs, size, call)
    sizes = [abs(each) for by_call in costs.corrections.values() for each in by_call.values()]
    costs.error = float(np.quantile(sizes, 0.9)) if sizes else math.inf
