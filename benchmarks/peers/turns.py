"""The protocol between step.py and a worker: a line in requests one RL step, a JSON line out has
its cost.

Standard library only. A worker sends `{"versions"}` once it is before its first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path


class Turns:
    """Wrap the steps of a training loop: wait before each, answer after it."""

    def __init__(self, packages: tuple[str, ...]):
        """Reserve stdout for answers: library output must not be taken for one."""
        self.answers = sys.stdout
        sys.stdout = sys.stderr
        self.versions = {name: version(name) for name in packages}
        self.versions |= {"python": sys.version.split()[0]}
        self.began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Answer with the step before, if there was one; wait for the next request."""
        if self.began is None:
            self._answer(versions=self.versions)
        else:
            wall, cpu = time.perf_counter(), cpu_seconds()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._answer(
                wall=wall - self.began[0], cpu=cpu - self.began[1], peak_bytes=peak, **self.figures
            )
        if not sys.stdin.readline():
            os._exit(0)
        self.figures: dict = {}
        self.began = time.perf_counter(), cpu_seconds()

    def note(self, **figures: object) -> None:
        """Add figures to the answer of the step that runs."""
        self.figures |= figures

    def _answer(self, **content: object) -> None:
        print(json.dumps(content), file=self.answers, flush=True)


def cpu_seconds() -> float:
    """User and system seconds of this process, all its threads, and its children."""
    used = os.times()
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread or a child that has just ended
            for child in (thread / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    own = used.user + used.system + used.children_user + used.children_system
    return own + ticks / os.sysconf("SC_CLK_TCK")
