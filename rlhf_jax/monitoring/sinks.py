"""Send the metrics of a run to experiment trackers: W&B, MLflow, trackio, or your own.

A tracker reads its destination and project from the environment variables in its documentation,
such as WANDB_MODE, MLFLOW_TRACKING_URI or TRACKIO_DIR.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import pathlib
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlhf_jax.monitoring.metrics import SAMPLE_COLUMNS
from rlhf_jax.runtime.extensions import Registry
from rlhf_jax.runtime.foreign import SURROGATE

PROJECT = "rlhf_jax"  # project of runs if the environment names none
LONGEST_PARAMETER = 500  # characters of a config's value that MLflow keeps
LONGEST_NAME = 250  # characters of a metric's name that MLflow keeps; bytes, of a file's name
MOST_METRICS = 1000  # that a call of MLflow may hold
# Characters of a name that each tracker refuses or interprets, as regular expressions: W&B and
# trackio reserve some names, and for MLflow a name is a path.
REFUSED_BY_WANDB = r"^_(?=(?:step|timestamp|runtime|wandb)\Z)"
REFUSED_BY_TRACKIO = r"^(?:p(?=roject\Z)|r(?=un\Z)|t(?=ime(?:stamp)?\Z)|s(?=tep\Z)|m(?=etrics\Z)|_)"
REFUSED_BY_MLFLOW = r"[^/\w.\- :]|(?:(?<=/)|^)/|/\Z|(?:(?<=/)|^)\.(?=\.?(?:/|\Z))|^\.(?=\.)"
# In MLflow's file store a name is a file and cannot also be a folder, as eval/reward would be for
# eval/reward/failed: only the last slash is kept.
REFUSED_BY_FILES = rf"{REFUSED_BY_MLFLOW}|/(?=[\s\S]*/)"
# An underscore that would otherwise begin an escape.
AMBIGUOUS = "_(?=x[0-9A-F]{4})"


def escaped(name: str, refused: str, longest: int | None = None) -> str:
    """Return a name in which each character that a regular expression matches is _xHHHH_.

    H are the digits of its code point, four or eight, as in .NET's `XmlConvert.EncodeName`;
    `_x([0-9A-F]{4}|[0-9A-F]{8})_` matches them. A name of more than `longest` bytes is cut, and
    ends in a digest of the whole.
    """

    def code(match: re.Match[str]) -> str:
        point = ord(match[0])
        return f"_x{point:04X}_" if point < 1 << 16 else f"_x{point:08X}_"

    fitting = re.sub(f"{AMBIGUOUS}|{SURROGATE.pattern}|{refused}", code, name)
    data = fitting.encode()
    if longest is None or len(data) <= longest:
        return fitting
    digest = hashlib.sha256(data).hexdigest()[:16]
    return f"{data[: longest - len(digest) - 1].decode(errors='ignore')}_{digest}"


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Describe a run to a sink."""

    id: str  # unchanged if the run is resumed in another process
    workdir: pathlib.Path
    config: dict[str, Any]  # values by dotted key

    @property
    def name(self) -> str:
        """Return the display name of the run."""
        return self.workdir.name


class Sink(Protocol):
    """Receive the numbers of a run's steps, each step once and in order.

    A sink is made by calling its class with a `TrackedRun`, on a thread of its own. A sink that
    raises is reported once and gets nothing more until the run is started again; it never ends the
    run. One that buffers, and so may lose steps if the process is killed, has a method `last_step`:
    at the beginning it returns the last step that was kept, -1 for none and None if unknown. One
    that shows texts has a method `write_samples(step, name, samples)`: before `write` it gets some
    samples of the step, rows with the fields of samples.jsonl, under a name.
    """

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the metrics of a step, and of an evaluation before it, by name."""
        ...

    def close(self) -> None:
        """End the run, or this process's part of it."""
        ...


class Wandb:
    """Write to Weights & Biases; without a network under WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun):
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=run.workdir / "sinks",
            config=run.config,
            resume="allow",
        )

    def write_samples(self, step: int, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples as a table, with the step that is written next."""
        rows = [[sample.get(column) for column in SAMPLE_COLUMNS] for sample in samples]
        table = importlib.import_module("wandb").Table(columns=[*SAMPLE_COLUMNS], data=rows)
        self._run.log({name: table}, step=step, commit=False)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step."""
        named = {escaped(name, REFUSED_BY_WANDB): value for name, value in numbers.items()}
        self._run.log(named, step=step, commit=True)

    def last_step(self) -> int:
        """Return the last step on the server; an offline run is written again, as another run."""
        return self._run.step - 1

    def close(self) -> None:
        """Upload the rest, or write it if W&B is offline."""
        self._run.finish()


class Mlflow:
    """Write to an MLflow server or folder."""

    def __init__(self, run: TrackedRun):
        entities = importlib.import_module("mlflow.entities")
        mlflow = importlib.import_module("mlflow")
        self._metric = entities.Metric
        self._client = mlflow.MlflowClient()
        in_files = urllib.parse.urlsplit(mlflow.get_tracking_uri()).scheme in ("", "file")
        self._refused = REFUSED_BY_FILES if in_files else REFUSED_BY_MLFLOW
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if earlier := self._client.search_runs([experiment], f"tags.`rlhf_jax.run` = '{run.id}'"):
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        made = self._client.create_run(experiment, tags={"rlhf_jax.run": run.id}, run_name=run.name)
        self._id = made.info.run_id
        texts = {key: str(value)[:LONGEST_PARAMETER] for key, value in run.config.items()}
        parameters = [entities.Param(key, text) for key, text in texts.items()]
        for start in range(0, len(parameters), 100):  # as many as a call may hold
            self._client.log_batch(self._id, params=parameters[start : start + 100])

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step."""
        now = int(1000 * time.time())
        metrics = [
            self._metric(escaped(key, self._refused, LONGEST_NAME), one, now, step)
            for key, one in numbers.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class Trackio:
    """Write to trackio's database, which its dashboard shows."""

    def __init__(self, run: TrackedRun):
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{run.name}-{run.id}"
        last = trackio.SQLiteStorage.get_max_step_for_run(project, name)
        nothing = None if os.environ.get("TRACKIO_SPACE_ID") else -1  # a Space cannot be queried
        self._last = nothing if last is None else last
        self._run = trackio.init(project=project, name=name, config=run.config, resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step."""
        named = {escaped(name, REFUSED_BY_TRACKIO): value for name, value in numbers.items()}
        self._run.log(named, step=step)

    def last_step(self) -> int | None:
        """Return the last step in the database at the beginning."""
        return self._last

    def close(self) -> None:
        """Write pending records."""
        self._run.finish()


def _no_sink(candidate: object) -> str:
    """Return why an object is not a sink, or ''."""
    missing = [name for name in ("write", "close") if not hasattr(candidate, name)]
    return f"is no sink: it has no {missing[0]}" if missing else ""


SINKS: Registry[Callable[[TrackedRun], Sink]] = Registry(
    "sinks", _no_sink, {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
)


def record_name(name: str) -> str:
    """Return the name of a sink's record: its name, for FILE.py:NAME the NAME."""
    return name.rpartition(":")[2]


def require(names: Sequence[str]) -> None:
    """Raise ValueError for an invalid sink, a missing package, or a duplicate name.

    The message is one sentence.
    """
    for name in names:
        SINKS.require(name)
        if SINKS[name].__module__ == __name__ and importlib.util.find_spec(name) is None:
            raise ValueError(f"sinks names {name!r}: pip install 'rlhf_jax[{name}]' to have it.")
    called = [record_name(name) for name in names]
    if len(set(called)) < len(called):
        raise ValueError(f"The sinks are called {', '.join(called)}; rename one of the same name.")
