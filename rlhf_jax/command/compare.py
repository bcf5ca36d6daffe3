"""Compare runs: differences of configs and own code, last metrics, the first differing step."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_jax.monitoring import console
from rlhf_jax.report.comparison import SMOOTHED, write_comparison


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog=argv[0], description=__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of each run")
    parser.add_argument("--out", type=Path, default=Path("comparison.html"), help="the page")
    options = parser.parse_args(argv[1:])
    if len(options.workdirs) < 2:
        parser.error("name two runs or more")
    replaced = options.out.exists()
    comparison = write_comparison(options.workdirs, options.out)
    for key, values in comparison.differences:
        print(f"{key}: {' | '.join(map(str, values))}")
    print(comparison.configs)
    console.table(["last figures", *comparison.names], comparison.figures)
    print(SMOOTHED)
    print(comparison.texts)
    old = ", in place of the file that was there" if replaced else ""
    print(f"Their curves and samples are in {options.out}{old}.")
    return 0
