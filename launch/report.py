"""Write the report of a run as one HTML file: python launch/report.py WORKDIR"""

from __future__ import annotations

import sys

from rlhf_jax.monitoring.report.page import write_report


def main(argv: list[str]) -> int:
    """Return the exit code; a mistake of the user's is one sentence on stderr."""
    if len(argv) != 2:
        print(
            "error: name the workdir of one run: python launch/report.py WORKDIR", file=sys.stderr
        )
        return 2
    try:
        print(write_report(argv[1]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
