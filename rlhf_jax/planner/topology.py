"""Find the devices of absent hardware, to compile for.

The compilers of TPUs (libtpu) and of NVIDIA's GPUs (jax's CUDA plugin) run on a CPU, and identify
chips by names: a TPU's topology, a GPU's target file in `rlhf_jax/planner/targets/`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rlhf_jax.planner.chips import TOPOLOGIES, TPUS
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.runtime import jax_internals

# The files follow XLA's own, read from such devices; those of L4, L40S and RTX 4090 data sheets.
TARGETS = Path(__file__).parent / "targets"
# With these libtpu queries no machine, takes no chip and writes no log.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
# A v4's two cores are one device.
CHIP_CONFIGS = {"v4": {"chip_config_name": "megacore"}}


def topology_devices(hardware: Hardware) -> list[Any]:
    """Return the devices that a local compiler sees in some hardware, always the same objects.

    Raises ValueError, in one sentence, if nothing here compiles for the hardware.
    """
    find = FINDERS.get(hardware.platform)
    if find is None:
        raise ValueError(
            f"--verify compiles for TPUs and GPUs, and nothing here compiles for {hardware}: leave"
            " it out, or name TPUs or GPUs."
        )
    devices = find(hardware)
    if len(devices) != hardware.count:
        raise ValueError(
            f"The compiler sees {len(devices)} devices in {hardware.topology}, but plans are for"
            f" {hardware.count}: leave --verify out."
        )
    return devices


def compiler_version(platform: str) -> str:
    """Return the local compiler for a platform, and its version."""
    name = "libtpu" if platform == "tpu" else f"jax-{jax_internals.cuda_plugin()}-plugin"
    return f"jax {jax.__version__}, {name} {importlib.metadata.version(name)}"


def _tpus(hardware: Hardware) -> list[Any]:
    """Return the chips of a TPU's topology."""
    if not hardware.topology:
        raise ValueError(
            f"--verify needs the topology of the {hardware.count} chips: name it, such as"
            " v5p:4x4x4."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("--verify needs the TPU's compiler, libtpu: pip install 'rlhf_jax[pod]'.")
    return _chips_of(hardware.topology)


@functools.cache
def _chips_of(topology: str) -> list[Any]:
    """Return the devices of a TPU's topology by its name."""
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    kind = topology.partition(":")[0]
    known = TOPOLOGIES[TPUS[kind.replace("tpu7", "v7")].torus_axes]
    try:
        description = topologies.get_topology_desc(topology, "tpu", **CHIP_CONFIGS.get(kind, {}))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"The TPU's compiler knows no {topology} ({str(error).partition(':')[2].strip()});"
            f" it knows {', '.join(f'{kind}:{shape}' for shape in known)}."
        ) from error
    return list(description.devices)


def _gpus(hardware: Hardware) -> list[Any]:
    """Return the GPUs of some nodes, node by node."""
    target = TARGETS / f"{hardware.device_kind.lower()}.textproto"
    if not target.exists():
        known = ", ".join(sorted(path.stem for path in TARGETS.iterdir()))
        raise ValueError(
            f"--verify has no target for a {hardware.device_kind} in {TARGETS}: leave it out, or"
            f" name one of {known}."
        )
    if not jax_internals.cuda_plugin():
        raise ValueError(
            "--verify needs the GPU's compiler, jax's CUDA plugin: pip install 'rlhf_jax[gpu-pod]'"
            " (on Linux, with a Python that jax has wheels for)."
        )
    return _gpus_of(target, f"1x{hardware.nodes}x{hardware.count // hardware.nodes}")


@functools.cache
def _gpus_of(target: Path, shape: str) -> list[Any]:
    """Return the GPUs of a target, in a shape of one network x nodes x GPUs."""
    from jax.experimental import topologies

    jax_internals.load_cuda_plugin()
    try:
        description = topologies.get_topology_desc(
            shape, "cuda", topology=shape, target_config=target.read_text()
        )
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n")[0]
        raise ValueError(
            f"The GPU's compiler knows no {shape} of {target.stem}: {message}"
        ) from error
    return list(description.devices)


FINDERS: dict[str, Callable[[Hardware], list[Any]]] = {"tpu": _tpus, "gpu": _gpus}
