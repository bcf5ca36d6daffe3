"""Compare runs: differences of configs and own code, overlaid curves, first differing texts."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.monitoring.metrics import is_measure, paired
from rlhf_jax.report.charts import COLOURS, Chart, lines_chart
from rlhf_jax.report.page import STEP_CHARTS, rendered, shown_pairs
from rlhf_jax.report.run import Row, RunRecord, read_run, series
from rlhf_jax.report.scales import reading, smooth
from rlhf_jax.runtime.files import write_atomically
from rlhf_jax.runtime.mirror import fetched

CHARTS = (("reward/mean", "Reward", ""), *STEP_CHARTS)
# Keys of metrics.jsonl whose last values are in the table, smoothed as in their charts.
LAST_FIGURES = (
    "reward/mean",
    "kl/response",
    "response/length_mean",
    "response/unfinished",
    "generation/tokens_per_second",
    "step/seconds",
)
SMOOTHED = (
    "Figures of training are smoothed, as the ends of their curves are; those of eval/ are the last"
    " evaluation's."
)
NO_MATTER = ("workdir", "compilation_cache", "dry_run")  # keys that change no number
SHOWN_DIGITS = 8  # of the digest of a file


class Comparison(NamedTuple):
    """Hold the differences of runs."""

    names: list[str]
    # a key of the config or a file of own code, and its value or digest in each run
    differences: list[tuple[str, list[str]]]
    configs: str  # a sentence if there are no differences
    texts: str  # a sentence: whether their samples differ, and from which step on
    figures: list[tuple[str, list[str]]]  # a number, and its last value in each run
    charts: list[Chart]
    pairs: list[tuple[str, list[tuple[str, Row]]]]  # a prompt, and each run's last sample of it


def write_comparison(workdirs: Sequence[str | pathlib.Path], path: pathlib.Path) -> Comparison:
    """Compare runs by their files, write an HTML file, and return the comparison.

    Errors are those of `read_run`, and OSError if the file cannot be written.
    """
    folders = [fetched(workdir) for workdir in workdirs]
    runs = [read_run(folder) for folder in folders]
    names = _names(workdirs)
    differences = _differences(runs)
    parting = _parting(folders)
    last = [run.samples[-1][1] if run.samples else [] for run in runs]
    comparison = Comparison(
        names,
        differences,
        configs="" if differences else _alike(runs),
        texts="Their texts are the same as far as both go."
        if parting is None
        else f"Their texts part in step {parting}.",
        figures=_figures(runs),
        charts=_charts(runs, names),
        pairs=shown_pairs(names, paired(*last)),
    )
    write_atomically(path, rendered("comparison.html", **comparison._asdict(), smoothed=SMOOTHED))
    return comparison


def _names(workdirs: Sequence[str | pathlib.Path]) -> list[str]:
    """Return the shortest unique suffix of each path, such as a/run and b/run."""
    paths = [pathlib.Path(workdir).expanduser().resolve().parts for workdir in workdirs]
    names = []
    for parts in paths:
        lengths = range(1, len(parts))
        alone = [n for n in lengths if sum(other[-n:] == parts[-n:] for other in paths) == 1]
        names.append("/".join(parts[-min(alone, default=1) :]))
    return names


def _differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the differences of the runs with each run's value: config keys, own code."""
    recorded = all(run.code is not None for run in runs)
    settings = [_settings(run.config, (run.code or {}) if recorded else {}) for run in runs]
    differences = []
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [one.get(key) for one in settings]
        if len(set(map(repr, values))) > 1:
            empty = (None, "", [], {})
            differences.append((key, ["—" if value in empty else str(value) for value in values]))
    return differences


def _settings(config: Mapping[str, Any], code: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's config and the digests of its own code by file.

    Folders are ignored, as copies of a file may be in different ones.
    """
    settings = {key: value for key, value in config.items() if key not in NO_MATTER}
    files: dict[str, set[str]] = {}
    for spec, digest in code.items():
        file = pathlib.PurePath(spec.rpartition(":")[0]).name
        files.setdefault(f"code of {file}", set()).add(digest[:SHOWN_DIGITS])
    return settings | {file: ", ".join(sorted(digests)) for file, digests in files.items()}


def _alike(runs: Sequence[RunRecord]) -> str:
    """Return the sentence for runs without differences, as far as their files show."""
    same = "Their configs are the same"
    if any(run.code is None for run in runs):
        return f"{same}; the code of their own files is not on record, and may differ."
    if any(run.code for run in runs):
        return f"{same}, and so is the code of their own files."
    return f"{same}."


def _figures(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the steps of each run, and the last values of measures and of LAST_FIGURES."""
    figures = [("steps", [f"{len(run.metrics):,}" for run in runs])]
    measures = dict.fromkeys(key for run in runs for row in run.evaluations for key in row)
    for key in (*filter(is_measure, measures), *LAST_FIGURES):
        rows = [run.evaluations if key.startswith("eval/") else run.metrics for run in runs]
        lines = [series(own, key).values for own in rows]
        if key in LAST_FIGURES:
            lines = [smooth(line) if len(line) else line for line in lines]
        if any(map(len, lines)):
            figures.append((key, [reading(float(line[-1])) if len(line) else "" for line in lines]))
    return figures


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """Draw the numbers that at least two runs have, one line per run."""
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
    return [chart for chart in drawn if chart.svg]


def _parting(workdirs: Sequence[str | pathlib.Path]) -> int | None:
    """Return the first step whose samples are not the same in all runs."""
    files = [pathlib.Path(workdir).expanduser() / "samples.jsonl" for workdir in workdirs]
    texts = [path.read_text("utf-8").splitlines() if path.is_file() else [] for path in files]
    for lines in itertools.zip_longest(*texts):
        rows = [json.loads(line) if line else None for line in lines]
        present = [row for row in rows if row]
        if len({(row["step"], row["prompt"], row["response"]) for row in present}) > 1:
            return min(row["step"] for row in present)
        if len(present) < len(rows):  # one run ends here
            return None
    return None
