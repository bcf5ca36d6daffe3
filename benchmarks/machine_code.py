"""Mosaic's kernels for Hopper as compiled: registers, spills and shared memory of each, and the
number of kernels per layer of a program."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax._src.interpreters import mlir
from jax.stages import Compiled, Lowered
from jaxlib.mlir import ir

from rlhf_jax.planner.search.collectives import INSTRUCTION, RECEIVED, Instruction, shape_bytes

# Mosaic then has ptxas print its statistics, past Python.
os.environ.setdefault("MOSAIC_GPU_DUMP_PTXAS", "1")
USED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*?"
    r"Used (\d+) registers"
)
DEVICE_CODE = ("ENTRY", "%command_buffer")  # computations whose instructions are launched


def compile_to_machine_code(lowered: Lowered) -> tuple[Compiled, list[dict[str, int]]]:
    """Compile a program; return the figures of ptxas and of the launch for each of Mosaic's
    kernels."""
    with written() as path:
        compiled = lowered.compile()
        output = path.read_text(errors="replace")
    names = ("stack_bytes", "spill_store_bytes", "spill_load_bytes", "registers")
    used = [dict(zip(names, map(int, found), strict=True)) for found in USED.findall(output)]
    shared = shared_memory(lowered)
    # one that is launched twice is made once
    return compiled, [one | {"shared_bytes": size} for one, size in zip(used, shared, strict=False)]


@contextlib.contextmanager
def written() -> Iterator[Path]:
    """A file of the library output to this process's screen meanwhile."""
    with tempfile.NamedTemporaryFile("w+") as file:
        kept = {number: os.dup(number) for number in (1, 2)}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number in kept:
                os.dup2(file.fileno(), number)
            yield Path(file.name)
        finally:
            for number, old in kept.items():
                os.dup2(old, number)
                os.close(old)


def shared_memory(lowered: Lowered) -> list[int]:
    """The bytes of shared memory of a thread block, of each kernel of Mosaic's in a program."""
    module: Any = lowered.compiler_ir("stablehlo")
    found = []
    with module.context:
        for operation in _operations(module.operation):
            if "mosaic_gpu" not in str(operation.attributes.get("call_target_name", "")):
                continue
            config = operation.attributes["mhlo.backend_config"]
            found.append(_launched_with(config["module"].value_bytes))
    return found


def _operations(operation: Any) -> Iterator[Any]:
    """All operations inside one, at any depth."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _launched_with(module: bytes) -> int:
    """The dynamic shared memory of a kernel's launch, its last operand, a constant."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        text = str(ir.Module.parse(module))
    launch = re.search(r"gpu\.launch\"\((.*?)\)", text)
    assert launch, "Mosaic launches one kernel a call."
    name = launch[1].split(", ")[-1]
    constant = re.search(rf"{name} = .*?value = (\d+) : i32", text)
    assert constant, "A launch says how much shared memory it wants."
    return int(constant[1])


class Launched(NamedTuple):
    """The work that a program starts on a device."""

    counts: Counter[str]  # kernels, and collectives by kind
    moved: float  # bytes of all arguments and results of kernels, each once per kernel


def launched(compiled: Compiled) -> Launched:
    """The kernels of a program without loops; a kernel may read a part of its arguments."""
    counts: Counter[str] = Counter()
    sizes: dict[str, float] = {}
    moved = 0.0
    runs = False
    for line in str(compiled.as_text()).splitlines():
        if line.endswith("{") and not line.startswith(" "):
            runs = line.startswith(DEVICE_CODE)
            sizes = {}
        found = INSTRUCTION.match(line) if runs else None
        if found is None:
            continue
        instruction = Instruction(*found.groups())
        sizes[instruction.name] = shape_bytes(instruction.shape)
        kind = instruction.opcode.removesuffix("-start")
        if kind in ("fusion", "custom-call", "copy"):
            counts["kernel"] += 1
            given = sum(sizes.get(name, 0.0) for name in instruction.operands)
            moved += given + sizes[instruction.name]
        elif kind in RECEIVED:
            counts[kind] += 1
    return Launched(counts, moved)
