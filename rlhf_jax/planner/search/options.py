"""List the ways to place each call of a run on a machine, with their predicted costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.placement.pipelined import is_pipelined, trained
from rlhf_jax.placement.plan import Placement, Plan, check_parts
from rlhf_jax.planner.chips import is_box, ring_bandwidth
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.search.costs import PlacedRun, predict_call
from rlhf_jax.planner.search.parts import is_aligned, part_sizes, part_starts, powers_of_two
from rlhf_jax.planner.search.pipelines import JointTraining, joint_training
from rlhf_jax.planner.search.schedule import Option, Placed, Problem
from rlhf_jax.setup.validation import check_rows
from rlhf_jax.types import ModelConfigs

MOST_BLOCKS = 16  # into which a machine is cut


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Hold the basis of prices of placements: a run, and absent devices."""

    config: Config
    models: ModelConfigs
    hardware: Hardware
    base: Placement  # of all calls by the config's mesh; sets dtype and kernels, too
    remat: bool
    room: float = 1.0  # the share of a device's memory that a plan may take
    # cache of `held_bytes`, which does not depend on the chip's speed
    held: dict[tuple, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Return the number of parts that the devices are cut into: a power of two."""
        count = self.hardware.count
        return min(MOST_BLOCKS, count & -count)

    @property
    def block_devices(self) -> int:
        """Return the devices of a block."""
        return self.hardware.count // self.blocks

    @property
    def memory_limit(self) -> float:
        """Return the usable bytes of a device for a plan."""
        return self.room * self.hardware.gigabytes * memory_parts.GIGA

    def problem(self) -> Problem:
        """Return the ways to place each call that may be optimal.

        Raises ValueError if no sharding splits the rows of a call evenly.
        """
        options = {call: list(self.options(call)) for call in self.calls}
        for call, options_of_call in options.items():
            if not options_of_call:
                in_slice = self.hardware.count // self.base.slices
                raise ValueError(
                    f"No sharding of {self.hardware} splits the rows of {call} evenly: set"
                    f" generation.max_rows to a multiple of {in_slice}, or name another number of"
                    " devices."
                )
        return Problem(
            options,
            self.blocks,
            self.memory_limit,
            transfer=self.transfer_seconds,
            lag=self.config.training.lag,
        )

    def options(self, call: str) -> Iterator[Option]:
        """Yield the Pareto-optimal shardings of a call on every part of the machine.

        An option is better if it takes neither more seconds nor more memory, even without the
        savings when weights need not move.
        """
        for blocks in part_sizes(self.blocks):
            starts = part_starts(blocks, self.blocks)
            count = blocks * self.block_devices
            if not self.are_boxes(starts, count):
                continue
            there = self.shardings(call, count)
            candidates = [self.priced(call, one) for one in there if self.can_run(call, one)]
            candidates.sort(key=lambda one: (one.seconds, one.always, one.working))
            kept: list[Option] = []
            for option in candidates:
                if not any(self.is_better(call, one, option) for one in kept):
                    kept.append(option)
            for best in kept:
                yield from map(best.at, starts)

    def is_better(self, call: str, option: Option, other: Option) -> bool:
        """Return whether an option costs no more than another, wherever other calls are."""
        seconds = option.seconds
        least = other.seconds
        role, _, stage = call.rpartition("_")
        if stage == "training":
            seconds += self.arrival_seconds(f"{role}_inference", other.placement)
        else:
            seconds += option.arrival
        if stage == "generation":  # to which weights always move
            least += other.arrival
        less = option.always <= other.always
        less = less and option.working <= other.working and option.kept <= other.kept
        return less and seconds <= least

    def are_boxes(self, starts: Sequence[int], count: int) -> bool:
        """Return whether this many devices from each block of `starts` form a box of a TPU's torus.

        A search assumes that all parts of one size are alike.
        """
        torus = self.hardware.torus
        firsts = [start * self.block_devices for start in starts]
        return not torus or all(is_box(torus, range(first, first + count)) for first in firsts)

    def can_run(self, call: str, placement: Placement) -> bool:
        """Return whether rows divide evenly, and the call's part can run its own programs."""
        plan = Plan(self.hardware.count, {call: placement})
        try:
            check_parts(plan, "", self.hardware.device_kind, self.hardware.count)
            if call == "generation":
                check_rows(self.config, plan, "")
        except ValueError:
            return False
        return True

    def shardings(self, call: str, count: int) -> Iterator[Placement]:
        """Yield the shardings of a call over the first `count` devices.

        `tensor` stays within a node and divides the key-value heads; `fsdp` divides the width.
        """
        generates = call == "generation"
        slices = self.base.slices if generates else 1
        in_node = self.hardware.count // self.hardware.nodes
        models = [*self.models.trunks.values(), *self.models.rewards]
        heads = math.gcd(*(model.num_kv_heads for model in models))
        width = math.gcd(*(model.width for model in models))
        for tensor in powers_of_two(min(count, in_node)):
            shards, rest = divmod(count, slices * tensor)
            if rest or heads % tensor:
                continue
            for data in [shards] if generates else range(1, shards + 1):
                if shards % data == 0 and width % (shards // data) == 0:
                    yield Placement(
                        first=0,
                        count=count,
                        slices=slices,
                        data=data,
                        fsdp=shards // data,
                        tensor=tensor,
                        dtype=self.base.dtype,
                        kernels=self.base.kernels,
                    )

    def priced(self, call: str, placement: Placement) -> Option:
        """Return a placement of a call with its costs, wherever its devices are."""
        at_first = dataclasses.replace(placement, first=0)
        if (call, at_first) not in self._prices:
            self._prices[call, at_first] = self._price(call, at_first)
        return self._prices[call, at_first].at(placement.first // self.block_devices)

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Return the calls of the run."""
        return derived.calls(self.config)

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        """Return, by call that receives trained weights, the call that trains them."""
        trained = {call: f"{call.rpartition('_')[0] or 'policy'}_training" for call in self.calls}
        return {call: own for call, own in trained.items() if own in self.calls and own != call}

    @functools.cached_property
    def _prices(self) -> dict[tuple[str, Placement], Option]:
        return {}

    def _price(self, call: str, placement: Placement) -> Option:
        """Predict the seconds and the memory of a placement of a call."""
        always, working = self.held_bytes({call: placement})
        return Option(
            placement,
            first=0,
            blocks=placement.count // self.block_devices,
            seconds=predict_call(self._placed(call, placement), call).seconds,
            always=always,
            working=working,
            kept=self.kept_bytes(call, placement),
            arrival=self.arrival_seconds(call, placement) if call in self.sources else 0.0,
        )

    def joint(self, placements: Mapping[str, Placement]) -> JointTraining:
        """Return the costs of calls trained as concurrent pipelines, wherever their devices are."""
        return joint_training([(call, self._placed(call, one)) for call, one in placements.items()])

    def held_bytes(self, placements: Mapping[str, Placement]) -> tuple[int, int]:
        """Return the bytes on each device shared by the given calls: always, and at work."""
        alike = tuple((call, dataclasses.replace(one, first=0)) for call, one in placements.items())
        if (alike, self.remat) not in self.held:
            layouts = {call: self._run(call, one).layout for call, one in alike}
            parts = estimate.plan(self.config, self.models, layouts, self.remat)
            always = memory_parts.total(parts, "always")
            working = sum(one.bytes for one in parts) - always
            self.held[alike, self.remat] = (always, working)
        return self.held[alike, self.remat]

    def joint_options(self, placements: Mapping[str, Placement]) -> dict[str, Option]:
        """Return the options of calls that train as pipelines, with their joint costs.

        Each has its share of the seconds, and the first all of the memory.
        """
        held = self.held_bytes(placements)
        shares = self.joint(placements).shares
        options = {}
        for call, one in placements.items():
            always, working = (0, 0) if options else held
            options[call] = Option(
                one,
                first=one.first // self.block_devices,
                blocks=one.count // self.block_devices,
                seconds=shares[call],
                always=always,
                working=working,
            )
        return options

    def kept_bytes(self, call: str, placement: Placement) -> int:
        """Return the bytes that stay while other calls work: scoring copies, waiting gradients."""
        if call in self.sources:
            return self.arrival_bytes(call, placement)
        waits = call in derived.learning_calls(self.config)[:-1]
        run = self._run(call, placement)
        return run.weights(self.models.of(call)[0], FLOAT32) if waits else 0

    def _placed(self, call: str, placement: Placement) -> PlacedRun:
        """Return the run of a placement of a call, and its part of the hardware."""
        return PlacedRun.on_part(self._run(call, placement), self.hardware)

    def _run(self, call: str, placement: Placement) -> PlannedRun:
        """Return the planned run for a placement of a call."""
        role = "generation" if call == "generation" else "training"
        layout = placement.layout(self.hardware.platform, role)
        return PlannedRun(self.config, self.models, layout, self.remat, {call: layout})

    def transfer_seconds(self, call: str, option: Option, chosen: Placed) -> float:
        """Predict the seconds in which trained weights move to another call, once per step.

        None if both calls have one placement and split weights alike.
        """
        source = chosen.get(self.sources.get(call, ""))
        alike = source and source.placement == option.placement and call != "generation"
        return 0.0 if source is None or alike else option.arrival

    def arrival_seconds(self, call: str, placement: Placement) -> float:
        """Predict the seconds in which each device receives its part of trained weights."""
        chip = self.hardware.chip
        assert chip is not None, "Seconds are predicted of known chips alone."
        count = self.hardware.count
        bandwidth = ring_bandwidth(chip, count, self.hardware.nodes, group=count, stride=1)
        return self.arrival_bytes(call, placement) / (chip.efficiency.links * bandwidth)

    def arrival_bytes(self, call: str, placement: Placement) -> int:
        """Return the bytes of each device's part of trained weights in a call."""
        run = self._run(call, placement)
        model = self.models.trunks[call.rpartition("_")[0] or "policy"]
        return run.weights(model, role=run.layout.role)

    def placed(self, plan: Plan, name: str) -> dict[str, Option]:
        """Return the options that a plan chooses; ValueError if it is not aligned to blocks."""
        for call, one in plan.placements.items():
            first, off = divmod(one.first, self.block_devices)
            size, rest = divmod(one.count, self.block_devices)
            aligned = size in part_sizes(self.blocks) and is_aligned(first, size)
            if off or rest or not aligned:
                raise ValueError(
                    f"{name} places {call} on devices {one.first} to {one.devices[-1]}, and a"
                    f" search compares aligned parts of {self.block_devices} devices, their"
                    " doubles, and three quarters of these."
                )
        joint = trained(plan) if is_pipelined(plan) else {}
        options = self.joint_options(joint) if joint else {}
        for call, one in plan.placements.items():
            if call not in joint:
                options[call] = self.priced(call, one)
        return {call: options[call] for call in plan.placements}

    def plan(self, placed: Placed) -> Plan:
        """Return the plan of chosen options."""
        chosen = {call: placed[call].placement for call in self.calls}
        return Plan(self.hardware.count, chosen)
