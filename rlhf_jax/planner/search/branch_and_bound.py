"""Find the placements with the shortest predicted step, and prove their optimality.

Branch and bound (Land and Doig 1960): calls are placed one by one, and a partial placement is
dropped once no completion can be shorter than the best known one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_jax.planner.search.parts import surroundings, turned
from rlhf_jax.planner.search.schedule import Option, Placed, Problem, most_bytes, stage_seconds


class SearchResult(NamedTuple):
    """Hold the best placement of all calls, its seconds, and a lower bound."""

    placed: dict[str, Option]  # none if time ran out before one was found
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Return the share of its seconds by which the choice may be longer than the best one."""
        return 1.0 - self.bound / self.seconds


def search(problem: Problem, below: float = math.inf, limit: float = 60.0) -> SearchResult | None:
    """Return the best choice; None if none fits. It is proved best if the gap is 0.

    below: seconds already reached, as by a preset; only shorter choices are searched for. limit:
    CPU seconds, after which the best so far is returned with the proved bound.
    """
    end = time.process_time() + limit
    best: dict[str, Option] = {}
    seconds = below
    order = order_of_calls(problem)
    # Partial placements, the last one next: (bound, the placed calls).
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
        bounded = [
            (least, one)
            for one in unlike_choices(problem, call, chosen)
            if (least := lower_bound(problem, one)) < seconds
            and most_bytes(problem, one) <= problem.memory
        ]
        # the least bound last, and the least memory of those that are equal
        waiting += sorted(bounded, key=lambda pair: (pair[0], pair[1][call].memory), reverse=True)
    if not best and not waiting:
        return None
    proved = min([seconds, *(bound for bound, _ in waiting)])
    return SearchResult(best, seconds, proved)


def order_of_calls(problem: Problem) -> list[str]:
    """Return the order in which calls are placed: those that constrain the others most first.

    These are generation with blocks of its own; then training, as weights come from there; then the
    longest.
    """
    longest = {call: problem.least(call, {}).seconds for call in problem.options}

    def rank(call: str) -> tuple[bool, bool, float]:
        alone = problem.lag and call == "generation"
        return not alone, not call.endswith("training"), -longest[call]

    return sorted(longest, key=rank)


def lower_bound(problem: Problem, chosen: Placed) -> float:
    """Return a lower bound of steps whose calls begin so."""
    generation, *others = (stage_bound(problem, stage, chosen) for stage in problem.stages)
    return max(generation, sum(others)) if problem.lag else generation + sum(others)


def stage_bound(problem: Problem, stage: Sequence[str], chosen: Placed) -> float:
    """Return a lower bound of a stage whose calls begin so.

    It is the longest of its longest call, its placed calls by themselves, and its work spread over
    all blocks that it may have.
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


def unlike_choices(problem: Problem, call: str, chosen: Placed) -> list[dict[str, Option]]:
    """Return the placements of one more call, one of those that differ only by equal parts.

    The chosen placements may be permuted for it, which does not change their costs.
    """
    unlike = set()
    choices = []
    for options in problem.by_part[call]:
        one = options[0]  # of a part; all that have it share the same blocks
        for begun in (chosen, turned(chosen, one)):
            if begun is None or any(map(one.shares, problem.apart(call, begun))):
                continue
            key = (one.blocks, surroundings(one, begun, problem.blocks))
            if key not in unlike:
                unlike.add(key)
                choices += [{**begun, call: option} for option in options]
    return choices
