"""Figures of chips from their makers' data sheets, and the share of them that programs reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.placement.plan import Plan
from rlhf_jax.runtime.foreign import parse_json, reading_foreign


class Efficiency(NamedTuple):
    """Hold the shares of a chip's figures that programs reach."""

    training: float = 0.4  # of FLOPs, in a gradient
    inference: float = 0.5  # of FLOPs, in a forward pass
    decoding: float = 0.7  # of the memory's bandwidth, in a round of generation
    links: float = 0.8  # of the bandwidth of links


# Typical shares of well-tuned programs, by order of magnitude; not measured here.
ASSUMED = Efficiency()
REACHED = 0.6  # share of a chip's peak FLOPs that products alone reach


class Chip(NamedTuple):
    """Describe one device: bytes, and bytes and bfloat16 FLOPs per second; sends count one way."""

    gigabytes: float  # of memory, in 10^9 bytes
    flops: float  # of dense matrix products
    memory_bandwidth: float
    link_bandwidth: float  # of one link of a torus, or of all links to a node's other GPUs
    network_bandwidth: float  # its share of its host's network
    torus_axes: int = 0  # of a TPU's slice, with two links each; 0 if every link reaches all
    compute_capability: float = 0.0  # of a GPU
    efficiency: Efficiency = ASSUMED

    def crossover_tokens(self, node_chips: int) -> float:
        """Return the tokens per chip and optimizer step below which pipelines beat FSDP.

        t* = F eta / (2 D s). A step of FSDP brings 6 bytes of each of P parameters to each node
        (bfloat16 weights twice and gradients once), in 6 P / (D s) seconds: D chips per node with s
        bytes per second each of its network. Its products take 6 P t / (F eta) seconds, for t
        tokens per chip at a share eta of F FLOPs per second. A pipeline with as many micro-batches
        as stages takes twice as long as its products: as long as the gathers at t = t*.
        """
        return self.flops * REACHED / (2 * node_chips * self.network_bandwidth)


# cloud.google.com/tpu/docs, one page per chip: v4, v5e, v5p, v6e, tpu7x. An interconnect's figure
# is of all links, both ways; a host's network is shared by its chips.
TPUS = {
    "v4": Chip(32, 275e12, 1.228e12, 50e9, 6.25e9, torus_axes=3),
    "v5e": Chip(16, 197e12, 0.819e12, 50e9, 3.125e9, torus_axes=2),
    "v5p": Chip(95, 459e12, 2.765e12, 100e9, 6.25e9, torus_axes=3),
    "v6e": Chip(32, 918e12, 1.638e12, 100e9, 12.5e9, torus_axes=2),
    "v7x": Chip(192, 2307e12, 7.38e12, 100e9, 12.5e9, torus_axes=3),
}
# Usual slices, by the axes of the torus; the compiler knows some others.
TOPOLOGIES = {
    2: ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
}
# nvidia.com, data sheets of the SXM modules and of cards; networks as in a DGX of 8, or 25 Gb/s.
GPUS = {
    "a100": Chip(80, 312e12, 2.039e12, 300e9, 25e9, compute_capability=8.0),
    "a100-40gb": Chip(40, 312e12, 1.555e12, 300e9, 25e9, compute_capability=8.0),
    "h100": Chip(80, 989e12, 3.35e12, 450e9, 50e9, compute_capability=9.0),
    "h200": Chip(141, 989e12, 4.8e12, 450e9, 50e9, compute_capability=9.0),
    "b200": Chip(180, 2250e12, 7.7e12, 900e9, 50e9, compute_capability=10.0),
    "l4": Chip(24, 121e12, 0.3e12, 32e9, 3.125e9, compute_capability=8.9),
    "l40s": Chip(48, 362e12, 0.864e12, 32e9, 3.125e9, compute_capability=8.9),
    "rtx4090": Chip(24, 165e12, 1.008e12, 32e9, 3.125e9, compute_capability=8.9),
}


def is_box(torus: Sequence[int], part: range) -> bool:
    """Return whether a range of a TPU slice's chips, in the order of their numbers, is a box of it.

    torus: the chips along each axis, 2 or 3. Chips are numbered host by host of at most 2x2, and
    hosts along the first axis first.
    """
    numbers = np.asarray(part)
    long, wide = torus[:2]
    of_host = (min(2, long), min(2, wide))
    host, inside = np.divmod(numbers, of_host[0] * of_host[1])
    row, along = np.divmod(host, long // of_host[0])
    plane, across = np.divmod(row, wide // of_host[1])
    places = (
        along * of_host[0] + inside % of_host[0],
        across * of_host[1] + inside // of_host[0],
        plane,
    )
    return math.prod(int(np.ptp(axis)) + 1 for axis in places) == len(part)


def check_boxes(plan: Plan, source: str, torus: Sequence[int]) -> None:
    """Raise ValueError if a call's chips do not form a box of a TPU's torus, as a program requires.

    torus: the chips along each axis of the slice; () if unknown, or if there is none.
    """
    for call, placed in plan.placements.items():
        if torus and not is_box(torus, placed.devices):
            raise ValueError(
                f"{source} places {call} on chips {placed.first} to {placed.devices[-1]} of a slice"
                f" of {'x'.join(map(str, torus))}, and they are no box of it: give a call half of"
                " the chips, a quarter ... or three quarters of whole planes."
            )


def read_chip(path: Path, known: Chip | None) -> Chip:
    """Read a chip's measured figures, as `benchmarks/chip.py` writes them.

    Missing values are taken from `known`. Raises ValueError or FileNotFoundError, in one sentence,
    for a file without figures, or without all needed ones.
    """
    with reading_foreign(path, "a chip's figures in JSON"):
        document = parse_json(path.read_bytes(), unique=True)
        figures = document.get("chip") if isinstance(document, dict) else None
        if not isinstance(figures, dict):
            raise ValueError(f"{path} has no map `chip`; measure it by benchmarks/chip.py.")
        shares = figures.get("efficiency", {})
        if not isinstance(shares, dict):
            raise ValueError(f"{path} has an efficiency that is no map.")
        plain = {name: value for name, value in figures.items() if name != "efficiency"}
        _check_figures(path, plain, Chip._fields)
        _check_figures(path, shares, Efficiency._fields)
        known_axes = (known.torus_axes,) if known else (0, *TOPOLOGIES)
        axes = plain.get("torus_axes", known_axes[0])
        if axes not in known_axes:
            raise ValueError(f"{path} has torus_axes = {axes}, and these devices have another.")
        efficiency = (known.efficiency if known else ASSUMED)._replace(**shares)
        if known is not None:
            return known._replace(**plain, efficiency=efficiency)
        missing = [name for name in Chip._fields[:5] if name not in plain]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}; measure them.")
        return Chip(**plain, efficiency=efficiency)


def _check_figures(path: Path, figures: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError if a figure is unknown or not a positive number."""
    for name, value in figures.items():
        if name not in names:
            raise ValueError(f"{path} has {name!r:.40}, which is no figure of a chip.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if name in ("torus_axes", "compute_capability") else 1e-12
        if not (number and least <= value < math.inf):
            raise ValueError(f"{path} has {name} = {value!r:.40}; give a positive number.")


def ring_bandwidth(chip: Chip, devices: int, nodes: int, group: int, stride: int) -> float:
    """Return the bytes per second that a device receives in a collective of `group` devices.

    stride: their distance in the order of all devices. A TPU's group uses two links of each axis of
    the torus that it fills, GPUs of one node their links, and those of several nodes the networks
    of all their GPUs in a node, whichever is less.
    """
    if chip.torus_axes:
        filled = chip.torus_axes * math.log(group) / math.log(max(devices, 2))
        return 2 * chip.link_bandwidth * max(1, round(filled))
    in_node = devices // nodes
    if group * stride <= in_node:
        return chip.link_bandwidth
    return min(chip.link_bandwidth, chip.network_bandwidth * max(1, in_node // stride))
