"""How tests compile programs, in their own process and in those that they start: soon rather than
well, as of a program that runs a few times compiling is most of the cost.
"""

from __future__ import annotations

import os

import jax

PASSES = "jax_disable_most_optimizations"
# Later ones have no other emitters, and no such flag.
EMITTERS = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""


def compile_soon() -> None:
    """Leave out most of XLA's passes and, where there are others, the newer emitters for CPUs."""
    jax.config.update(PASSES, True)
    os.environ[PASSES.upper()] = "1"
    os.environ["XLA_FLAGS"] += f" {EMITTERS}"


def environment(devices: int = 0) -> dict[str, str]:
    """Of a process that does the same, whatever the tests do; with so many devices, or its own."""
    count = f"--xla_force_host_platform_device_count={devices} " if devices else ""
    return {PASSES.upper(): "1", "XLA_FLAGS": count + EMITTERS}
