"""Write the report of a run, WORKDIR/report.html: curves, samples, and what to look at first."""

from __future__ import annotations

import argparse
import sys

from rlhf_jax.monitoring.report.page import write_report
from rlhf_jax.runtime.mirror import fetched


def main(argv: list[str]) -> int:
    """Return the exit code; a mistake of the user's is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog=argv[0], description=__doc__)
    parser.add_argument("workdir", help="of the run; the run may be going on")
    asked = parser.parse_args(argv[1:])
    try:
        print(write_report(fetched(asked.workdir)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
