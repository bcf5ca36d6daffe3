"""Simulate when each placed call of iterations runs, and the memory of its devices.

A machine is cut into equal blocks, of which a call has consecutive ones. Calls of a stage run side
by side on disjoint blocks, and one after the other if they share some.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlhf_jax.placement.plan import Placement

# The calls of a step by the suffixes of their names: each stage begins when the previous one has
# ended.
STAGES = ("generation", "reward_inference", "_inference", "_training")
STEADY = 4  # iterations after which each takes as long as the previous one


@dataclasses.dataclass(frozen=True)
class Option:
    """Hold one way to place a call, and its costs."""

    placement: Placement
    first: int  # of its blocks
    blocks: int
    seconds: float
    always: float = 0.0  # bytes on each of its devices, from step to step
    working: float = 0.0  # and those while it is at work
    kept: float = 0.0  # of these, those that stay while other calls of its stage work
    arrival: float = 0.0  # seconds in which trained weights arrive

    @property
    def memory(self) -> float:
        """Return the bytes on each of its devices while it is at work."""
        return self.always + self.working

    @property
    def ends(self) -> int:
        """Return the block after its last one."""
        return self.first + self.blocks

    def shares(self, other: Option) -> bool:
        """Return whether both have a block."""
        return self.first < other.ends and other.first < self.ends

    def at(self, first: int) -> Option:
        """Return the option on the same number of blocks from `first` on."""
        devices = self.placement.count // self.blocks
        placement = dataclasses.replace(self.placement, first=first * devices)
        return dataclasses.replace(self, placement=placement, first=first)


Placed = Mapping[str, Option]

# From (a call, its option, the options chosen so far) to the seconds before the call in which
# weights arrive; 0 if nothing is known.
Transfer = Callable[[str, Option, Placed], float]


class Least(NamedTuple):
    """Hold the least costs of a call, wherever it is placed."""

    seconds: float
    work: float  # seconds, each times the busy blocks


@dataclasses.dataclass(frozen=True)
class Problem:
    """Hold the ways to place each call, and the data of bounds."""

    options: Mapping[str, Sequence[Option]]
    blocks: int
    memory: float  # bytes of a device
    transfer: Transfer = lambda call, option, chosen: 0.0
    # 1: generation prefetches samples of the next step concurrently, on separate blocks
    lag: int = 0

    @functools.cached_property
    def stages(self) -> list[tuple[str, ...]]:
        """Return the calls of each stage that has any."""
        by_stage: dict[str, list[str]] = {stage: [] for stage in STAGES}
        for call in self.options:
            by_stage[next(stage for stage in STAGES if call.endswith(stage))].append(call)
        return [tuple(calls) for calls in by_stage.values() if calls]

    @functools.cached_property
    def by_part(self) -> dict[str, list[list[Option]]]:
        """Return the options of each call by the part that they have.

        They are the same on all parts of one size.
        """
        parts: dict[str, dict[tuple[int, int], list[Option]]] = {}
        for call, options in self.options.items():
            own = parts.setdefault(call, {})
            for one in options:
                own.setdefault((one.first, one.blocks), []).append(one)
        return {call: list(own.values()) for call, own in parts.items()}

    def apart(self, call: str, chosen: Placed) -> list[Option]:
        """Return the chosen options whose blocks a call must not share."""
        if not self.lag:
            return []
        if call == "generation":
            return [option for name, option in chosen.items() if name != call]
        return [chosen["generation"]] if "generation" in chosen else []

    def least(self, call: str, chosen: Placed) -> Least:
        """Return the least costs of a call that is not placed."""
        apart = self.apart(call, chosen)
        key = (call, tuple({(one.first, one.blocks) for one in apart}))
        if key not in self._least:
            options = [one for one in self.options[call] if not any(map(one.shares, apart))]
            self._least[key] = Least(
                min((one.seconds for one in options), default=float("inf")),
                min((one.seconds * one.blocks for one in options), default=float("inf")),
            )
        return self._least[key]

    @functools.cached_property
    def _least(self) -> dict[tuple, Least]:
        return {}


class Event(NamedTuple):
    """Hold when a call of an iteration has its devices, or when weights arrive there."""

    call: str
    iteration: int
    devices: range
    began: float  # seconds since the first iteration
    ended: float
    receives: bool = False


def simulate(problem: Problem, placed: Placed, iterations: int) -> list[Event]:
    """Simulate iterations event by event, from a cold start.

    A stage begins when the previous one has ended; generation when the update of its weights has. A
    block does one thing at a time; weights move to the blocks of a call just before it, one call
    after the other.
    """
    free = [0.0] * problem.blocks
    last = len(problem.stages) - 1
    ended: dict[tuple[int, int], float] = {}  # by stage and iteration
    events = []
    for iteration in range(iterations):
        for index, stage in enumerate(problem.stages):
            needs = [(index - 1, iteration), (last, iteration - 1)]
            if index == 0:
                needs = [(last, iteration - 1 - problem.lag)]
            ready = max(ended.get(need, 0.0) for need in needs)
            ends = []
            for call in stage:
                option = placed[call]
                own = slice(option.first, option.ends)
                began = max(ready, *free[own])
                moved = began + problem.transfer(call, option, placed)
                ends.append(moved + option.seconds)
                free[own] = [ends[-1]] * option.blocks
                event = functools.partial(Event, call, iteration, option.placement.devices)
                if moved > began:
                    events.append(event(began, moved, receives=True))
                events.append(event(moved, ends[-1]))
            ended[index, iteration] = max(ends)
    return events


def steady_seconds(events: Sequence[Event]) -> float:
    """Return the seconds per step in the steady state, of `STEADY` simulated iterations."""
    ends = [
        max(event.ended for event in events if event.iteration == iteration)
        for iteration in (STEADY - 2, STEADY - 1)
    ]
    return ends[1] - ends[0]


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


def most_bytes(problem: Problem, placed: Placed) -> float:
    """Return the bytes of the fullest device."""
    sizes = [0.0]
    for block in range(problem.blocks):
        there = {
            call: option for call, option in placed.items() if option.first <= block < option.ends
        }
        sizes.append(sum(one.always for one in there.values()) + bytes_at_work(there))
    return max(sizes)


def bytes_at_work(there: Placed) -> float:
    """Return the most bytes of calls on one device while they work.

    Calls of a stage take turns. Reward models score while generation's weights are still there, and
    the critic trains while the policy's gradients wait.
    """
    generation = [option for call, option in there.items() if call == "generation"]
    inference = [option for call, option in there.items() if call.endswith("_inference")]
    training = [option for call, option in there.items() if call.endswith("_training")]
    weights = sum(one.kept for one in generation) if "reward_inference" in there else 0.0
    copies = max(weights, sum(one.kept for one in inference))
    waiting = sum(one.kept for one in training)
    return max(
        sum(one.working for one in generation),
        copies + max((one.working - one.kept for one in inference), default=0.0),
        max((one.working + waiting - one.kept for one in training), default=0.0),
    )
