"""How tests compile programs, in their own process and in those that they start: soon rather than
well, as of a program that runs a few times compiling is most of the cost.
"""

from __future__ import annotations

import os

import jax

PASSES = "jax_disable_most_optimizations"


def compile_soon() -> None:
    """Leave out most of XLA's passes and, where there are others, the newer emitters for CPUs."""
    jax.config.update(PASSES, True)
    os.environ[PASSES.upper()] = "1"
    os.environ["XLA_FLAGS"] += f" {flags()}"


def flags() -> str:
    """XLA_FLAGS of a process that is started with flags of its own."""
    # Later ones have no other emitters, and no such flag.
    compiles_soon = PASSES.upper() in os.environ and jax.__version_info__ < (0, 11)
    return "--xla_cpu_use_fusion_emitters=false" if compiles_soon else ""
