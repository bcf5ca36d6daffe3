"""Which implementation of each kernel runs, and why."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

# The function of each kernel, in each of its files: reference.py, tpu.py, gpu.py.
FUNCTIONS = {"tree_attention": "tree_attention", "verify_head": "verify_head", "commit": "commit", "logprobs": "law"}
PLATFORMS = {"tpu": tuple(FUNCTIONS), "gpu": ("tree_attention", "verify_head")}  # the kernels that each one has
WANTED = "auto", "reference", "pallas", "interpret"

# (kernel, device kind) -> times as fast as the reference, where benchmarks/results/ has a measurement of it.
MEASURED: dict[tuple[str, str], float] = {}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementation of each kernel, by the name of its file; static under jit."""

    tree_attention: str = "reference"
    verify_head: str = "reference"
    commit: str = "reference"
    logprobs: str = "reference"
    interpret: bool = False  # run the kernels on any hardware, slowly


REFERENCE = Kernels()
INTERPRETED = Kernels("tpu", "tpu", "tpu", "tpu", interpret=True)


def choose(wanted: Mapping[str, str], platform: str, device_kind: str, itemsize: int) -> tuple[Kernels, dict[str, str]]:
    """The implementation of each kernel on a device, and the reason for it, by the kernel's name.

    wanted: one of WANTED by kernel; platform: "cpu", "gpu" or "tpu"; itemsize: bytes of a number that the model
    computes with. "auto" takes the platform's kernel where it was measured to be faster than the reference on that kind
    of device, "interpret" the TPU's on any. Raises ValueError where "pallas" is asked for and there is none.
    """
    chosen = {kernel: _choose(kernel, how, platform, device_kind, itemsize) for kernel, how in wanted.items()}
    names: dict[str, Any] = {kernel: name for kernel, (name, _) in chosen.items()}
    return Kernels(**names, interpret="interpret" in wanted.values()), {
        kernel: f"{name}: {why}" for kernel, (name, why) in chosen.items()
    }


def _choose(kernel: str, wanted: str, platform: str, device_kind: str, itemsize: int) -> tuple[str, str]:
    if wanted in ("reference", "interpret"):
        return ("reference" if wanted == "reference" else "tpu"), "asked for"
    lacking = _lacking(kernel, platform, itemsize)
    if wanted == "pallas":
        if lacking:
            raise ValueError(f"kernels.{kernel} is 'pallas', but {lacking}; choose 'auto' or 'reference'.")
        return platform, "asked for"
    if lacking:
        return "reference", lacking
    ratio = MEASURED.get((kernel, device_kind))
    if ratio is None:
        return "reference", f"the kernel has not been timed on {device_kind}; 'pallas' asks for it"
    return (platform if ratio > 1 else "reference"), f"the kernel is {ratio:.2f} times as fast on {device_kind}"


def _lacking(kernel: str, platform: str, itemsize: int) -> str | None:
    """Why there is no kernel, or None where there is."""
    if kernel not in PLATFORMS.get(platform, ()):
        return f"there is no such kernel for {platform}"
    if platform == "gpu" and itemsize > 2:
        return "a GPU's matrix units round float32"
    return None


@functools.cache
def implementation(kernel: str, kernels: Kernels) -> Callable:
    """The function of a kernel; one object for equal arguments, so that programs are not traced again."""
    name = getattr(kernels, kernel)
    # Imported here: no platform should pay for loading the Pallas of another.
    function = getattr(importlib.import_module(f"pallas_kernels.{kernel}.{name}"), FUNCTIONS[kernel])
    return function if name == "reference" else functools.partial(function, interpret=kernels.interpret)
