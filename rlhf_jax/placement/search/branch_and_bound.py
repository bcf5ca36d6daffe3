"""Find the placements whose step is predicted to be shortest, and prove that none is shorter.

Branch and bound (Land and Doig 1960): calls are placed one by one, and a beginning is given up once
no end of it can be shorter than what is known.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_jax.placement.search.schedule import (
    Option,
    Placed,
    Problem,
    is_allowed,
    most_bytes,
    stage_seconds,
    step_seconds,
)


class SearchResult(NamedTuple):
    """Hold the best placement of all calls, its seconds, and a bound below which none is."""

    placed: dict[str, Option]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Return by which share of its seconds the choice may be longer than the best one."""
        return 1.0 - self.bound / self.seconds


def search(
    problem: Problem, known: Sequence[Placed] = (), limit: float = 60.0
) -> SearchResult | None:
    """Return the best choice; None where none fits. It is proved best where the gap is 0.

    known: choices to begin with, as those of presets; what is found is never longer. limit: CPU
    seconds, after which the best so far is returned with the bound that was proved.
    """
    end = time.process_time() + limit
    usable = [placed for placed in known if is_allowed(problem, placed)]
    best = dict(min(usable, key=lambda placed: step_seconds(problem, placed))) if usable else {}
    seconds = step_seconds(problem, best) if usable else math.inf
    order = order_of_calls(problem)
    # Beginnings, the last one next: (bound, the calls that are placed).
    waiting: list[tuple[float, dict[str, Option]]] = [(lower_bound(problem, {}), {})]
    while waiting and time.process_time() < end:
        bound, chosen = waiting.pop()
        if bound >= seconds:
            continue
        if len(chosen) == len(order):
            best = chosen
            seconds = bound
            continue
        call = order[len(chosen)]
        grown = [chosen | {call: option} for option in unlike_options(problem, call, chosen)]
        bounded = [(lower_bound(problem, one), one) for one in grown]
        # the least bound last, and the least memory of those that are equal
        bounded = [
            pair
            for pair in bounded
            if pair[0] < seconds and most_bytes(problem, pair[1]) <= problem.memory
        ]
        bounded.sort(key=lambda pair: (pair[0], pair[1][call].memory), reverse=True)
        waiting += bounded
    if not best:
        return None
    proved = min([seconds, *(bound for bound, _ in waiting)])
    return SearchResult(best, seconds, proved)


def order_of_calls(problem: Problem) -> list[str]:
    """Return the order in which calls are placed: what decides most of the others first.

    Those are generation that must have blocks of its own; then training, as weights come from
    there; then the longest.
    """
    longest = {call: problem.least(call, {}).seconds for call in problem.options}

    def rank(call: str) -> tuple[bool, bool, float]:
        alone = problem.lag and call == "generation"
        return not alone, not call.endswith("training"), -longest[call]

    return sorted(longest, key=rank)


def lower_bound(problem: Problem, chosen: Placed) -> float:
    """Return seconds that no step is shorter than whose calls begin so."""
    generation, *others = (stage_bound(problem, stage, chosen) for stage in problem.stages)
    return max(generation, sum(others)) if problem.lag else generation + sum(others)


def stage_bound(problem: Problem, stage: Sequence[str], chosen: Placed) -> float:
    """Return seconds that no stage is shorter than whose calls begin so.

    It takes as long as its longest call, as what is placed takes by itself, and as its work takes
    if it is spread over all blocks that it may have.
    """
    placed = [call for call in stage if call in chosen]
    left = [problem.least(call, chosen) for call in stage if call not in chosen]
    of_placed = stage_seconds(problem, placed, chosen)
    work = sum(
        chosen[call].blocks * (chosen[call].seconds + problem.transfer(call, chosen[call], chosen))
        for call in placed
    )
    work += sum(one.work for one in left)
    longest = max((one.seconds for one in left), default=0.0)
    taken = sum(one.blocks for one in problem.apart(stage[0], chosen)) if left else 0
    blocks = problem.blocks - (taken if stage[0] != "generation" else 0)
    return max(of_placed, work / max(blocks, 1), longest)


def unlike_options(problem: Problem, call: str, chosen: Placed) -> list[Option]:
    """Return a call's options, one of those that differ only by a swap of equal parts.

    Two parts of one size are alike where the parts around them, each twice as large as the one
    before, hold the same calls: then those below the first common one hold none, and may be
    swapped.
    """
    found = {}
    for option in problem.beside(call, chosen):
        around = []
        blocks = option.blocks
        while blocks < problem.blocks:
            first = option.first // blocks * blocks
            inside = [
                name
                for name, other in chosen.items()
                if first <= other.first and other.ends <= first + blocks
            ]
            around.append(tuple(inside))
            blocks *= 2
        shape = dataclasses.replace(option.placement, first=0)
        found.setdefault((shape, tuple(around)), option)
    return list(found.values())
