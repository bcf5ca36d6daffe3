"""Part b: each kernel against the reference and the hardware's floor, and the table for "auto"."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.gpu import laws
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import Sizes, compute_dtype
from pallas_kernels import measured
from pallas_kernels.measured import LEAST_CASES
from rlhf_jax.runtime.files import write_atomically


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield a case for each kernel, shape, rows and nodes, those that come most often first."""
    shapes = itertools.product(sizes.kernel_rows, sizes.kernel_shapes)
    for (rows, name), kernel in itertools.product(shapes, kernels.PROBLEMS):
        # The log-probs of training have no tree.
        for nodes in sizes.kernel_nodes[:1] if kernel == "logprobs" else sizes.kernel_nodes:
            options = {
                "--kernels": kernel,
                "--shapes": name,
                "--rows": rows,
                "--nodes": nodes,
                "--slots": sizes.kernel_slots,
                "--repeats": sizes.kernel_repeats,
            }
            case = f"{kernel}: {name}, {rows} rows, {nodes} nodes"
            yield Case(case, functools.partial(time_kernel, options))


def time_kernel(options: Mapping[str, Any]) -> dict[str, Any]:
    """Time one case of benchmarks/kernels.py; RuntimeError if it does not fit the device."""
    options = {"--dtype": compute_dtype().name, **options}
    line = [str(word) for pair in options.items() for word in pair]
    (figures,) = kernels.measure(kernels.arguments(line))
    if "error" in figures:
        raise RuntimeError(figures["error"])
    return figures


def write_table(ledger: Ledger, path: Path) -> list[str]:
    """Write the package's table from the measured cases; return a line for each kernel.

    A kernel has a place only if its laws held in part a: all that were tried, of tests and of real
    shapes. One that is in the table already loses its place if a law did not hold.
    """
    table = dict(measured.table())
    lines = []
    for kernel in kernels.PROBLEMS:
        laws_held = held_laws(kernel, ledger)
        broken = [case for case, holds in laws_held.items() if holds is False]
        row = _summary(kernel, ledger)
        if broken:
            table.pop((kernel, ledger.document["device"]), None)
            lines.append(f"{kernel}: no measurement; its law did not hold in {', '.join(broken)}")
        elif not any(laws_held.values()):
            lines.append(f"{kernel}: no measurement; no law of it was tried in part laws")
        elif row is None:
            lines.append(f"{kernel}: no measurement; fewer than {LEAST_CASES} cases were timed")
        else:
            table[row.kernel, row.device_kind] = row
            lines.append(f"{kernel}: {row.ratio:.2f} times the reference in three of four cases")
    write_atomically(path, measured.as_text(table).encode())
    return lines


def held_laws(kernel: str, ledger: Ledger) -> dict[str, bool | None]:
    """Return for each case of part laws about a kernel whether it held; None: nothing ran."""
    record = ledger.part("laws")
    beginnings = (f"{kernel}: ", "all: ")
    found = {case: laws.held(figures, kernel) for case, figures in record["done"].items()}
    found |= dict.fromkeys(record["failed"], False)
    return {case: holds for case, holds in found.items() if case.startswith(beginnings)}


def _summary(kernel: str, ledger: Ledger) -> measured.Measurement | None:
    """Return the measurement of a kernel, if enough cases were timed."""
    done = ledger.part("speeds")["done"].values()
    rows = [figures for figures in done if figures["kernel"] == kernel and figures["ratio"]]
    if not rows:
        return None
    ratios = [figures["ratio"] for figures in rows]
    last = rows[-1]
    return measured.summarise(kernel, last["device"], ratios, jax=last["jax"], date=last["date"])
