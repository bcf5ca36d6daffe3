"""Record the command, code and machine of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import shlex
import subprocess
import sys

import jax

from rlhf_jax.runtime.files import PACKAGE

PACKAGES = ("rlhf_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict[str, str]:
    """Return the command, the commit of a clone, versions and devices, by name."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES[:3]]
    described = {
        "command": shlex.join(sys.argv),
        "commit": _commit(),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
    return {name: value for name, value in described.items() if value}


def most_memory() -> dict[str, float]:
    """Return the peak memory of this process and its first device, in GB, as metrics.

    Not every device reports it.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in the unit of the system's count
    metrics = {"memory/host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        metrics["memory/device"] = statistics["peak_bytes_in_use"] / 1e9
    return metrics


def _commit() -> str:
    """Return the commit of the package's clone; '' if it is not in one."""
    if not (PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        # The arguments are constants, and git is the user's.
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)  # noqa: S603
        return result.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
