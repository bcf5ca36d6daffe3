"""Devices that are named and need not be here: how many, of which kind, with how much memory."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

EXAMPLES = "v5p:4x4x4 (TPU chips), gpu:8x8:h100 (nodes x GPUs), gpu:8:h100, v5p-8 (a TPU product)"


class Hardware(NamedTuple):
    """Describe devices of one kind, as `jax.Device` describes one."""

    platform: str  # "cpu", "gpu" or "tpu"
    device_kind: str
    count: int
    gigabytes: float  # of one device, in 10^9 bytes; 0 where nobody knows
    compute_capability: float = 0.0  # of a GPU
    nodes: int = 1

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.count} x {self.device_kind}{nodes}, {self.gigabytes:g} GB each"


# Memory of a chip in 10^9 bytes, and how many its products' numbers count it as: a v4-8 has 8
# TensorCores on 4 chips (cloud.google.com/tpu/docs/system-architecture-tpu-vm).
TPUS = {"v4": (32, 2), "v5e": (16, 1), "v5p": (95, 2), "v6e": (32, 1), "v7x": (192, 2)}
PRODUCTS = {"v5litepod": "v5e", "tpu7x": "v7x"}  # other names of a kind
# Memory in 10^9 bytes and compute capability, by the makers' data sheets.
GPUS = {
    "a100": (80, 8.0),
    "a100-40gb": (40, 8.0),
    "h100": (80, 9.0),
    "h200": (141, 9.0),
    "b200": (180, 10.0),
    "l4": (24, 8.9),
    "l40s": (48, 8.9),
    "rtx4090": (24, 8.9),
}


def parse_hardware(text: str) -> Hardware:
    """Return the devices that a text names; raise ValueError, with examples, where it names none.

    `v5p:4x4x4` are TPU chips in a topology, `v5p-128` a product, whose number counts TensorCores
    for some kinds; `gpu:8x8:h100` nodes times GPUs; `cpu:4` devices of a CPU.
    """
    kind, _, rest = text.lower().partition(":")
    if match := re.fullmatch(r"(\w+)-(\d+)", kind):
        name = PRODUCTS.get(match[1], match[1])
        if name in TPUS and not rest:
            gigabytes, cores = TPUS[name]
            count = max(1, int(match[2]) // cores)
            return Hardware("tpu", f"TPU {name}", count, gigabytes)
    shape, _, model = rest.partition(":")
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        sizes = [int(size) for size in shape.split("x")]
        count = math.prod(sizes)
        name = PRODUCTS.get(kind, kind)
        if name in TPUS and not model:
            return Hardware("tpu", f"TPU {name}", count, TPUS[name][0])
        if kind == "gpu" and model in GPUS and len(sizes) <= 2:
            gigabytes, capability = GPUS[model]
            nodes = sizes[0] if len(sizes) == 2 else 1
            return Hardware("gpu", model.upper(), count, gigabytes, capability, nodes)
        if kind == "cpu" and not model:
            return Hardware("cpu", "cpu", count, 0.0)
    raise ValueError(
        f"There are no devices {text!r}: say {EXAMPLES}; TPUs are {', '.join(TPUS)}, GPUs"
        f" {', '.join(GPUS)}."
    )
