"""Compile the programs of a plan for absent devices, and compare formulas with compilers.

The figures of a program are cached on disk, by the program's text and the compiler's version.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Lowered

from rlhf_jax.config.schema import Config
from rlhf_jax.memory.parts import GIGA
from rlhf_jax.monitoring import console
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls
from rlhf_jax.planner.planned import Planned
from rlhf_jax.planner.programs import programs as programs_of
from rlhf_jax.planner.search.collectives import find_collectives
from rlhf_jax.planner.topology import compiler_version, topology_devices
from rlhf_jax.runtime import jax_internals
from rlhf_jax.runtime.files import write_atomically

COMPILING_THREADS = 2  # each takes a core and up to 2 GB


class CompilerFigures(NamedTuple):
    """Hold the compiler's figures of one program: of one device, and FLOPs of all."""

    arguments: float  # bytes
    results: float  # bytes, without results that overwrite an argument
    temporary: float  # bytes
    received: float  # bytes
    flops: float  # of the jaxpr
    seconds: float  # of compilation
    refusal: str = ""  # why it was not compiled, if it does not fit

    @property
    def bytes(self) -> float:
        """Return the bytes of a device while the program runs."""
        return self.arguments + self.results + self.temporary

    def extended(self, longer: CompilerFigures, layers: int) -> CompilerFigures:
        """Return the figures with more layers, each of which adds as `longer` has over this one."""

        def extend(name: str) -> float:
            one = getattr(self, name)
            return one + layers * (getattr(longer, name) - one)

        grown = ("arguments", "results", "temporary", "received", "flops")
        return CompilerFigures(
            **{name: extend(name) for name in grown},
            seconds=self.seconds + longer.seconds,
            refusal=self.refusal or longer.refusal,
        )


class VerifiedProgram(NamedTuple):
    """Hold a program of a call, with the compiler's figures."""

    program: CallProgram
    compiled: CompilerFigures

    @property
    def peak(self) -> float:
        """Peak bytes per device while the program runs, resident arrays included."""
        return self.program.resident + self.compiled.bytes


class VerifiedPlan(NamedTuple):
    """Hold the programs of a plan, compiled for absent devices."""

    hardware: Hardware
    programs: list[VerifiedProgram]
    limit: float  # bytes of a device
    compiled: int  # number of compiled programs
    kept: int  # programs whose figures were on disk
    seconds: float  # total time

    @property
    def too_large(self) -> list[VerifiedProgram]:
        """Return the programs that do not fit next to resident arrays."""
        return [one for one in self.programs if one.compiled.refusal or one.peak > self.limit]


def verify_plan(config: Config, planned: Planned, observe: Callable[[str], None]) -> VerifiedPlan:
    """Compile the distinct programs of a run's plan, from shapes alone.

    `observe` receives each compiled one. Raises ValueError if nothing here compiles for the
    hardware.
    """
    began = time.perf_counter()
    hardware = planned.hardware
    devices = topology_devices(hardware)
    calls = PlacedCalls(config, planned.models, planned.plan, devices, hardware, planned.remat)
    folder = config.compilation_cache and Path(config.compilation_cache).expanduser() / "verified"
    identity = f"{hardware.name} {compiler_version(hardware.platform)}"
    compiler = CachingCompiler(identity, folder, observe)
    pending = []
    with concurrent.futures.ThreadPoolExecutor(COMPILING_THREADS, "compiling") as pool:
        for program in programs_of(calls):
            depths = program.compiled_layers or (program.depth,)
            pending.append((program, [compiler.submit(pool, program, depth) for depth in depths]))
    programs = []
    for program, futures in pending:
        figures = [future.result() for future in futures]
        whole = figures[0]
        if program.compiled_layers:
            whole = figures[0].extended(figures[1], program.depth - program.compiled_layers[0])
        programs.append(VerifiedProgram(program, whole))
    seconds = time.perf_counter() - began
    return VerifiedPlan(
        hardware, programs, hardware.gigabytes * GIGA, compiler.compiled, compiler.kept, seconds
    )


class CachingCompiler:
    """Compile each distinct program once, and cache its figures."""

    def __init__(self, identity: str, folder: Path | str, observe: Callable[[str], None]):
        """Begin for devices and a compiler by name; without a folder nothing is kept on disk."""
        self.compiled: int = 0
        self.kept: int = 0
        self._observe = observe
        self._folder = folder and Path(folder)
        self._identity = identity
        self._known: dict[str, concurrent.futures.Future[CompilerFigures]] = {}

    def submit(
        self, pool: concurrent.futures.Executor, program: CallProgram, depth: int
    ) -> concurrent.futures.Future[CompilerFigures]:
        """Return the figures of a program with `depth` layers, once available."""
        traced = program.trace(depth)
        lowered = traced.lower()
        text = f"{self._identity}\n{lowered.as_text()}"
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._known:
            flops = program.flops(traced)
            label = f"{program.call}, {program.name}"
            self._known[key] = pool.submit(self._figures, key, lowered, flops, label=label)
        return self._known[key]

    def _figures(self, key: str, lowered: Lowered, flops: float, *, label: str) -> CompilerFigures:
        """Return a program's figures, from disk if they are there."""
        path = Path(self._folder) / f"{key}.json" if self._folder else None
        if path and path.exists():
            # a damaged file is made again
            with contextlib.suppress(ValueError, TypeError):
                figures = CompilerFigures(**json.loads(path.read_bytes()))
                self.kept += 1
                return figures
        figures = compile_figures(lowered, flops)
        self.compiled += 1
        self._observe(f"compiled in {figures.seconds:.0f} s: {label}")
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(figures._asdict()).encode())
        return figures


def compile_figures(lowered: Lowered, flops: float) -> CompilerFigures:
    """Compile a program, and return the compiler's figures.

    Raises ValueError if it is refused for another reason than its size.
    """
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n")[0]
        if "RESOURCE_EXHAUSTED" not in message:
            raise ValueError(f"The compiler refuses a program of the plan: {message}") from error
        seconds = time.perf_counter() - began
        return CompilerFigures(0.0, 0.0, 0.0, 0.0, flops, seconds, refusal=message)
    sizes = compiled.memory_analysis()
    assert sizes is not None, "A compiler reports a program's memory."
    return CompilerFigures(
        arguments=sizes.argument_size_in_bytes,
        results=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        received=sum(one.received for one in find_collectives(str(compiled.as_text()))),
        flops=flops,
        seconds=time.perf_counter() - began,
    )


def print_verified(verified: VerifiedPlan) -> None:
    """Print the compiler's figures next to those of formulas, and whether all fits."""
    heading = f"{'compiled':>27}{'formula':>10}"
    memory = [("a chip's GB", f"{heading}{'in all':>9}")]
    work = [("PFLOP", f"{heading}  of all chips")]
    sent = [("GB received", f"{heading}  by a chip")]
    for one in verified.programs:
        program, compiled = one
        predicted = program.predicted
        sizes = _pair(program, compiled.bytes, predicted.bytes, GIGA)
        memory.append((program.call, f"{sizes}{one.peak / GIGA:9.2f}"))
        work.append((program.call, _pair(program, compiled.flops, predicted.flops, 1e15)))
        sent.append((program.call, _pair(program, compiled.received, predicted.received, GIGA)))
    notes = [
        f"in all: with resident arrays; a chip has {verified.limit / GIGA:g} GB",
        "each program once; those of generation from a few layers",
        f"{verified.compiled} programs compiled and {verified.kept} known, in"
        f" {verified.seconds:.0f} s; no chip was used",
    ]
    if verified.hardware.platform == "gpu" and not jax_internals.cudnn_version():
        notes.append(
            "plain attention, as cuDNN is not installed here (pip install nvidia-cudnn-cu12): a run"
            " with it needs less memory"
        )
    rows = [*memory, *work, *sent, ("", "\n".join(notes))]
    compiler = compiler_version(verified.hardware.platform)
    console.describe(f"rlhf_jax: programs for {verified.hardware.name} by {compiler}", rows)
    for one in verified.too_large:
        needs = f"a chip needs {one.peak / GIGA:.1f} GB"
        reason = one.compiled.refusal or f"{needs} and has {verified.limit / GIGA:.1f} GB"
        print(f"It does not fit: {one.program.call}, {one.program.name}: {reason}.")
    if not verified.too_large:
        print("It fits, by the compiler's figures.")


def _pair(program: CallProgram, compiled: float, formula: float, unit: float) -> str:
    """Format a figure of the compiler and a formula's; empty if both are 0."""
    named = f"{program.name:18}"
    if not compiled and not formula:
        return f"{named}{'-':>9}{'-':>10}"
    return f"{named}{compiled / unit:9.3f}{formula / unit:10.3f}"
