"""Count the bytes that devices of a compiled program exchange, from its optimised HLO.

Each collective counts by the iterations of all loops around it, wherever it is called; the start
and end of an asynchronous one count once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Bytes that each device receives by a ring of n devices, over those of its result.
RECEIVED = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
}
# A TPU's fusion of an all-reduce with the slice of it that each device keeps.
SCATTERING = "all-reduce-scatter"

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")


class Collective(NamedTuple):
    """Describe one collective of a program."""

    kind: str  # a key of `RECEIVED`
    result_bytes: float  # of one device
    group: int  # number of its devices
    times: int  # number of its runs

    @property
    def received(self) -> float:
        """Return the bytes that a device receives in the whole program."""
        return received_bytes(self.kind, self.result_bytes, self.group) * self.times


class Instruction(NamedTuple):
    """Hold one line of HLO."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def constant(self) -> int:
        """Return the value of an instruction `constant`."""
        return int(self.rest.partition(")")[0])


class Program(NamedTuple):
    """Hold the computations of a program, by their names."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int


def received_bytes(kind: str, result_bytes: float, group: int) -> float:
    """Return the bytes that each device of a group receives by one collective, as a ring."""
    return RECEIVED[kind](group) * result_bytes


def find_collectives(text: str) -> list[Collective]:
    """Return all collectives in a program's optimised HLO text, those in loops by iterations."""
    program = _parse(text)
    return list(_collectives_of(program, program.entry, times=1))


def _parse(text: str) -> Program:
    """Parse the text of a program."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            current = computations.setdefault(begins[2], {})
            entry = begins[2] if begins[1] else entry
        elif match := INSTRUCTION.match(line):
            current[match[1]] = Instruction(*match.groups())
    header = text.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return Program(computations, entry, devices=math.prod(map(int, counts)))


def _collectives_of(program: Program, name: str, times: int) -> Iterator[Collective]:
    """Yield the collectives of a computation that runs `times` times, and of its callees."""
    own = program.computations[name]
    for instruction in own.values():
        if instruction.opcode == "conditional":
            branches = re.findall(r"%([\w.\-]+)", instruction.rest.partition(")")[2])
            each = [list(_collectives_of(program, branch, times)) for branch in branches]
            yield from max(each, key=lambda collectives: sum(one.received for one in collectives))
        elif instruction.opcode.removesuffix("-done") in RECEIVED:
            yield _collective(program, name, instruction, times=times)
        elif not instruction.opcode.endswith("-done"):
            turns = _turns(program, instruction) if instruction.opcode == "while" else 1
            for called in CALLED.findall(instruction.rest):
                yield from _collectives_of(program, called, times * turns)


def _collective(
    program: Program, computation: str, instruction: Instruction, *, times: int
) -> Collective:
    """Describe a collective; an end takes the attributes of its start."""
    kind = instruction.opcode.removesuffix("-done")
    begun = instruction
    if kind != instruction.opcode:
        begun = program.computations[computation][instruction.operands[0]]
    group = group_size(begun.rest, program.devices)
    size = shape_bytes(instruction.shape)
    if kind == "all-reduce" and computation.startswith(SCATTERING):
        return Collective("reduce-scatter", size / group, group, times)
    return Collective(kind, size, group, times)


def group_size(attributes: str, devices: int) -> int:
    """Return the number of devices in a collective, in any of HLO's notations."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        moved = [a != b for a, b in re.findall(r"\{?(\d+),(\d+)", pairs[1])]
        return 1 + any(moved)
    if mesh := re.search(r"replica_groups=@?mesh\w*\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(tiled[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(listed[1].split(",")) if listed else devices


def shape_bytes(shape: str) -> float:
    """Return the bytes of a shape in HLO's notation, or of all shapes of a tuple."""
    total = 0.0
    for dtype, dims in re.findall(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        count = math.prod(int(size) for size in dims.split(",") if size)
        total += count * (int(bits[0]) if bits else 8) / 8
    return total


def _turns(program: Program, loop: Instruction) -> int:
    """Return the number of iterations of a loop: the compiler's annotation, or from its condition.

    The compiler for TPUs adds no annotation; its conditions compare a counter, from 0, with a
    constant. A loop with neither counts once.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    names = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", loop.rest)
    if names is None:
        return 1
    condition, body = (program.computations[name] for name in names.groups())
    for compared in condition.values():
        if compared.opcode == "compare" and "direction=LT" in compared.rest:
            counter, bound = (condition[name] for name in compared.operands)
            index = re.search(r"index=(\d+)", counter.rest)
            if index and bound.opcode == "constant":
                return math.ceil(bound.constant / _step(body, int(index[1])))
    return 1


def _step(body: dict[str, Instruction], index: int) -> int:
    """Return the increment of one part of a loop's state per iteration; 1 if unclear."""
    added = body.get(list(body.values())[-1].operands[index])
    if added is None or added.opcode != "add":
        return 1
    terms = [body[name] for name in added.operands]
    steps = [term.constant for term in terms if term.opcode == "constant"]
    return steps[0] if steps else 1
