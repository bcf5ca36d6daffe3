"""Compare runs: what their configs differ in, their last figures, where their texts part."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_jax.monitoring import console
from rlhf_jax.monitoring.report.comparison import write_comparison
from rlhf_jax.runtime.mirror import fetched


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog=argv[0], description=__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of each run")
    parser.add_argument("--out", type=Path, default=Path("comparison.html"), help="the page")
    asked = parser.parse_args(argv[1:])
    if len(asked.workdirs) < 2:
        parser.error("name two runs or more")
    found = write_comparison([fetched(workdir) for workdir in asked.workdirs], asked.out)
    for key, values in found.differences:
        print(f"{key}: {' | '.join(map(str, values))}")
    if not found.differences:
        print("Their configs are the same.")
    print()
    console.table(["", *found.names], found.figures)
    same = "Their texts are the same as far as both go."
    print(same if found.parting is None else f"Their texts part in step {found.parting}.")
    print(f"Their curves and samples are in {asked.out}.")
    return 0
