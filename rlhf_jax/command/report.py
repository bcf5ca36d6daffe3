"""Write the report of a run, WORKDIR/report.html: warnings, curves and samples."""

from __future__ import annotations

import argparse

from rlhf_jax.report.page import write_report
from rlhf_jax.runtime.mirror import fetched


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog=argv[0], description=__doc__)
    parser.add_argument("workdir", help="of the run; the run may be going on")
    options = parser.parse_args(argv[1:])
    print(write_report(fetched(options.workdir)))
    return 0
