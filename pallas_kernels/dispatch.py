"""Choose the implementation of each kernel, with the reason."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pallas_kernels import measured
from pallas_kernels.shapes import Shape

# The function of each kernel, in each of its files: reference.py, tpu.py, gpu.py, cpu.py.
FUNCTIONS = {
    "tree_attention": "tree_attention",
    "verify_head": "verify_head",
    "commit": "commit",
    "logprobs": "token_logprobs",
}
# Each of these platforms has all of the kernels in Pallas.
PLATFORMS = "tpu", "gpu"
# On a CPU this one has its own form in plain JAX, which uses the reference where that is faster.
ON_CPU = "tree_attention"
# The GPU kernels use the matrix instructions of this major compute capability.
HOPPER = 9
# The values of a kernel's configuration key.
WANTED = "auto", "reference", "pallas", "interpret"


class Device(Protocol):
    """Describe a device like a `jax.Device`; a GPU also has a `compute_capability`."""

    @property
    def platform(self) -> str:
        """Return one of "cpu", "gpu" and "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """Return the model of the chip, as in `measured.table`."""
        ...


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Name the implementation of each kernel: its file, or "interpret"; static under jit.

    "interpret" runs the TPU's kernel on any hardware, slowly.
    """

    tree_attention: str = "reference"
    verify_head: str = "reference"
    commit: str = "reference"
    logprobs: str = "reference"

    @property
    def tiled(self) -> bool:
        """Return whether one of them requires a cache of whole tiles."""
        return not {*dataclasses.astuple(self)} <= {"reference", "cpu"}


REFERENCE = Kernels()
INTERPRETED = Kernels(
    tree_attention="interpret", verify_head="interpret", commit="interpret", logprobs="interpret"
)
# Those of a layout that names none. `pytest --kernels interpret` assigns others, before
# rlhf_jax.mesh is imported and reads it.
DEFAULT_KERNELS = REFERENCE


def choose(
    wanted: Mapping[str, str], device: Device, itemsize: int, models: Sequence[Shape]
) -> tuple[Kernels, dict[str, str]]:
    """Choose the implementation of each kernel on a device, and give the reasons by kernel.

    wanted: one of WANTED by kernel; itemsize: bytes of a number in the models' computation; models:
    those that decode, the policy first. "auto" uses the platform's kernel if `measured.table` has
    it faster than the reference on that kind of device. Raises ValueError if "pallas" is set for a
    kernel without one.
    """
    names = {}
    reasons = {}
    for kernel, how in wanted.items():
        missing = _missing(kernel, device, itemsize, models)
        timed = measured.table().get((kernel, device.device_kind))
        name = "reference"
        if how in ("reference", "interpret"):
            name = how
            why = "set in the config"
        elif how == "pallas":
            if missing:
                raise ValueError(
                    f"kernels.{kernel} is 'pallas', but {missing}; choose 'auto' or 'reference'."
                )
            name = device.platform
            why = "set in the config"
        elif device.platform == "cpu" and kernel == ON_CPU:
            name = "cpu"
            why = "of a long cache it reads the blocks that hold tokens"
        elif missing:
            why = missing
        elif timed is None:
            why = f"the kernel has not been timed on {device.device_kind}; 'pallas' selects it"
        else:
            name = device.platform if timed.ratio > 1 else "reference"
            why = (
                f"the kernel is {timed.ratio:.2f} times as fast or more in three of four cases"
                f" timed on {device.device_kind}"
            )
        names[kernel] = name
        reasons[kernel] = f"{'plain JAX' if name == 'reference' else name}: {why}"
    return Kernels(**names), reasons


def names_on(kernel: str, platform: str) -> set[str]:
    """Return the implementations of a kernel that run on a platform."""
    own = {platform} if platform in PLATFORMS or kernel == ON_CPU else set()
    return {"reference", "interpret", *own}


def _missing(kernel: str, device: Device, itemsize: int, models: Sequence[Shape]) -> str | None:
    """Return why a device has no such kernel for these models, or None if it has."""
    if device.platform not in PLATFORMS:
        return f"there is no kernel of its own for a {device.platform}"
    if device.platform != "gpu":
        return None
    if int(float(getattr(device, "compute_capability", 0) or 0)) != HOPPER:
        return f"the kernel is for Hopper GPUs, and this is {device.device_kind}"
    # The commit only moves bits.
    if itemsize > 2 and kernel != "commit":
        return "a GPU's matrix units round float32"
    odd = [model.dim for model in models if model.dim not in (64, 128)]
    if kernel in ("tree_attention", "commit") and odd:
        return f"a GPU's takes heads of 64 or 128, not {odd[0]}"
    policy = models[0]
    if kernel == "verify_head" and (policy.width % 64 or policy.vocab % (8 if policy.tied else 64)):
        return f"a GPU's takes whole tiles, and a head of {policy.width} x {policy.vocab} has none"
    return None


@functools.cache
def implementation(kernel: str, kernels: Kernels) -> Callable:
    """Return the function of a kernel, one of the names of FUNCTIONS.

    It is one object for equal arguments, so that programs are not traced again.
    """
    name = getattr(kernels, kernel)
    # Imported here: no platform should pay for loading the Pallas of another.
    module = importlib.import_module(
        f"pallas_kernels.{kernel}.{'tpu' if name == 'interpret' else name}"
    )
    function = getattr(module, FUNCTIONS[kernel])
    return functools.partial(function, interpret=True) if name == "interpret" else function
