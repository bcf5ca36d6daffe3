"""Part a: each kernel for the GPU against its law, at the sizes of its tests and at real shapes."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernels
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import ROOT, Sizes, compute_dtype, environment
from benchmarks.shapes import SHAPES

# By kernel, the tests that hold it; those marked `gpu` run.
TESTS = {
    "tree_attention": "kernels/test_tree_attention.py",
    "verify_head": "kernels/test_verify_head.py",
    "commit": "kernels/test_commit.py",
    "logprobs": "kernels/test_logprobs_kernel.py",
    "all": "kernels/test_gpu_kernels.py",
}
# Largest error of a number over the largest number of its row, as the tests allow.
TOLERANCE = 1e-2
NODES = 9


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield the tests of each kernel, then each kernel at real shapes."""
    for kernel, file in TESTS.items():
        yield Case(f"{kernel}: tests", functools.partial(run_tests, file, sizes.law_tests))
    for name, kernel in itertools.product(sizes.law_shapes, kernels.PROBLEMS):
        check = functools.partial(at_real_shape, kernel, name, sizes)
        yield Case(f"{kernel}: {name}", check)


def held(figures: dict[str, Any], kernel: str) -> bool | None:
    """Return whether a kernel followed its law in a case; None if no kernel ran.

    A failed test whose name mentions other kernels does not count.
    """
    if "tests" not in figures:
        return figures.get("within")
    others = [other for other in kernels.PROBLEMS if other != kernel]
    failed = [
        test for test in figures["failed"] if kernel in test or not any(o in test for o in others)
    ]
    return not failed if figures["passed"] or failed else None


def run_tests(file: str, marks: str) -> dict[str, Any]:
    """Run the tests of a file with these marks in a separate process; count the outcomes.

    Raises RuntimeError if pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Options of pyproject.toml need plugins that a machine with a GPU may lack.
        options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        platform = "cpu" if jax.default_backend() == "cpu" else "cuda,cpu"
        outcome = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", marks, *options, f"tests/{file}"],
            cwd=ROOT,
            env=environment(JAX_PLATFORMS=platform),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if outcome.returncode not in (0, 1):  # tests that could not be imported, or none
            last = outcome.stdout.strip().rpartition("\n")[2]
            raise RuntimeError(f"pytest ended with {outcome.returncode}: {last}")
        return {"tests": file} | counted(xml.parse(report).getroot())


def counted(report: xml.Element) -> dict[str, Any]:
    """Count the tests of a JUnit report that passed, and name those that failed, with the error."""
    failed = {}
    skipped = set()
    passed = 0
    for test in report.iter("testcase"):
        problem = next((part for part in test if part.tag in ("failure", "error")), None)
        left_out = test.find("skipped")
        if problem is not None:
            failed[test.get("name", "")] = cause(problem.text or "")
        elif left_out is not None:
            skipped.add(left_out.get("message", ""))
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": sorted(skipped)}


def cause(trace: str) -> str:
    """Return the most informative line of a failed test's trace: pytest's last that names an error.

    The first one seldom is: XLA's own errors only report that a callback or a kernel failed.
    """
    lines = [line[1:].strip() for line in trace.splitlines() if line.startswith("E ")]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or [""])[-1][:300]


def at_real_shape(kernel: str, name: str, sizes: Sizes) -> dict[str, Any]:
    """Compare a kernel, and its reference, with the reference in float32, row by row.

    The reference's own error is the yardstick: it rounds to the same dtype. Gradients of log-probs
    are compared too, and only the tests bound them. If the platform has no such kernel there is
    only the reference, and `why`.
    """
    dtype = compute_dtype()
    shape = SHAPES[name]
    contenders, why = kernels.implementations(kernel, jax.devices()[0], dtype.itemsize, shape=shape)

    def make() -> kernels.Problem:
        return kernels.PROBLEMS[kernel](shape, sizes.law_rows, NODES, sizes.kernel_slots, dtype)

    def errors_of(run: Callable[[Callable, kernels.Problem], list[jax.Array]]) -> dict[str, Any]:
        law = run(contenders["reference"], exact(make()))
        return {how: worst(run(one, make()), law, kernel) for how, one in contenders.items()}

    errors = errors_of(outputs)
    figures: dict[str, Any] = {"errors": errors, "why": why}
    if kernel == "logprobs":
        figures["gradients"] = errors_of(gradients)
    if "pallas" in errors:
        figures["within"] = within(errors["pallas"], errors["reference"])
    return figures


def within(kernel: Mapping[str, float], reference: Mapping[str, float]) -> bool:
    """Return whether a kernel's errors are within the tests' bound, or twice the reference's.

    At real widths the logits of random weights are so large that a reference, too, rounds the
    entropy of a token to more than the tests' bound.
    """
    return all(error <= max(TOLERANCE, 2 * reference[name]) for name, error in kernel.items())


def exact(problem: kernels.Problem) -> kernels.Problem:
    """Return a problem with every number in float32."""

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return problem._replace(inputs=jax.tree.map(wide, problem.inputs))


def outputs(function: Callable, problem: kernels.Problem) -> list[jax.Array]:
    """Return the outputs of a function, leaf by leaf, in float32."""
    run = jax.jit(functools.partial(function, **problem.options))
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(run(*problem.inputs))]


def gradients(function: Callable, problem: kernels.Problem) -> list[jax.Array]:
    """Return the gradients of log-probs and entropies, summed, by hidden states and head."""
    hidden, head, targets = problem.inputs

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logprobs, entropy = function(hidden, head, targets, **problem.options)
        return logprobs.sum() + entropy.sum()

    found = jax.jit(jax.grad(total, argnums=(0, 1)))(hidden, head)
    return [leaf.astype(jnp.float32) for leaf in found]


def worst(found: list[jax.Array], law: list[jax.Array], kernel: str) -> dict[str, float]:
    """Return the largest error of each output, over the largest number of its row.

    Of the head it is those of nodes where the same block is chosen, and the share of the others: of
    two blocks that are nearly equal, rounding decides.
    """
    if kernel != "verify_head":
        return {"outputs": max(map(relative, found, law))}
    normaliser, score, block, inside = range(4)
    same = found[block] == law[block]
    return {
        "normaliser": relative(found[normaliser], law[normaliser]),
        "score": relative(found[score], law[score]),
        "inside": relative(found[inside][same], law[inside][same]),
        "other blocks": float(jnp.mean(~same)),
    }


def relative(found: jax.Array, law: jax.Array) -> float:
    """Return the largest error over the largest number of its row, the last axis.

    Infinite where other numbers are finite than by the law.
    """
    real = jnp.isfinite(law)
    if not law.size:
        return 0.0
    if not bool(jnp.array_equal(real, jnp.isfinite(found))):
        return math.inf
    difference = jnp.abs(jnp.where(real, found - law, 0.0)).max(-1)
    largest = jnp.abs(jnp.where(real, law, 0.0)).max(-1)
    return float((difference / jnp.maximum(largest, 1e-30)).max())
