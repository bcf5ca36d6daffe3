"""Seconds of each kernel at real shapes, beside the reference and the hardware's floor. One JSON
line a case.

    python benchmarks/kernels.py --rows 1,8,32,64 --nodes 1,9 > benchmarks/results/h100.jsonl

Both implementations take turns on the same inputs, CALLS calls a turn; `ratio` is the reference's
median over the kernel's. The floor is the larger of bytes over bandwidth and operations over peak,
of what must be read and multiplied at least: caches up to their lengths, the head once. It is known
for the devices of PEAKS; elsewhere it is null. What fits a chip's on-chip cache may be quicker than
the floor of its memory. Where the platform has no such kernel, only the reference is timed, and
`why` says so; where a case does not fit the device, `error` does.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.shapes import SHAPES, SLOTS
from pallas_kernels import dispatch
from pallas_kernels.shapes import BLOCK, Shape

# Bytes and operations in bfloat16 a second, from the vendors' data sheets, by the beginning of the
# device kind.
PEAKS = {
    "TPU v5 lite": (819e9, 197e12),
    "TPU v5": (2765e9, 459e12),
    "TPU v6 lite": (1640e9, 918e12),
    "NVIDIA H100 PCIe": (2000e9, 756e12),
    "NVIDIA H100": (3350e9, 989e12),
    "NVIDIA H200": (4800e9, 989e12),
}
CALLS = 10  # in a row, so that the start of a call does not count


class Problem(NamedTuple):
    """A kernel's inputs at one shape, and the least that any implementation must do."""

    inputs: tuple
    options: dict[str, Any]
    bytes: float
    flops: float
    in_place: bool = False  # the first input is donated, and replaced by the output


def main() -> None:
    """Print one JSON line a case."""
    for case in measure(arguments()):
        print(json.dumps(case), flush=True)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(PROBLEMS), help="some of them, with commas")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of benchmarks/shapes.py")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--nodes", default="1,9")
    parser.add_argument(
        "--slots", type=int, default=SLOTS, help="of each row's cache, all of them in use"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(line)
    options.rows, options.nodes = (
        [int(one) for one in text.split(",")] for text in (options.rows, options.nodes)
    )
    options.kernels, options.shapes = options.kernels.split(","), options.shapes.split(",")
    if not set(options.kernels) <= set(PROBLEMS) or not set(options.shapes) <= set(SHAPES):
        parser.error(
            f"--kernels takes some of {', '.join(PROBLEMS)}, --shapes some of {', '.join(SHAPES)}."
        )
    return options


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """The requested cases."""
    device = jax.devices()[0]
    where = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    sizes = itertools.product(options.kernels, options.shapes, options.rows, options.nodes)
    for kernel, name, rows, nodes in sizes:
        case = {
            "kernel": kernel,
            "shape": name,
            "rows": rows,
            "nodes": nodes,
            "dtype": options.dtype,
        } | where
        make = functools.partial(
            PROBLEMS[kernel], SHAPES[name], rows, nodes, options.slots, jnp.dtype(options.dtype)
        )
        contenders, why = implementations(
            kernel, device, jnp.dtype(options.dtype).itemsize, SHAPES[name]
        )
        try:
            yield (
                case
                | compared(contenders, make, options.repeats, device.device_kind)
                | {"why": why}
            )
        except jax.errors.JaxRuntimeError as error:  # such as a device that has too little memory
            yield case | {"error": str(error).partition("\n")[0]}


def compared(
    contenders: dict[str, Callable], make: Callable[[], Problem], repeats: int, kind: str
) -> dict:
    """Medians of the contenders, how many times as fast the kernel is, and both against the
    floor.
    """
    problems = {how: make() for how in contenders}
    seconds = {
        how: statistics.median(times) for how, times in timed(contenders, problems, repeats).items()
    }
    least = floor(problems["reference"], kind)
    ours = seconds.get("pallas")
    return {
        "seconds": seconds,
        "ratio": ours and seconds["reference"] / ours,
        "floor_seconds": least,
        "of_floor": least and least / (ours or seconds["reference"]),
    }


def implementations(
    kernel: str, device, itemsize: int, shape: Shape
) -> tuple[dict[str, Callable], str]:
    """The reference and, where the platform has one, the kernel; and why there is none."""
    found = {"reference": dispatch.implementation(kernel, dispatch.REFERENCE)}
    try:
        chosen, _ = dispatch.choose({kernel: "pallas"}, device, itemsize, [shape])
    except ValueError as error:
        return found, str(error)
    return found | {"pallas": dispatch.implementation(kernel, chosen)}, ""


def timed(
    contenders: dict[str, Callable], problems: dict[str, Problem], repeats: int
) -> dict[str, list[float]]:
    """Seconds of a call by each contender, turn by turn."""
    runs = {}
    inputs = {}
    times = {how: [] for how in contenders}
    for how, problem in problems.items():
        runs[how] = jax.jit(
            functools.partial(contenders[how], **problem.options),
            donate_argnums=(0,) if problem.in_place else (),
        )
        inputs[how] = calls(runs[how], problem.inputs, problem.in_place)
    for _, how in itertools.product(range(repeats), runs):
        start = time.perf_counter()
        inputs[how] = calls(runs[how], inputs[how], problems[how].in_place)
        times[how].append((time.perf_counter() - start) / CALLS)
    return times


def calls(run: Callable, inputs: tuple, in_place: bool) -> tuple:
    """CALLS calls, all done; the inputs of the next ones."""
    outputs = []
    for _ in range(CALLS):
        outputs.append(run(*inputs))
        inputs = (outputs.pop(), *inputs[1:]) if in_place else inputs
    jax.block_until_ready((outputs, inputs))
    return inputs


def floor(problem: Problem, kind: str) -> float | None:
    """Seconds that the device needs at least; None if its peaks are not known."""
    peaks = peaks_of(kind)
    return peaks and max(problem.bytes / peaks[0], problem.flops / peaks[1])


def peaks_of(kind: str) -> tuple[float, float] | None:
    """Bytes and operations a second of a device kind, or None if they are not known."""
    return next((peaks for name, peaks in PEAKS.items() if kind.startswith(name)), None)


# ---- the problems


def random(*size: int, dtype: Any = jnp.float32) -> jax.Array:
    """Noise of this shape."""
    return jax.random.normal(jax.random.key(0), size, dtype)


def caches(shape: Shape, rows: int, slots: int, dtype) -> tuple[jax.Array, jax.Array]:
    """A layer's keys and values."""
    keys = random(rows, shape.groups, shape.dim, slots, dtype=dtype)
    return keys, random(rows, shape.groups, slots, shape.dim, dtype=dtype)


def attention(shape: Shape, rows: int, nodes: int, slots: int, dtype) -> Problem:
    """Full caches of one layer, and a chain."""
    cache, window = (caches(shape, rows, size, dtype) for size in (slots, nodes))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (rows, nodes, nodes))
    query = random(rows, nodes, shape.heads, shape.dim, dtype=dtype)
    inputs = query, *cache, *window, jnp.full(rows, slots, jnp.int32), mask
    seen = rows * slots * shape.dim
    return Problem(
        inputs, {}, 2 * seen * shape.groups * dtype.itemsize, 4 * seen * shape.heads * nodes
    )


def head(shape: Shape, rows: int, nodes: int, slots: int, dtype) -> Problem:
    """A draw at every node, at temperature 1."""
    count = rows * nodes
    blocks = -(-shape.vocab // BLOCK)
    weights = random(
        *((shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab)), dtype=dtype
    )
    hidden = random(count, shape.width, dtype=dtype)
    inputs = hidden, weights, random(count, blocks), jnp.ones(count)
    return Problem(
        inputs, {"tied": shape.tied}, weights.size * dtype.itemsize, 2 * count * weights.size
    )


def law(shape: Shape, rows: int, nodes: int, slots: int, dtype) -> Problem:
    """Log-probs of 128 tokens a row."""
    count = 128 * rows
    weights = random(*((shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab)))
    inputs = random(count, shape.width, dtype=dtype), weights, jnp.zeros(count, jnp.int32)
    return Problem(
        inputs, {"temperature": 1.0, "tied": shape.tied}, 4 * weights.size, 2 * count * weights.size
    )


def commits(shape: Shape, rows: int, nodes: int, slots: int, dtype) -> Problem:
    """A whole path into the caches of all layers, in place."""
    cache, window = (
        tuple(caches(shape, rows, size, dtype) for _ in range(shape.layers))
        for size in (slots, nodes)
    )
    path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (rows, nodes))
    inputs = cache, window, path, jnp.full(rows, slots // 2, jnp.int32)
    moved = 2 * 2 * shape.layers * rows * nodes * shape.groups * shape.dim * dtype.itemsize
    return Problem(inputs, {}, moved, 0.0, in_place=True)


PROBLEMS = {"tree_attention": attention, "verify_head": head, "logprobs": law, "commit": commits}


if __name__ == "__main__":
    main()
