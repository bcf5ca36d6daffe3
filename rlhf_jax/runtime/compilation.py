"""Configure compilation and its cache, and compile programs ahead of their data.

The code of a run defines its programs once: it passes each to an `Execute` with its arguments.
`run_now` runs it, `compile_only` compiles it for shapes; a plan traces it for absent devices.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_jax.runtime import distributed

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Calls a jitted function with arguments, or compiles or traces it for them.
Execute = Callable[..., Any]


def configure_jax(deterministic: bool, cache: str) -> None:
    """Set the options that jax reads once: with the first device, and with the first program.

    deterministic: sums of a GPU have one order. cache: the folder of compiled programs; '' for that
    of the environment, if any.
    """
    if not NVIDIA_DRIVER.exists():  # else a plugin installed only to compile would look for CUDA
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags + " --xla_gpu_deterministic_ops=true"
    if distributed.started() and jax.default_backend() == "cpu":
        # A program that several processes on CPUs read back no longer keeps its collectives in one
        # order, and two processes then wait for each other in different ones (jax 0.10.2).
        jax.config.update("jax_enable_compilation_cache", False)
    elif cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def run_now(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function."""
    return function(*arguments, **options)


def compile_only(function: jax.stages.Wrapped, *arguments: Any, **options: Any) -> Any:
    """Compile a jitted function for arrays or shapes, and return its results as shapes."""
    given = shapes(arguments)
    lowered = function.lower(*given, **options)
    places = lowered.compile().output_shardings
    # Results get a sharding only if arguments have one: else another program would be compiled for
    # them.
    held = any(getattr(leaf, "sharding", None) is not None for leaf in jax.tree.leaves(given))

    def shape(info, place):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place if held else None)

    return jax.tree.map(shape, lowered.out_info, places)


def trace_only(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the results of a jitted function as shapes, without shardings."""
    return function.eval_shape(*arguments, **options)


class Programs:
    """Compile programs in the background, on as many threads as the machine has cores.

    They start in the order in which they are added. Each is needed by a phase, which waits for all
    of its own. A failure also occurs in the phase itself, with a better message.
    """

    def __init__(self):
        self._workers = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "compiling")
        self._needed: dict[str, list[concurrent.futures.Future]] = {}
        self._lock = threading.Lock()
        self.left: int = 0  # not compiled yet
        # compilations submitted and ended: equal at two times if there was none between
        self.events: int = 0

    def add(self, compile_one: Callable[[], Any], phase: str = "") -> None:
        """Submit a program for compilation; phase: the one that waits for it, if any."""
        self._count(1)

        def compile_counted() -> None:
            try:
                compile_one()
            finally:
                self._count(-1)

        future = self._workers.submit(compile_counted)
        if phase:
            self._needed.setdefault(phase, []).append(future)

    def wait(self, phase: str, progress: Callable[[], None]) -> None:
        """Wait for the programs that a phase needs; `progress` is called before and after each."""
        needed = self._needed.pop(phase, [])
        if needed:
            progress()
        for one in concurrent.futures.as_completed(needed):
            progress()
            if error := one.exception():
                message = f"A program of {phase} could not be compiled ahead: {error}"
                warnings.warn(message, stacklevel=1)

    def _count(self, more: int) -> None:
        """Count an event, and update the number left."""
        with self._lock:
            self.left += more
            self.events += 1

    def close(self) -> None:
        """Compile nothing more.

        A running compilation delays only the end of the process.
        """
        self._workers.shutdown(wait=False, cancel_futures=True)


def zeros(tree: Any) -> Any:
    """Return a tree with zeros on the host in place of shapes, for a run that reads its results."""
    return jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), tree)


def shapes(tree: Any) -> Any:
    """Return a tree with shapes in place of arrays, with the shardings of placed ones."""

    def shape(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        held = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=held)

    return jax.tree.map(shape, tree)
