"""A plan: the devices of each call of an iteration, and how they split its rows and weights.

(The execution plan of ReaL: Mei et al. 2024, arXiv 2406.14088.) A plan is plain numbers, so that it
can be saved; with the devices it determines the layouts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from pallas_kernels import dispatch
from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax.mesh import AXES, AXIS_TYPES, Layout, abstract_mesh, make_mesh
from rlhf_jax.runtime.foreign import parse_json, reading_foreign

# By the names of the calls that a run has. No call needs another's devices.
CallLayouts = Mapping[str, Layout]


def training_layout(layouts: CallLayouts) -> Layout:
    """Return the layout of the call that trains: the policy's, if that is among several."""
    trained = (layout for call, layout in layouts.items() if call.endswith("_training"))
    return layouts.get("policy_training") or next(trained)


# TPUs whose slices may be divided only up to 4x4 chips: on others a program must span the slice.
V5E = ("TPU v5e", "TPU v5 lite")
LARGEST_DIVIDED = 16


@dataclasses.dataclass(frozen=True)
class Placement:
    """Hold the devices of a call, and the sizes of the axes that split it: their product."""

    first: int  # of a range of devices, in the order of `jax.devices()`
    count: int
    slices: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    dtype: str = "float32"  # of the products
    kernels: Kernels = REFERENCE
    # of a training call: each slice has some of the layers, and `data` is copies of the pipeline
    pipelined: bool = False

    @property
    def shape(self) -> dict[str, int]:
        """Return the size of each mesh axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def row_shards(self) -> int:
        """Count the parts that the rows of a batch are split into."""
        return (1 if self.pipelined else self.slices) * self.data * self.fsdp

    @property
    def devices(self) -> range:
        """Return the devices' numbers."""
        return range(self.first, self.first + self.count)

    def layout(self, devices: Sequence[Any] | str, role: str = "training") -> Layout:
        """Return the layout on its part of all devices; for a platform, on an abstract mesh."""
        role = "pipelined" if self.pipelined else role
        if isinstance(devices, str):
            mesh = abstract_mesh(self.shape, devices)
        else:
            own = [devices[number] for number in self.devices]
            mesh = make_mesh(self.data, self.fsdp, self.tensor, devices=own, slices=self.slices)
        return Layout(mesh, role, kernels=self.kernels, dtype=np.dtype(self.dtype))


class Lanes(NamedTuple):
    """Hold the lanes of a timeline and of each call; other calls are in the first."""

    names: tuple[str, ...] = ("slice 0",)
    of_call: Mapping[str, tuple[int, ...]] = {}

    def of(self, call: str) -> tuple[int, ...]:
        """Return the numbers of the lanes in which a call works."""
        return self.of_call.get(call, (0,))


ONE_LANE = Lanes()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold the placement of each call that a run has."""

    devices: int  # of the run
    placements: Mapping[str, Placement]  # by the calls' names
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the models

    @property
    def is_uniform(self) -> bool:
        """Return whether all calls have one mesh."""
        whole = {dataclasses.replace(one, pipelined=False) for one in self.placements.values()}
        return len(whole) == 1

    def layouts(self, devices: Sequence[Any] | str) -> CallLayouts:
        """Return the layout of each call.

        devices: all of the run, or their platform: the meshes are abstract, for planning.
        """
        made = {
            call: placed.layout(devices, role=call if call == "generation" else "training")
            for call, placed in self.placements.items()
        }
        pipelines = [call for call in made if call.endswith("_training")]
        pipelines = [call for call in pipelines if self.placements[call].pipelined]
        for call in () if isinstance(devices, str) else pipelines[1:]:
            # A critic's pipelines run the other way over the policy's nodes, whose bubbles they
            # fill. Each of its copies, which have stages of their own, is on consecutive nodes.
            nodes = made[pipelines[0]].devices.swapaxes(0, 1)
            slices, copies, *node = made[call].devices.shape
            laid = nodes.reshape(copies, slices, *node)[:, ::-1].swapaxes(0, 1)
            mesh = Mesh(laid, AXES, axis_types=AXIS_TYPES)
            made[call] = dataclasses.replace(made[call], mesh=mesh)
        return made

    def groups(self) -> list[list[str]]:
        """Return the groups of devices with the same calls, as lists of these calls."""
        ends = sorted(
            {end for one in self.placements.values() for end in (one.first, one.first + one.count)}
        )
        there = [self.calls_at(first) for first in ends[:-1]]
        return [calls for index, calls in enumerate(there) if calls and calls not in there[:index]]

    def calls_at(self, device: int) -> list[str]:
        """Return the calls of a device, by its number."""
        return [call for call, placed in self.placements.items() if device in placed.devices]

    def lanes(self) -> Lanes:
        """Name a lane for each slice of generation, and one for each further range of devices.

        Each stage of a pipeline has a lane, in each copy. Work on all devices of generation is in
        the lanes of its slices.
        """
        lanes: dict[tuple[range, int], tuple[int, ...]] = {}
        names: list[str] = []
        if generation := self.placements.get("generation"):
            slices = tuple(range(generation.slices))
            lanes = dict.fromkeys(
                [(generation.devices, 1), (generation.devices, generation.slices)], slices
            )
            names = [f"slice {number}" for number in slices]
        of_call = {}
        for call, placed in self.placements.items():
            stages = placed.slices * placed.data if placed.pipelined else 1
            if (placed.devices, stages) not in lanes:
                lanes[placed.devices, stages] = tuple(range(len(names), len(names) + stages))
                each = placed.count // stages
                for first in placed.devices[::each]:
                    last = first + each - 1
                    names.append(f"devices {first}–{last}" if each > 1 else f"device {last}")
            of_call[call] = lanes[placed.devices, stages]
        return Lanes(tuple(names), of_call)

    def table(self) -> list[str]:
        """Return lines of text: for each call its devices, and the axes that split.

        The dtype is added if calls have several.
        """
        lines = []
        several = len({placed.dtype for placed in self.placements.values()}) > 1
        for call, placed in self.placements.items():
            axes = [f"{axis} {size}" for axis, size in placed.shape.items() if size > 1]
            where = f"{placed.first}..{placed.first + placed.count - 1}"
            axes += ["pipelined"] if placed.pipelined else []
            sharding = ", ".join([*axes, placed.dtype] if several else axes) or "whole"
            lines.append(f"{call:20}{where:>9}  {sharding}")
        return lines

    def text(self) -> str:
        """Return the plan as the content of its file."""
        calls = {call: dataclasses.asdict(one) for call, one in self.placements.items()}
        content = {"devices": self.devices, "parameters": dict(self.parameters), "calls": calls}
        return json.dumps(content, indent=1) + "\n"


def read_plan(path: Path, default: Placement) -> Plan:
    """Read a plan from a file; `default` gives a call's missing dtype and kernels.

    Raises ValueError or FileNotFoundError, in one sentence, for an invalid file.
    """
    with reading_foreign(path, "a plan in JSON"):
        document = parse_json(path.read_bytes(), unique=True)
        _require(path, isinstance(document, dict), "is no map")
        _require_names(path, "", document, {"devices", "calls"}, optional={"parameters"})
        calls = document["calls"]
        _require(path, isinstance(calls, dict) and bool(calls), "has no map of calls")
        placements = {call: _placement(path, call, own, default) for call, own in calls.items()}
        parameters = document.get("parameters", {})
        _require(path, isinstance(parameters, dict), "has parameters that are no map")
        for name, value in [*parameters.items(), ("devices", document["devices"])]:
            _require(path, _is_count(value), f"has {name} = {value!r:.40}, which is no number")
        return Plan(document["devices"], placements, parameters)


def _placement(path: Path, call: str, own: Any, default: Placement) -> Placement:
    """Read one call's placement."""
    _require(path, isinstance(own, dict), f"has no map for {call}")
    numbers = {"first", "count"}
    optional = {*AXES, "dtype", "kernels", "pipelined"}
    _require_names(path, f" of {call}", own, numbers, optional)
    for name in (numbers | {*AXES}) & set(own):
        least = 0 if name == "first" else 1
        fits = _is_count(own[name]) and own[name] >= least
        _require(path, fits, f"has {name} = {own[name]!r:.40} for {call}; give a number")
    dtype = own.get("dtype", default.dtype)
    known = ("float32", "bfloat16")
    _require(path, dtype in known, f"has dtype {dtype!r:.40} for {call}; give {' or '.join(known)}")
    pipelined = own.get("pipelined", False)
    trains = call.endswith("_training")
    fits = isinstance(pipelined, bool) and (trains or not pipelined)
    _require(path, fits, f"has pipelined {pipelined!r:.40} for {call}; true is for training alone")
    chosen = dataclasses.asdict(default.kernels)
    kernels = own.get("kernels", chosen)
    _require(path, isinstance(kernels, dict), f"has kernels for {call} that are no map")
    _require_names(path, f" of {call}'s kernels", kernels, set(), set(chosen))
    for kernel, name in kernels.items():
        _require(path, isinstance(name, str), f"has {kernel} {name!r:.40} for {call}; give a name")
    return Placement(**{**own, "dtype": dtype, "kernels": Kernels(**{**chosen, **kernels})})


def check(plan: Plan, source: str, calls: Collection[str], num_devices: int) -> None:
    """Raise ValueError, in one sentence, if a plan does not fit these calls and devices.

    source: the name of the plan in the message.
    """

    def require(holds: bool, sentence: str) -> None:
        if not holds:
            raise ValueError(f"{source} {sentence}.")

    for call in plan.placements:
        is_call = call.rpartition("_")[2] in ("generation", "inference", "training")
        known = ", ".join(calls)
        require(is_call, f"places {call!r:.40}, which is no call; this run has {known}")
        require(call in calls, f"places {call}, which this run does not have; leave it out")
    for call in calls:
        require(call in plan.placements, f"does not place {call}, which this run has; add it")
    require(
        plan.devices == num_devices,
        f"is for {plan.devices} devices, and here are {num_devices}; make a plan for those",
    )
    for call, placed in plan.placements.items():
        last = placed.first + placed.count - 1
        require(
            last < num_devices,
            f"places {call} on devices {placed.first} to {last}, and the last one is"
            f" {num_devices - 1}; lower first or count",
        )
        product = math.prod(placed.shape.values())
        axes = " x ".join(f"{name} {size}" for name, size in placed.shape.items())
        require(
            product == placed.count,
            f"splits {call} as {axes} = {product}, and gives it {placed.count} devices; make them"
            " equal",
        )


def check_kernels(plan: Plan, source: str, platform: str) -> None:
    """Raise ValueError if a plan names kernels that are not the platform's."""
    for call, placed in plan.placements.items():
        for kernel, name in dataclasses.asdict(placed.kernels).items():
            if name not in dispatch.names_on(kernel, platform):
                raise ValueError(
                    f"{source} has {kernel} {name!r:.40} for {call}, and here is a {platform}; give"
                    " 'reference' or leave kernels out."
                )


def check_parts(plan: Plan, source: str, device_kind: str, in_slice: int) -> None:
    """Raise ValueError if a call has a part of a TPU slice that cannot run its own programs.

    in_slice: the devices joined by their own links: all, unless there are several TPU slices.
    """
    if device_kind not in V5E or in_slice <= LARGEST_DIVIDED:
        return
    for call, placed in plan.placements.items():
        part = placed.count // placed.slices
        if part % in_slice:
            raise ValueError(
                f"{source} has programs of {call} for {part} chips of a slice of {in_slice}"
                f" {device_kind}, which must all be in each: give {call} all, and mesh.slices 1."
            )


def check_models(plan: Plan, source: str, parameters: Mapping[str, int]) -> None:
    """Raise ValueError if a plan was made for models of other sizes; sizes are optional."""
    for name, made_for in plan.parameters.items():
        parameters_here = parameters.get(name)
        if parameters_here != made_for:
            here = f"{parameters_here:,} here" if parameters_here else "not here"
            raise ValueError(
                f"{source} is for a {name} of {made_for:,} parameters, which is {here}; make a plan"
                " for these models."
            )


def _require_names(
    path: Path, where: str, given: dict[str, Any], needed: set[str], optional: set[str]
) -> None:
    """Raise ValueError unless a map has all needed keys, and no unknown ones."""
    for name in sorted(needed - set(given)):
        _require(path, False, f"lacks {name}{where}")
    for name in given:
        known = name in needed | optional
        _require(path, known, f"has {name!r:.40}{where}, which no plan has")


def _require(path: Path, holds: bool, violation: str) -> None:
    if not holds:
        raise ValueError(f"plan: {path} {violation}.")


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number that can count something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
