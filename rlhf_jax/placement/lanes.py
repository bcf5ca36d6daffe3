"""Name the lanes of a timeline: the slices of generation, and devices that other calls share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlhf_jax.placement.plan import Plan


class Lanes(NamedTuple):
    """Hold the lanes of a timeline, and those in which each call works; others are in the first."""

    names: tuple[str, ...] = ("slice 0",)
    of_call: Mapping[str, tuple[int, ...]] = {}

    def of(self, call: str) -> tuple[int, ...]:
        """Return the numbers of the lanes in which a call works."""
        return self.of_call.get(call, (0,))


ONE_LANE = Lanes()


def lanes_of(plan: Plan) -> Lanes:
    """Name a lane for each slice of generation, and one for each range of devices beside.

    What works on all devices of generation does so in the lanes of its slices.
    """
    generation = plan.placements["generation"]
    slices = tuple(range(generation.slices))
    lanes = {generation.devices: slices}
    names = [f"slice {number}" for number in slices]
    for placed in plan.placements.values():
        if placed.devices not in lanes:
            lanes[placed.devices] = (len(names),)
            last = placed.devices[-1]
            several = f"devices {placed.first}–{last}"
            names.append(several if placed.count > 1 else f"device {last}")
    of_call = {call: lanes[placed.devices] for call, placed in plan.placements.items()}
    return Lanes(tuple(names), of_call)
