"""Name the lanes of a timeline: the slices of generation, and devices that other calls share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlhf_jax.placement.plan import Plan


class Lanes(NamedTuple):
    """Hold the lanes of a timeline and of each call; other calls are in the first."""

    names: tuple[str, ...] = ("slice 0",)
    of_call: Mapping[str, tuple[int, ...]] = {}

    def of(self, call: str) -> tuple[int, ...]:
        """Return the numbers of the lanes in which a call works."""
        return self.of_call.get(call, (0,))


ONE_LANE = Lanes()


def lanes_of(plan: Plan) -> Lanes:
    """Name a lane for each slice of generation, and one for each further range of devices.

    Each stage of a pipeline has a lane, in each copy. Work on all devices of generation is in the
    lanes of its slices.
    """
    lanes: dict[tuple[range, int], tuple[int, ...]] = {}
    names: list[str] = []
    if generation := plan.placements.get("generation"):
        slices = tuple(range(generation.slices))
        lanes = {(generation.devices, 1): slices, (generation.devices, generation.slices): slices}
        names = [f"slice {number}" for number in slices]
    of_call = {}
    for call, placed in plan.placements.items():
        stages = placed.slices * placed.data if placed.pipelined else 1
        if (placed.devices, stages) not in lanes:
            lanes[placed.devices, stages] = tuple(range(len(names), len(names) + stages))
            each = placed.count // stages
            for first in placed.devices[::each]:
                last = first + each - 1
                names.append(f"devices {first}–{last}" if each > 1 else f"device {last}")
        of_call[call] = lanes[placed.devices, stages]
    return Lanes(tuple(names), of_call)
