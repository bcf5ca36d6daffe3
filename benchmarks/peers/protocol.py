"""The protocols between a script and its workers: a JSON line in, a JSON line out.

Standard library only. A worker of compare.py sends `{"versions", "threads"}` once it is loaded,
then, for each `{"prompts": [[id, ...], ...], "new_tokens": n, "seed": s}`, `{"seconds", "tokens"}`.
One of step.py or gpu/passes.py sends `{"versions"}` once it is before its first step, and for each
request takes a step and sends its cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Generate = Callable[[list[list[int]], int, int], list[list[int]]]


class Answers:
    """Send answers through stdout, which nothing else writes to."""

    def __init__(self, packages: tuple[str, ...]):
        """Reserve stdout: library output must not be taken for an answer."""
        self.stdout = sys.stdout
        sys.stdout = sys.stderr
        self.versions = {name: version(name) for name in packages}
        self.versions |= {"python": sys.version.split()[0]}

    def send(self, **content: object) -> None:
        """Send one answer."""
        print(json.dumps(content), file=self.stdout, flush=True)


class Turns:
    """Wrap the steps of a training loop: wait before each, answer after it."""

    def __init__(self, packages: tuple[str, ...]):
        """Begin before the first step."""
        self.answers = Answers(packages)
        self.began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Answer with the step before, if there was one; wait for the next request."""
        if self.began is None:
            self.answers.send(versions=self.answers.versions)
        else:
            wall = time.perf_counter() - self.began[0]
            cpu = cpu_seconds() - self.began[1]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.answers.send(wall=wall, cpu=cpu, peak_bytes=peak, **self.figures)
        if not sys.stdin.readline():
            os._exit(0)
        self.figures: dict = {}
        self.began = time.perf_counter(), cpu_seconds()

    def note(self, **figures: object) -> None:
        """Add figures to the answer of the step that runs."""
        self.figures |= figures


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


def cores() -> int:
    """CPU cores this process may use: the thread count of every engine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve(packages: tuple[str, ...], threads: int, generate: Generate) -> None:
    """Answer commands until stdin ends. `generate(prompts, new_tokens, seed)` gives the new ids, on
    the host.

    The time is from prompt ids on the host to new ids on the host: prefill is inside, text is not.
    """
    answers = Answers(packages)
    answers.send(versions=answers.versions, threads=threads)
    for line in sys.stdin:
        command = json.loads(line)
        rows = len(command["prompts"])
        new_tokens = command["new_tokens"]
        started = time.perf_counter()
        samples = generate(command["prompts"], new_tokens, command["seed"])
        seconds = time.perf_counter() - started
        lengths = [len(sample) for sample in samples]
        if lengths != [new_tokens] * rows:
            raise ValueError(
                f"{rows} samples of {new_tokens} tokens were requested, and {lengths} came."
            )
        answers.send(seconds=seconds, tokens=sum(lengths))
