"""Compare runs: curves over each other, what their configs differ in, where their texts part."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.monitoring.report.charts import Chart, lines_chart
from rlhf_jax.monitoring.report.page import STEP_CHARTS, rendered
from rlhf_jax.monitoring.report.run import RunRecord, read_run, series
from rlhf_jax.runtime.files import write_atomically

CHARTS = (("reward/mean", "Reward", ""), *STEP_CHARTS)
COLOURS = 4  # classes of lines: other-0 ...
NO_MATTER = ("workdir", "compilation_cache", "dry_run")  # keys that change no number


class Comparison(NamedTuple):
    """Hold what tells runs apart."""

    names: list[str]
    differences: list[tuple[str, list[Any]]]  # a key of the config, and its value in each run
    parting: int | None  # the first step whose samples differ; None where none does
    charts: list[Chart]


def write_comparison(workdirs: Sequence[str | pathlib.Path], path: pathlib.Path) -> Comparison:
    """Compare runs by their files, write that as one HTML file, and return it.

    Errors are those of `read_run`, and OSError where the file cannot be written.
    """
    runs = [read_run(workdir) for workdir in workdirs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # as of runs/a/run and runs/b/run
        names = [str(workdir) for workdir in workdirs]
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differences = [
        (key, [run.config.get(key) for run in runs])
        for key in keys
        if key not in NO_MATTER and len({repr(run.config.get(key)) for run in runs}) > 1
    ]
    found = Comparison(names, differences, _parting(workdirs), _charts(runs, names))
    write_atomically(path, rendered("comparison.html", **found._asdict()))
    return found


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """Draw the numbers that at least two runs have, one line a run."""
    measures = dict.fromkeys(key for run in runs for row in run.evaluations for key in row)
    wanted = [
        *((key, f"Held-out {key.removeprefix('eval/')}", "") for key in measures if "eval/" in key),
        *CHARTS,
    ]
    drawn = []
    for key, title, note in wanted:
        lines = []
        for index, (run, name) in enumerate(zip(runs, names, strict=True)):
            rows = run.evaluations if key.startswith("eval/") else run.metrics
            lines.append((f"other-{index % COLOURS}", series(rows, key, name)))
        if sum(bool(line) for _, line in lines) > 1:
            drawn.append(lines_chart(title, note, lines))
    return drawn


def _parting(workdirs: Sequence[str | pathlib.Path]) -> int | None:
    """Return the first step whose samples are not the same in all runs."""
    files = [pathlib.Path(workdir).expanduser() / "samples.jsonl" for workdir in workdirs]
    texts = [path.read_text("utf-8").splitlines() if path.is_file() else [] for path in files]
    for lines in itertools.zip_longest(*texts):
        rows = [json.loads(line) if line else None for line in lines]
        told = [row for row in rows if row]
        if len({(row["step"], row["prompt"], row["response"]) for row in told}) > 1:
            return min(row["step"] for row in told)
        if len(told) < len(rows):  # one run ends here
            return None
    return None
