"""The report of a workflow: its runs, and side by side what each model writes and is worth."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.monitoring.metrics import is_measure, paired
from rlhf_jax.report.page import rendered, shown_pairs
from rlhf_jax.report.run import Row, RunRecord, read_run, series
from rlhf_jax.report.scales import duration, reading, share
from rlhf_jax.runtime.files import write_atomically

RECORD = "stage.json"  # in the workdir of a stage: its identity, its seconds, whether it is done
RESAMPLED = 2000  # of the bootstrap
TEXT_COLUMNS = ("prompt", "response")


class WinRate(NamedTuple):
    """Hold how often a model's response is worth more than another's to the same prompt."""

    share: float  # ties count half
    low: float  # ends of the interval that holds 95 % of bootstrapped prompts
    high: float

    def __str__(self) -> str:
        return f"{share(self.share, 1)} ({share(self.low, 1)} to {share(self.high, 1)})"


def write_workflow(workdir: pathlib.Path, stages: Sequence[str]) -> pathlib.Path:
    """Write WORKDIR/report.html from the workdirs of its stages, and return its path."""
    runs = {name: read_run(workdir / name) for name in stages}
    records = {name: json.loads((workdir / name / RECORD).read_text()) for name in stages}
    rows = [
        (
            name,
            run.title if run.metrics else "measured as it is",
            f"{len(run.metrics):,}",
            duration(records[name]["seconds"]),
            *_before_and_after(run),
        )
        for name, run in runs.items()
    ]
    models = comparable(written(workdir, runs), list(runs.values()))
    path = workdir / "report.html"
    content = rendered(
        "workflow.html",
        name=workdir.name,
        stages=rows,
        models=list(models),
        measures=measures(models),
        wins=wins(models),
        pairs=shown_pairs(list(models), paired(*models.values())) if models else [],
    )
    write_atomically(path, content)
    return path


def written(workdir: pathlib.Path, runs: Mapping[str, RunRecord]) -> dict[str, list[Row]]:
    """Return the held-out samples of each model that was measured by what it writes.

    Before its first step a run measures the model that it begins with: the stage's that made it.
    """
    found: dict[str, list[Row]] = {}
    for name, run in runs.items():
        for step, samples in run.samples if run.evaluations else []:
            path = pathlib.Path(str(run.config.get("model.path", "")))
            begins = str(path)
            if path.is_relative_to(workdir):
                begins = path.relative_to(workdir).parts[0]
            label = begins if step == 0 else name
            if samples:
                found.setdefault(label, samples)
    return found


def comparable(models: Mapping[str, list[Row]], runs: Sequence[RunRecord]) -> dict[str, list[Row]]:
    """Return the samples of prompts that all models have, without rewards of different kinds."""
    prompts = [{row["prompt"] for row in rows} for rows in models.values()]
    shared = set.intersection(*prompts) if prompts else set()
    keys = ("functions", "models", "preference_models", "weights", "missing_end")
    kinds = {
        str([run.config.get(f"reward.{key}") for key in keys])
        for run in runs
        if any("eval/reward" in row for row in run.evaluations)
    }
    relative = any(run.config.get("reward.preference_models") for run in runs)
    left_out = {"reward"} if len(kinds) > 1 or relative else set()
    return {
        name: [
            {key: value for key, value in row.items() if key not in left_out}
            for row in rows
            if row["prompt"] in shared
        ]
        for name, rows in models.items()
        if shared
    }


def measures(models: Mapping[str, Sequence[Row]]) -> list[tuple[str, list[str]]]:
    """Return the mean of each number of the samples, and their words, for each model."""
    names = dict.fromkeys(key for rows in models.values() for row in rows for key in row)
    found = [
        (name, [_mean([row.get(name) for row in rows]) for rows in models.values()])
        for name in names
        if name not in TEXT_COLUMNS
    ]
    words = [_mean([len(row["response"].split()) for row in rows]) for rows in models.values()]
    return [*found, ("words", words)]


def wins(models: Mapping[str, Sequence[Row]]) -> list[tuple[str, str, str]]:
    """Return (later model over earlier one, measure, share of wins and its interval)."""
    found = []
    for earlier, later in itertools.combinations(models, 2):
        names = dict.fromkeys(
            key for row in models[later] for key in row if key not in TEXT_COLUMNS
        )
        for name in names:
            rate = win_rate(models[earlier], models[later], name)
            if rate is not None:
                found.append((f"{later} over {earlier}", name, str(rate)))
    return found


def win_rate(earlier: Sequence[Row], later: Sequence[Row], measure: str) -> WinRate | None:
    """Compare all responses of two models to each prompt; None where they share none.

    The interval is a bootstrap over prompts, with random numbers that are always the same.
    """
    numbered = [[row for row in rows if row.get(measure) is not None] for rows in (earlier, later)]
    rates = []
    for prompt in dict.fromkeys(row["prompt"] for row in later):
        sides = [
            np.array([row[measure] for row in having if row["prompt"] == prompt])
            for having in numbered
        ]
        if all(map(len, sides)):
            difference = sides[1][:, None] - sides[0]
            rates.append(float(np.mean((difference > 0) + 0.5 * (difference == 0))))
    if not rates:
        return None
    drawn = np.random.default_rng(0).choice(rates, (RESAMPLED, len(rates))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return WinRate(float(np.mean(rates)), float(low), float(high))


def _mean(values: Sequence[Any]) -> str:
    """Write the mean of the numbers that are there."""
    numbers = [value for value in values if value is not None]
    return reading(float(np.mean(numbers))) if numbers else "—"


def _before_and_after(run: RunRecord) -> tuple[str, str, str]:
    """Return the first held-out measure of a run, before and after it."""
    key = next((key for key in (run.evaluations or [{}])[0] if is_measure(key)), "")
    line = series(run.evaluations, key)
    if not len(line):
        return ("—", "—", "—")
    first, last = (reading(float(line.values[place])) for place in (0, -1))
    return (key, first, last if len(line) > 1 else "—")
