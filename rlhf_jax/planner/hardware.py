"""Describe absent devices by name: number, kind and memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from rlhf_jax.planner.chips import GPUS, TOPOLOGIES, TPUS, Chip, read_chip

MOST = 1 << 20  # most devices of a name
EXAMPLES = "v5p:4x4x4 (TPU chips), gpu:8x8:h100 (nodes x GPUs), gpu:8:h100, v5p-8 (a TPU product)"


class Hardware(NamedTuple):
    """Describe devices of one kind, like a `jax.Device`."""

    platform: str  # "cpu", "gpu" or "tpu"
    device_kind: str
    count: int
    gigabytes: float  # of one device, in 10^9 bytes; 0 if unknown
    compute_capability: float = 0.0  # of a GPU
    nodes: int = 1
    chip: Chip | None = None  # figures of one device, if known
    topology: str = ""  # of a TPU's slice, as its compiler names it, if given

    @property
    def torus(self) -> tuple[int, ...]:
        """Return the chips along each axis of a TPU's slice; () if unknown.

        A product has the usual topology for its number of chips.
        """
        shape = self.topology.partition(":")[2]
        if not shape and self.platform == "tpu" and self.chip is not None:
            usual = TOPOLOGIES[self.chip.torus_axes]
            shape = next((one for one in usual if math.prod(_sizes(one)) == self.count), "")
        return _sizes(shape) if shape else ()

    @property
    def name(self) -> str:
        """Return the compiler's name of the target, such as v5p:4x4x4 or gpu:2x8:h100."""
        in_node = self.count // self.nodes
        return self.topology or f"{self.platform}:{self.nodes}x{in_node}:{self.device_kind.lower()}"

    def measured(self, path: Path) -> Hardware:
        """Return the devices with a chip's measured figures from a file instead of the table's."""
        chip = read_chip(path, self.chip)
        capability = chip.compute_capability
        return self._replace(chip=chip, gigabytes=chip.gigabytes, compute_capability=capability)

    def part(self, count: int) -> Hardware:
        """Return the hardware of a part with `count` devices, on as few nodes as possible."""
        return self._replace(count=count, nodes=-(-count * self.nodes // self.count))

    def with_network(self, gigabits: float) -> Hardware:
        """Return the same devices with a given network bandwidth of a node, in gigabits per device.

        Raises ValueError if nothing goes over a network.
        """
        if self.platform != "gpu" or self.nodes == 1 or self.chip is None:
            raise ValueError(
                f"--network {gigabits:g} is for several nodes of GPUs, as gpu:8x8:h100, and {self}"
                " have links of their own alone; leave it out."
            )
        if not 0 < gigabits < math.inf:
            raise ValueError(f"--network is {gigabits:g}; give gigabits a second, as 400.")
        return self._replace(chip=self.chip._replace(network_bandwidth=gigabits * 1e9 / 8))

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.count} x {self.device_kind}{nodes}, {self.gigabytes:g} GB each"


# A product's number counts TensorCores for these kinds: a v4-8 has 8 of them on 4 chips
# (cloud.google.com/tpu/docs/system-architecture-tpu-vm).
CORES = {"v4": 2, "v5p": 2, "v7x": 2}
PRODUCTS = {"v5litepod": "v5e", "tpu7x": "v7x"}  # other names of a kind
COMPILED_AS = {"v7x": "tpu7x"}  # the compiler's names of kinds


def parse_hardware(text: str) -> Hardware:
    """Return the devices that a text names; raise ValueError, with examples, if it names none.

    `v5p:4x4x4` are TPU chips in a topology, `v5p:64` this many in their usual one, `v5p-128` a
    product, whose number counts TensorCores for some kinds; `gpu:8x8:h100` nodes times GPUs;
    `cpu:4` devices of a CPU.
    """
    kind, _, rest = text.lower().partition(":")
    if math.prod(map(int, re.findall(r"\d+", rest.partition(":")[0]))) > MOST:
        raise ValueError(f"{text!r:.60} are more than {MOST:,} devices; name fewer.")
    if match := re.fullmatch(r"(\w+)-(\d+)", kind):
        name = PRODUCTS.get(match[1], match[1])
        if name in TPUS and not rest and int(match[2]) <= MOST:
            return _tpus(name, max(1, int(match[2]) // CORES.get(name, 1)))
    shape, _, model = rest.partition(":")
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        sizes = _sizes(shape)
        count = math.prod(sizes)
        name = PRODUCTS.get(kind, kind)
        if name in TPUS and not model:
            axes = TPUS[name].torus_axes
            if len(sizes) == 1:
                return _tpus(name, count)
            if len(sizes) != axes:
                raise ValueError(
                    f"{text!r:.60} is no topology of {name}, whose chips lie in {axes} dimensions:"
                    f" name one such as {name}:{TOPOLOGIES[axes][4]}."
                )
            return _tpus(name, count)._replace(topology=f"{COMPILED_AS.get(name, name)}:{shape}")
        if kind == "gpu" and model in GPUS and len(sizes) <= 2:
            chip = GPUS[model]
            nodes = sizes[0] if len(sizes) == 2 else 1
            return Hardware(
                platform="gpu",
                device_kind=model.upper(),
                count=count,
                gigabytes=chip.gigabytes,
                compute_capability=chip.compute_capability,
                nodes=nodes,
                chip=chip,
            )
        if kind == "cpu" and not model:
            return Hardware("cpu", "cpu", count, 0.0)
    raise ValueError(
        f"There are no devices {text!r}: give {EXAMPLES}; TPUs are {', '.join(TPUS)}, GPUs"
        f" {', '.join(GPUS)}."
    )


def _sizes(shape: str) -> tuple[int, ...]:
    """Return the numbers of a text such as 4x4x8."""
    return tuple(map(int, shape.split("x")))


def _tpus(name: str, count: int) -> Hardware:
    return Hardware("tpu", f"TPU {name}", count, TPUS[name].gigabytes, chip=TPUS[name])
