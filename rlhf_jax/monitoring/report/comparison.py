"""Compare runs: curves over each other, what their configs differ in, where their texts part."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.monitoring.metrics import is_measure, paired
from rlhf_jax.monitoring.report.charts import COLOURS, Chart, lines_chart
from rlhf_jax.monitoring.report.page import STEP_CHARTS, rendered, shown_pairs
from rlhf_jax.monitoring.report.run import Row, RunRecord, read_run, series
from rlhf_jax.monitoring.report.scales import reading, smooth
from rlhf_jax.runtime.files import write_atomically

CHARTS = (("reward/mean", "Reward", ""), *STEP_CHARTS)
# Keys of metrics.jsonl whose last values stand in the table, smoothed as in their charts.
LAST_FIGURES = (
    "reward/mean",
    "kl/response",
    "response/length_mean",
    "response/unfinished",
    "generation/tokens_per_second",
    "step/seconds",
)
NO_MATTER = ("workdir", "compilation_cache", "dry_run")  # keys that change no number


class Comparison(NamedTuple):
    """Hold what tells runs apart."""

    names: list[str]
    differences: list[tuple[str, list[Any]]]  # a key of the config, and its value in each run
    parting: int | None  # the first step whose samples differ; None where none does
    figures: list[tuple[str, list[str]]]  # a number, and what it is at last in each run
    charts: list[Chart]
    pairs: list[tuple[str, list[tuple[str, Row]]]]  # a prompt, and each run's last sample of it


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
    last = [run.samples[-1][1] if run.samples else [] for run in runs]
    found = Comparison(
        names,
        differences,
        _parting(workdirs),
        figures=_figures(runs),
        charts=_charts(runs, names),
        pairs=shown_pairs(names, paired(*last)),
    )
    write_atomically(path, rendered("comparison.html", **found._asdict()))
    return found


def _figures(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the steps of each run, and the last values of measures and of LAST_FIGURES."""
    found = [("steps", [f"{len(run.metrics):,}" for run in runs])]
    measures = dict.fromkeys(key for run in runs for row in run.evaluations for key in row)
    for key in (*filter(is_measure, measures), *LAST_FIGURES):
        rows = [run.evaluations if key.startswith("eval/") else run.metrics for run in runs]
        lines = [series(own, key).values for own in rows]
        if key in LAST_FIGURES:
            lines = [smooth(line) if len(line) else line for line in lines]
        if any(map(len, lines)):
            found.append((key, [reading(float(line[-1])) if len(line) else "" for line in lines]))
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
