"""List the ways to place each call of a run on a machine, and what each is predicted to take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from rlhf_jax.config import derived, memory, memory_parts
from rlhf_jax.config.hardware import Hardware
from rlhf_jax.config.schema import Config
from rlhf_jax.config.sizes import PlannedRun
from rlhf_jax.config.validation import check_rows
from rlhf_jax.placement.chips import ASSUMED, ring_bandwidth
from rlhf_jax.placement.plan import CALLS, Placement, Plan, check_parts
from rlhf_jax.placement.search.branch_and_bound import Option, Placed, Problem
from rlhf_jax.placement.search.costs import PlacedRun, predict_call
from rlhf_jax.types import ModelConfigs

# Calls to which trained weights come, and of which model.
ARRIVALS = {"generation": "policy", "policy_inference": "policy", "critic_inference": "critic"}
MOST_BLOCKS = 16  # that a machine is cut into


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Hold what placements are priced for: a run, and devices that need not be here."""

    config: Config
    models: ModelConfigs
    hardware: Hardware
    base: Placement  # of all calls by the config's mesh; says dtype and kernels, too
    remat: bool

    @property
    def blocks(self) -> int:
        """Return how many parts the devices are cut into: a power of two."""
        count = self.hardware.count
        return min(MOST_BLOCKS, count & -count)

    @property
    def block_devices(self) -> int:
        """Return the devices of a block."""
        return self.hardware.count // self.blocks

    def problem(self) -> Problem:
        """Return the ways to place each call that may be best.

        Raises ValueError where no sharding splits the rows of a call evenly.
        """
        options = {call: list(self.options(call)) for call in derived.calls(self.config)}
        for call, found in options.items():
            if not found:
                raise ValueError(
                    f"No sharding of {self.hardware} splits the rows of {call} evenly; raise"
                    " training.microbatch_rows or generation.max_rows to a power of two."
                )
        limit = self.hardware.gigabytes * memory_parts.GIGA
        return Problem(options, self.blocks, limit, self.transfer_seconds)

    def options(self, call: str) -> Iterator[Option]:
        """Yield on every part of the machine the shardings of a call that no other betters.

        One is better that takes neither more seconds nor more memory, whatever is saved where
        weights need not move.
        """
        for blocks in powers_of_two(self.blocks):
            count = blocks * self.block_devices
            there = self.shardings(call, count)
            found = [self.priced(call, one) for one in there if self.can_run(call, one)]
            found.sort(key=lambda one: (one.seconds, one.always, one.working))
            kept: list[Option] = []
            for option in found:
                if not any(self.is_better(call, one, option) for one in kept):
                    kept.append(option)
            for best in kept:
                for first in range(0, self.hardware.count, count):
                    yield self.priced(call, dataclasses.replace(best.placement, first=first))

    def is_better(self, call: str, option: Option, other: Option) -> bool:
        """Tell whether an option takes no more than another, wherever other calls are."""
        seconds = option.seconds
        least = other.seconds
        model = "critic" if call.startswith("critic") else "policy"
        if call == "generation":  # to which weights always move
            seconds += self.arrival_seconds(call, option.placement)
            least += self.arrival_seconds(call, other.placement)
        elif call.endswith("_inference") and call in ARRIVALS:
            seconds += self.arrival_seconds(call, option.placement)
        elif call.endswith("_training"):
            seconds += self.arrival_seconds(f"{model}_inference", other.placement)
        less = option.always <= other.always and option.working <= other.working
        return less and seconds <= least

    def can_run(self, call: str, placement: Placement) -> bool:
        """Tell whether a call's rows come out even, and its part of the machine gets programs."""
        plan = Plan(self.hardware.count, {call: placement})
        try:
            check_parts(plan, "", self.hardware.device_kind, self.hardware.count)
            check_rows(self.config, plan, "")
        except ValueError:
            return False
        return True

    def shardings(self, call: str, count: int) -> Iterator[Placement]:
        """Yield the shardings of a call over the first devices, so many.

        `tensor` stays within a node and divides the key-value heads.
        """
        generates = call == "generation"
        slices = self.base.slices if generates else 1
        in_node = self.hardware.count // self.hardware.nodes
        models = filter(None, (self.models.policy, self.models.critic, *self.models.rewards))
        heads = math.gcd(*(model.num_kv_heads for model in models))
        for tensor in powers_of_two(min(count, in_node)):
            shards, rest = divmod(count, slices * tensor)
            if rest or heads % tensor:
                continue
            for data in [shards] if generates else powers_of_two(shards):
                if shards % data == 0:
                    shape = {"data": data, "fsdp": shards // data, "tensor": tensor}
                    yield Placement(
                        first=0,
                        count=count,
                        slices=slices,
                        **shape,
                        dtype=self.base.dtype,
                        kernels=self.base.kernels,
                    )

    def priced(self, call: str, placement: Placement) -> Option:
        """Return a placement of a call with what it takes, wherever its devices lie."""
        at_first = dataclasses.replace(placement, first=0)
        if (call, at_first) not in self._prices:
            self._prices[call, at_first] = self._price(call, at_first)
        first = placement.first // self.block_devices
        return dataclasses.replace(self._prices[call, at_first], placement=placement, first=first)

    @functools.cached_property
    def _prices(self) -> dict[tuple[str, Placement], Option]:
        return {}

    def _price(self, call: str, placement: Placement) -> Option:
        """Predict the seconds and the memory of a placement of a call."""
        run = self._run(call, placement)
        part = self.hardware.part(placement.count)
        parts = memory.plan(self.config, self.models, run.layouts, self.remat)
        always = sum(one.bytes for one in parts if one.stage == "always")
        return Option(
            placement,
            first=0,
            blocks=placement.count // self.block_devices,
            seconds=predict_call(PlacedRun(run, part), call).seconds,
            always=always,
            working=sum(one.bytes for one in parts) - always,
        )

    def _run(self, call: str, placement: Placement) -> PlannedRun:
        """Return the run as it is planned for a placement of a call."""
        layout = placement.layout(None, role="generation" if call == "generation" else "training")
        return PlannedRun(self.config, self.models, layout, self.remat, {call: layout})

    def transfer_seconds(self, call: str, option: Option, chosen: Placed) -> float:
        """Predict the seconds in which trained weights come to another call, once a step.

        None where both calls have one placement and split weights alike.
        """
        if call not in ARRIVALS:
            return 0.0
        source = chosen.get(f"{ARRIVALS[call]}_training")
        alike = source and source.placement == option.placement and call != "generation"
        return 0.0 if source is None or alike else self.arrival_seconds(call, option.placement)

    def arrival_seconds(self, call: str, placement: Placement) -> float:
        """Predict the seconds in which each device receives what it holds of trained weights."""
        run = self._run(call, placement)
        held = run.weights(getattr(self.models, ARRIVALS[call]), role=run.layout.role)
        chip = self.hardware.chip
        assert chip is not None, "Seconds are predicted of known chips alone."
        places = (self.hardware.count, self.hardware.nodes)
        bandwidth = ring_bandwidth(chip, *places, group=self.hardware.count, stride=1)
        return held / (ASSUMED.links * bandwidth)

    def placed(self, plan: Plan, name: str) -> dict[str, Option]:
        """Return the options that a plan chooses; ValueError where it does not keep to blocks."""
        for call, one in plan.placements.items():
            if one.count % self.block_devices or one.first % one.count:
                raise ValueError(
                    f"{name} places {call} on devices {one.first} to {one.devices[-1]}, and a"
                    f" search compares aligned parts of {self.block_devices} devices and their"
                    " doubles."
                )
        return {call: self.priced(call, one) for call, one in plan.placements.items()}

    def plan(self, placed: Placed) -> Plan:
        """Return the plan of chosen options."""
        chosen = {call: placed[call].placement for call in CALLS if call in placed}
        return Plan(self.hardware.count, chosen)


def powers_of_two(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to `most`."""
    number = 1
    while number <= most:
        yield number
        number *= 2
