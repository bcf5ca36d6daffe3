"""Seconds of a round: a roofline that work figures start and measured rounds correct.

What was measured acts twice: as a correction of the call that was measured (`observe`), and on the
roofline's own parameters (`fit`), which price the calls that nobody has tried.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.optimize import least_squares

CATCH_UP = 8  # tokens of one draft-model call that only fills its cache
FREE_LAG = 2  # missing tokens that a draft's first call feeds anyway
WINDOW = 25  # rounds of a cell that count: older ones are forgotten
DOUBT = 2  # rounds without any error that a cell is taken to begin with
# of a parameter's distance from the prior, in log space, beside the residual of one point
PRIOR_WEIGHT = 0.02
POINTS = 3  # of a cell that `fit` sees, along its context
# squared log contexts, summed, that a size must span before its own growth with the context counts
# half
LEVEL = 1.0
HELD_UP = 0.2  # of log seconds: more than this off is no growth


@dataclasses.dataclass(frozen=True)
class Work:
    """What a model does, whatever machine it runs on."""

    weight_bytes: float  # read by a call
    context_bytes: float  # read by a call for each token of context
    token_flops: float  # of the matrix products, for each token fed
    context_flops: float  # of attention, for each token fed and token of context


class Call(NamedTuple):
    """What a round runs."""

    nodes: int  # tokens a row, on average, that the target verifies
    steps: int  # calls of the draft model before that, 0 without one
    fed: int  # tokens a row that these are fed in all
    grid: int  # tokens of a row that attention has room for: more than `nodes` in a packed round


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """S calls: the figures of `Call`, [S] each, and what follows from them, found once."""

    nodes: np.ndarray
    steps: np.ndarray
    fed: np.ndarray
    grid: np.ndarray

    @functools.cached_property
    def each(self) -> list[Call]:
        """The calls."""
        figures = self.nodes, self.steps, self.fed, self.grid
        return [Call(*map(int, one)) for one in zip(*figures, strict=True)]

    @functools.cached_property
    def kinds(self) -> list[tuple[bool, bool, bool]]:
        """Of each call, for `Costs.trends`."""
        return [_kind(call) for call in self.each]

    @functools.cached_property
    def verifies(self) -> np.ndarray:
        """Whether the target is called at all."""
        return self.nodes > 0

    @functools.cached_property
    def looks(self) -> np.ndarray:
        """Whether there are drafts that no model made."""
        return (self.nodes > 1) & (self.steps == 0)

    @functools.cached_property
    def by_model(self) -> np.ndarray:
        """Whether a model drafts."""
        return self.steps > 0

    @functools.cached_property
    def fed_a_step(self) -> np.ndarray:
        """Tokens a row that each call of the draft model is fed."""
        return self.fed / np.maximum(self.steps, 1)


class Roofline(NamedTuple):
    """Seconds of one call of a model over `nodes` tokens a row; each figure is at least 0.

    max(read + read_context * context, compute * rows * nodes + compute_context * context * grid) +
    row * rows + call, where `context` is the sum over rows (the form of EfficientRollout).
    """

    read: float  # all weights, once
    read_context: float  # keys and values of one context token
    compute: float  # matrix products of one token
    compute_context: float  # attention of one token to one context token
    row: float  # whatever each row costs
    call: float  # whatever each call costs


@dataclasses.dataclass(frozen=True)
class Machine:
    """The parameters of a round's cost."""

    target: Roofline
    drafter: Roofline | None  # of one draft-model call
    look: float  # seconds of drafting without a model


@dataclasses.dataclass
class Cell:
    """The last rounds of one call at about the same number of rows."""

    rounds: collections.deque  # of (rows, context, lag, log seconds)
    errors: collections.deque  # log of measured over roofline, of the same rounds


class Growth(NamedTuple):
    """Log seconds = slope * (log of a row's context - middle), beyond what a roofline says."""

    slope: float
    middle: float

    def __call__(self, rows: int, context: float) -> float:
        """Log seconds at this context, summed over rows."""
        return self.slope * (_length(rows, context) - self.middle)


NO_GROWTH = Growth(0.0, 0.0)


@dataclasses.dataclass
class Costs:
    """The cost model and what was measured. `corrections` are log factors, by size (of rows) and
    call.

    A size is a half octave of rows. `trends` are the corrections of calls that were not measured at
    that size, by kind (drafts at all, with a model, packed). `growth` is how seconds of a size grow
    with a row's context beyond the roofline: without it, what was timed at other contexts would be
    priced as if at those.
    """

    prior: Machine
    machine: Machine
    cells: dict[int, dict[Call, Cell]] = dataclasses.field(default_factory=dict)
    corrections: dict[int, dict[Call, float]] = dataclasses.field(default_factory=dict)
    trends: dict[int, dict[tuple, float]] = dataclasses.field(default_factory=dict)
    growth: dict[int, Growth] = dataclasses.field(default_factory=dict)
    # what one correction in ten is above, in size: how far off the roofline may be
    error: float = math.inf


# Bytes and flops a second, seconds of a row and of a call: the order of magnitude, which `fit`
# corrects.
RATES = {
    "cpu": (2e10, 1e11, 2e-4, 5e-4),
    "gpu": (1.5e12, 2.5e14, 2e-5, 1e-3),
    "tpu": (1.2e12, 2e14, 2e-5, 5e-4),
}


def prior(platform: str, target: Work, drafter: Work | None = None) -> Costs:
    """Costs before anything was measured; `platform` is "cpu", "gpu" or "tpu". Raises ValueError
    for another.

    Figures of `Work` come from the shapes of the model or from `cost_analysis` of its compiled
    programs.
    """
    if platform not in RATES:
        raise ValueError(
            f"No rates are known for the platform {platform!r}; one of {', '.join(RATES)} is"
            " needed."
        )
    line = _from_work(target, platform)
    machine = Machine(line, drafter and _from_work(drafter, platform), look=line.call)
    return Costs(machine, machine)


def _from_work(work: Work, platform: str) -> Roofline:
    bandwidth, speed, row, call = RATES[platform]
    read = work.weight_bytes / bandwidth, work.context_bytes / bandwidth
    return Roofline(*read, work.token_flops / speed, work.context_flops / speed, row, call)


def seconds(costs: Costs, calls: Calls, rows: int, context: float, lag: int) -> np.ndarray:
    """[S] seconds that a round of each of S calls takes.

    rows: slots of the program; context: known tokens summed over rows; lag: tokens that the draft
    cache lacks, of the row that lacks most.
    """
    size = _size(rows)
    known = costs.corrections.get(size, {})
    trends = costs.trends.get(size, {})
    factors = [
        known.get(call, trends.get(kind, 0.0))
        for call, kind in zip(calls.each, calls.kinds, strict=True)
    ]
    grown = costs.growth.get(size, NO_GROWTH)(rows, context)
    return _roofline(costs.machine, calls, rows, context, lag) * np.exp(np.array(factors) + grown)


def plain_seconds(costs: Costs, nodes: int, rows: list[int], context: float) -> np.ndarray:
    """[n] seconds of rounds without drafts at so many rows [n], each of so much context; quicker
    than `seconds`.
    """
    factors = []
    call = Call(nodes, 0, 0, nodes)
    slots = np.array(rows)
    length = _length(1, context)
    for size in map(_size, rows):
        known = costs.corrections.get(size, {})
        factor = known[call] if call in known else costs.trends.get(size, {}).get(_kind(call), 0.0)
        growth = costs.growth.get(size, NO_GROWTH)
        factors.append(factor + growth.slope * (length - growth.middle))
    return _call(costs.machine.target, nodes, nodes, slots, slots * context) * np.exp(factors)


def rounds_timed(costs: Costs, calls: Calls, rows: int) -> np.ndarray:
    """[S] measured rounds that the price of each call rests on, WINDOW at most; in the terms of
    `seconds`.
    """
    cells = costs.cells.get(_size(rows), {})
    return np.array([len(cells[call].rounds) if call in cells else 0 for call in calls.each])


def _roofline(machine: Machine, calls: Calls, rows, context, lag) -> np.ndarray:
    total = _call(machine.target, calls.nodes, calls.grid, rows, context) * calls.verifies
    total += machine.look * calls.looks
    if machine.drafter is not None:
        fed = calls.fed_a_step
        total += calls.steps * _call(machine.drafter, fed, fed, rows, context)
        if not isinstance(lag, int) or lag > FREE_LAG:
            missing = np.ceil(lag / CATCH_UP) * (lag > FREE_LAG) * calls.by_model
            total += missing * _call(machine.drafter, CATCH_UP, CATCH_UP, rows, context)
    return total


def _call(line: Roofline, nodes, grid, rows, context):
    reading = line.read + line.read_context * context
    computing = line.compute * rows * nodes + line.compute_context * context * grid
    return np.maximum(reading, computing) + (line.row * rows + line.call)


def _size(rows: int) -> int:
    return round(2 * math.log2(rows))


def _length(rows: int, context: float) -> float:
    """Log of the context of a row."""
    return math.log(max(context / rows, 1.0))


def _kind(call: tuple) -> tuple[bool, bool, bool]:
    nodes, steps, _, grid = call
    return nodes > 1, steps > 0, grid > nodes


def observe(costs: Costs, call: Call, rows: int, context: float, lag: int, seconds: float) -> None:
    """Take in one measured round, in the terms of `seconds` (above 0); one that was held up moves
    next to nothing.
    """
    size = _size(rows)
    cells = costs.cells.setdefault(size, {})
    cell = cells.setdefault(
        call, Cell(collections.deque(maxlen=WINDOW), collections.deque(maxlen=WINDOW))
    )
    cell.rounds.append((int(rows), float(context), int(lag), math.log(seconds)))
    cell.errors.extend(_errors(costs, size, [(*call, *cell.rounds[-1])]))
    _correct(costs, size, call)


def _errors(costs: Costs, size: int, rounds: list[tuple]) -> Iterator[float]:
    """Log of measured over predicted, of rounds (*call, rows, context, lag, log seconds) of a
    size.
    """
    *call, rows, context, lag, measured = np.array(rounds, float).reshape(-1, 8).T
    growth = costs.growth.get(size, NO_GROWTH)
    grown = np.array([growth(rows, context) for *_, rows, context, _, _ in rounds])
    return iter(
        (
            measured - np.log(_roofline(costs.machine, Calls(*call), rows, context, lag)) - grown
        ).tolist()
    )


def _correct(costs: Costs, size: int, call: Call) -> None:
    """The correction of a call: the median of its errors and of DOUBT times what others of its kind
    suggest.
    """
    trends = costs.trends.setdefault(size, {})
    corrections = costs.corrections.setdefault(size, {})
    kind = _kind(call)
    errors = [*costs.cells[size][call].errors, *[trends.get(kind, 0.0)] * DOUBT]
    corrections[call] = statistics.median(errors)
    alike = [correction for other, correction in corrections.items() if _kind(other) == kind]
    trends[kind] = sum(alike) / (len(alike) + 1)


def fit(costs: Costs) -> None:
    """Refit the roofline to all measured cells: least squares of log seconds, robust, held weakly
    to the prior.

    Takes milliseconds, so it belongs between two stages or after many rounds.
    """
    if not costs.cells:
        return
    points, known = _points(costs)
    start = _logs(costs.prior)

    def residuals(logs):
        error = np.log(_terms(_machine(logs), *points).sum(axis=0)) - known
        return np.concatenate([error, PRIOR_WEIGHT * (logs - start)])

    def slopes(logs):
        terms = _terms(_machine(logs), *points)
        return np.concatenate([(terms / terms.sum(axis=0)).T, PRIOR_WEIGHT * np.eye(len(logs))])

    robust = {"loss": "soft_l1", "f_scale": 0.05, "ftol": 1e-5, "max_nfev": 40}
    found = least_squares(residuals, _logs(costs.machine), jac=cast(Any, slopes), **robust)
    costs.machine = _machine(found.x)
    _rebase(costs)


def _terms(machine: Machine, calls: Calls, rows, context, lag) -> np.ndarray:
    """[13 or 7, n] what each parameter adds to the seconds of n rounds: their sum is `_roofline`.

    Seconds are linear in the parameters, but for the max: a term over the sum is d log seconds / d
    log parameter.
    """
    target = _call_terms(machine.target, calls.nodes, calls.grid, rows, context)
    terms = [target * calls.verifies, (machine.look * calls.looks)[None]]
    if machine.drafter is not None:
        fed = calls.fed_a_step
        missing = np.ceil(lag / CATCH_UP) * ((lag > FREE_LAG) & calls.by_model)
        draft = calls.steps * _call_terms(machine.drafter, fed, fed, rows, context)
        terms.append(
            draft + missing * _call_terms(machine.drafter, CATCH_UP, CATCH_UP, rows, context)
        )
    return np.concatenate(terms)


def _call_terms(line: Roofline, nodes, grid, rows, context) -> np.ndarray:
    once = np.ones_like(rows)
    reading = np.array([line.read * once, line.read_context * context])
    computing = np.array([line.compute * rows * nodes, line.compute_context * context * grid])
    bound = reading.sum(axis=0) >= computing.sum(axis=0)  # by memory
    return np.concatenate(
        [reading * bound, computing * ~bound, [line.row * rows, line.call * once]]
    )


def _points(costs: Costs) -> tuple[tuple[Calls, np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """((calls, rows, context, lag), log seconds), all [n]: up to POINTS parts of each cell."""
    calls = []
    errors = []
    for size, cells in costs.cells.items():
        for call, cell in cells.items():
            # by context
            rounds = sorted(zip(cell.rounds, cell.errors, strict=True), key=lambda one: one[0][1])
            length = -(-len(rounds) // POINTS)
            for part in (rounds[i : i + length] for i in range(0, len(rounds), length)):
                rows, context, lag, _ = part[len(part) // 2][0]
                calls.append((*call, rows, context, lag))
                grown = costs.growth.get(size, NO_GROWTH)(rows, context)
                errors.append(statistics.median(error for _, error in part) + grown)
    *call, rows, context, lag = np.array(calls, float).reshape(-1, 7).T
    points = Calls(*call), rows, context, lag
    return points, np.log(_roofline(costs.machine, *points)) + errors


def _logs(machine: Machine) -> np.ndarray:
    return np.log(np.maximum(_figures(machine), 1e-15))


def _machine(logs: np.ndarray) -> Machine:
    return _of_figures(np.exp(logs).tolist())


def _figures(machine: Machine) -> list[float]:
    return [*machine.target, machine.look, *(machine.drafter or ())]


def _of_figures(figures: list[float]) -> Machine:
    return Machine(
        Roofline(*figures[:6]), Roofline(*figures[7:]) if figures[7:] else None, figures[6]
    )


def _rebase(costs: Costs) -> None:
    """Growth, errors and corrections against the machine of now."""
    costs.corrections = {}
    costs.trends = {}
    costs.growth = {}
    for size, cells in costs.cells.items():
        rounds = [[(*call, *one) for one in cell.rounds] for call, cell in cells.items()]
        errors = [np.fromiter(_errors(costs, size, each), float) for each in rounds]
        lengths = [
            np.array([_length(rows, context) for rows, context, *_ in cell.rounds])
            for cell in cells.values()
        ]
        costs.growth[size] = _growth(lengths, errors)
        for (call, cell), each in zip(cells.items(), rounds, strict=True):
            cell.errors = collections.deque(_errors(costs, size, each), maxlen=WINDOW)
            _correct(costs, size, call)
    corrections = [abs(one) for known in costs.corrections.values() for one in known.values()]
    costs.error = float(np.quantile(corrections, 0.9)) if corrections else math.inf


def _growth(lengths: list[np.ndarray], errors: list[np.ndarray]) -> Growth:
    """The slope of errors against lengths, alike for all calls, each of which has a level of its
    own.
    """
    span = np.concatenate([each - each.mean() for each in lengths])
    off = np.concatenate([np.clip(each - np.median(each), -HELD_UP, HELD_UP) for each in errors])
    return Growth(float(span @ off / (span @ span + LEVEL)), float(np.concatenate(lengths).mean()))


def state(costs: Costs) -> dict:
    """All of the costs as JSON-able lists, for a checkpoint."""
    cells = [
        [size, *call, [list(entry) for entry in cell.rounds]]
        for size, cells in costs.cells.items()
        for call, cell in cells.items()
    ]
    return {"prior": _figures(costs.prior), "machine": _figures(costs.machine), "cells": cells}


def restore(saved: dict) -> Costs:
    """The costs that `state` saved."""
    costs = Costs(_of_figures(saved["prior"]), _of_figures(saved["machine"]))
    for size, nodes, steps, fed, *grid, rounds in saved["cells"]:
        # before rounds were packed none was saved
        call = Call(nodes, steps, fed, *(grid or [nodes]))
        entries = collections.deque(map(tuple, rounds), maxlen=WINDOW)
        costs.cells.setdefault(size, {})[call] = Cell(entries, collections.deque(maxlen=WINDOW))
    _rebase(costs)
    return costs
