"""Find the placements whose step is predicted to be shortest, and prove that none is shorter.

A machine is cut into equal blocks, a power of two of them. A call may have any aligned part of 1,
2, 4 ... blocks. A step runs stage by stage; calls of a stage run side by side where their blocks
are apart, and one after the other where they share some. Branch and bound (Land and Doig 1960):
calls are placed one by one, and a beginning is given up once no end of it can be shorter than what
is known.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlhf_jax.placement.plan import Placement

# The calls of a step by stage: each stage begins when the one before it has ended.
STAGES = (
    ("generation",),
    ("reward_inference",),
    ("policy_inference", "reference_inference", "critic_inference"),
    ("policy_training", "critic_training"),
)


@dataclasses.dataclass(frozen=True)
class Option:
    """Hold one way to place a call, and what that takes."""

    placement: Placement
    first: int  # of its blocks
    blocks: int
    seconds: float
    always: float = 0.0  # bytes on each of its devices, from step to step
    working: float = 0.0  # and those while its stage is at work

    @property
    def memory(self) -> float:
        """Return the bytes on each of its devices while its stage is at work."""
        return self.always + self.working

    @property
    def ends(self) -> int:
        """Return the block after its last one."""
        return self.first + self.blocks


Placed = Mapping[str, Option]

# Of (a call, its option, the options that are chosen so far): seconds before the call in which
# weights come to it; 0 as long as nothing is known.
Transfer = Callable[[str, Option, Placed], float]


def no_transfer(call: str, option: Option, chosen: Placed) -> float:
    """Let weights come at once."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """Hold the ways to place each call, and what bounds them."""

    options: Mapping[str, Sequence[Option]]
    blocks: int
    memory: float  # bytes of a device
    transfer: Transfer = no_transfer

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """Return the calls of each stage, of those that there are."""
        found = [tuple(call for call in stage if call in self.options) for stage in STAGES]
        return [stage for stage in found if stage]


class SearchResult(NamedTuple):
    """Hold the best placement of all calls, its seconds, and a bound below which none is."""

    placed: dict[str, Option]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Return by which share of its seconds the choice may be longer than the best one."""
        return 1.0 - self.bound / self.seconds


def step_seconds(problem: Problem, placed: Placed) -> float:
    """Return the seconds of a step in which every call is placed."""
    return sum(stage_seconds(problem, stage, placed) for stage in problem.stages)


def stage_seconds(problem: Problem, stage: Sequence[str], placed: Placed) -> float:
    """Return the seconds until the last call of a stage has ended.

    A call begins, in the order of the stage, as soon as all its blocks are free.
    """
    free = [0.0] * problem.blocks
    for call in stage:
        option = placed[call]
        own = slice(option.first, option.ends)
        began = max(free[own]) + problem.transfer(call, option, placed)
        free[own] = [began + option.seconds] * option.blocks
    return max(free)


def fits(problem: Problem, placed: Placed) -> bool:
    """Tell whether each block has memory for what is there always, and for any stage beside it."""
    for block in range(problem.blocks):
        there = {
            call: option for call, option in placed.items() if option.first <= block < option.ends
        }
        always = sum(option.always for option in there.values())
        works = [
            sum(there[call].working for call in stage if call in there) for stage in problem.stages
        ]
        if always + max(works, default=0.0) > problem.memory:
            return False
    return True


def search(
    problem: Problem, known: Sequence[Placed] = (), limit: float = 60.0
) -> SearchResult | None:
    """Return the best choice; None where none fits. It is proved best where the gap is 0.

    known: choices to begin with, as those of presets; what is found is never longer. limit: CPU
    seconds, after which the best so far is returned with the bound that was proved.
    """
    end = time.process_time() + limit
    usable = [placed for placed in known if fits(problem, placed)]
    best = dict(min(usable, key=lambda placed: step_seconds(problem, placed))) if usable else {}
    seconds = step_seconds(problem, best) if usable else math.inf
    # Training first, as weights come from there; then the longest.
    longest = {
        call: min(option.seconds for option in options) for call, options in problem.options.items()
    }
    order = sorted(longest, key=lambda call: (not call.endswith("training"), -longest[call]))
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
        bounded = [(lower_bound(problem, one), one) for one in grown if fits(problem, one)]
        # the least bound last, and the least memory of those that are equal
        bounded.sort(key=lambda pair: (pair[0], pair[1][call].memory), reverse=True)
        waiting += [pair for pair in bounded if pair[0] < seconds]
    if not best:
        return None
    proved = min([seconds, *(bound for bound, _ in waiting)])
    return SearchResult(best, seconds, proved)


def lower_bound(problem: Problem, chosen: Placed) -> float:
    """Return seconds that no step is shorter than whose calls begin so.

    A stage takes as long as its longest call, as what is placed takes by itself, and as its work
    takes if it is spread over all blocks.
    """
    total = 0.0
    for stage in problem.stages:
        placed = [call for call in stage if call in chosen]
        left = [problem.options[call] for call in stage if call not in chosen]
        of_placed = stage_seconds(problem, placed, chosen)
        area = sum(
            chosen[call].blocks
            * (chosen[call].seconds + problem.transfer(call, chosen[call], chosen))
            for call in placed
        )
        area += sum(min(one.blocks * one.seconds for one in options) for options in left)
        longest = max((min(one.seconds for one in options) for options in left), default=0.0)
        total += max(of_placed, area / problem.blocks, longest)
    return total


def unlike_options(problem: Problem, call: str, chosen: Placed) -> list[Option]:
    """Return a call's options, one of those that differ only by a swap of equal parts.

    Two parts of one size are alike where the parts around them, each twice as large as the one
    before, hold the same calls: then those below the first common one hold none, and may be
    swapped.
    """
    found = {}
    for option in problem.options[call]:
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
