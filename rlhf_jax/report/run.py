"""Read the files in a run's workdir, for the report."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Row = dict[str, Any]
# Keys of a row by which strategies are summed; the rest are figures.
SUMMED_BY = ("live", "strategy", "drafter", "drafts")


@dataclasses.dataclass(frozen=True)
class Series:
    """Hold a number over steps, finite throughout."""

    name: str
    steps: np.ndarray  # [n] float64
    values: np.ndarray  # [n] float64

    def __len__(self) -> int:
        return len(self.steps)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Hold the work of each lane in a step: [n] spans by their beginning, an array per field.

    They do not overlap within a lane.
    """

    step: int
    lanes: tuple[str, ...]  # "slice 0", ... and other devices
    lane: np.ndarray  # its number
    kind: np.ndarray  # "generate", "exchange", "inference" or "training"
    name: np.ndarray  # the strategy of a round, or the call
    began: np.ndarray  # seconds from the first
    ended: np.ndarray  # seconds from the first beginning
    rows: np.ndarray  # live ones of a round, samples of an exchange
    amount: np.ndarray  # tokens, bytes of an exchange

    @property
    def file(self) -> str:
        """Return its file in the workdir."""
        return f"timeline/step-{self.step:06d}.json"

    def __len__(self) -> int:
        return len(self.lane)

    def where(self, chosen: np.ndarray) -> Trace:
        """Return the chosen [n] bool spans."""
        columns = {
            name: column[chosen]
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray)
        }
        return dataclasses.replace(self, **columns)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Hold the content of a run's files.

    Of the samples it has the first and the last batch, held-out ones if there are any.
    """

    name: str
    date: datetime.date
    config: dict[str, Any]  # dotted names
    title: str  # '' for an older run without one
    metrics: list[Row]  # one per step
    evaluations: list[Row]  # step and means, one per evaluation
    # none, one or two (step, samples); held out if `evaluations` is not empty
    samples: list[tuple[int, list[Row]]]
    # sums over all steps, by live rows and strategy
    strategies: list[Row]
    trace: Trace | None = None  # the latest
    # its command, commit, versions and devices
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the digest of each file of its own code, by FILE.py:NAME; None for an older run without them
    code: Mapping[str, str] | None = None


def read_run(workdir: str | pathlib.Path) -> RunRecord:
    """Return the run in `workdir`, with whichever files it has.

    Those are config, about, metrics, evaluations, samples, strategies and traces. Raises
    FileNotFoundError if there is neither config.json nor metrics.jsonl, ValueError for a damaged
    line; an incomplete last line is left out, since the run may be writing it.
    """
    folder = pathlib.Path(workdir).expanduser().resolve()
    files = [path for path in (folder / "metrics.jsonl", folder / "config.json") if path.is_file()]
    if not files:
        raise FileNotFoundError(
            f"{folder} holds neither config.json nor metrics.jsonl; name the workdir of a run."
        )
    # The report reads only the folder; the algorithm itself may not be importable here.
    about = _document(folder / "about.json") or _document(folder / "objective.json")
    evaluations, held_out = _evaluations(folder / "evaluations.jsonl")
    metrics = list(_rows(folder / "metrics.jsonl"))
    return RunRecord(
        name=folder.name,
        date=datetime.date.fromtimestamp(files[0].stat().st_mtime),
        config=_flat(_document(folder / "config.json")),
        title=str(about.get("title", "")),
        metrics=metrics,
        evaluations=evaluations,
        samples=held_out or _first_and_last(folder / "samples.jsonl"),
        strategies=_strategies(folder / "strategies.jsonl"),
        trace=_latest_trace(folder / "timeline"),
        environment={str(key): str(value) for key, value in about.get("environment", {}).items()},
        code=about.get("code"),
    )


def series(rows: list[Row], key: str, name: str = "") -> Series:
    """Return the finite values of `key` by step, named `name` or as the key."""
    points = [(row["step"], row[key]) for row in rows if _finite(row.get(key))]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return Series(name or key, steps, values)


def is_constant(line: Series) -> bool:
    """Return whether a number has the same value at each of several steps."""
    return len(line) > 1 and bool((line.values == line.values[0]).all())


def _finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _document(path: pathlib.Path) -> dict[str, Any]:
    """Return the content of a JSON file, or nothing if it is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); remove it, and the report is made without it."
        ) from None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config by dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= _flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def _rows(path: pathlib.Path) -> Iterator[Row]:
    """Yield the lines of a file one by one, as they may be many.

    An incomplete last line is left out.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not _finite(row.get("step")):
                raise ValueError(
                    f"{path}, line {number}, is no JSON object with a step; remove the line."
                )
            yield row


def _evaluations(path: pathlib.Path) -> tuple[list[Row], list[tuple[int, list[Row]]]]:
    """Return the means of every evaluation, and the samples of the first and the last."""
    means = []
    first = []
    last = []
    for row in _rows(path):
        last = [(row["step"], row.pop("samples", []))]
        first = first or last
        means.append(row)
    return means, first + last if len(means) > 1 else first


def _first_and_last(path: pathlib.Path) -> list[tuple[int, list[Row]]]:
    """Return the samples of the first step and of the last."""
    first = []
    last = []
    for step, rows in itertools.groupby(_rows(path), key=lambda row: row["step"]):
        last = [(step, list(rows))]
        first = first or last
    return first + last if first != last else first


def _strategies(path: pathlib.Path) -> list[Row]:
    """Return the rows of all steps, summed by live rows and strategy: a long run has many."""
    sums: dict[tuple, Row] = {}
    for row in _rows(path):
        if missing := [name for name in SUMMED_BY if name not in row]:
            raise ValueError(
                f"{path}: a line of step {row['step']} lacks {missing[0]}; remove the line."
            )
        names = {name: row[name] for name in SUMMED_BY}
        known = sums.setdefault(tuple(names.values()), names)
        known |= {
            name: known.get(name, 0) + row[name] for name in row.keys() - {"step", *SUMMED_BY}
        }
    return list(sums.values())


def _latest_trace(folder: pathlib.Path) -> Trace | None:
    """Return the trace of the last step that generated, or else of the last one that has any."""
    latest = None
    generated = False
    for path in sorted(folder.glob("step-*.json"))[-2:]:
        trace = _read_trace(path)
        generates = bool((trace.kind == "generate").any())
        if generates or not generated:
            latest = trace
        generated |= generates
    return latest


def _read_trace(path: pathlib.Path) -> Trace:
    """Read the trace of a step; ValueError if the file is not a trace."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        # The complete events are spans, and the threads are the lanes.
        named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        threads = sorted(named)
        spans = [event for event in events if event["ph"] == "X"]
        began = np.array([event["ts"] for event in spans], np.float64) / 1e6
        figures = np.array([[*event["args"].values()] for event in spans], np.int64).reshape(-1, 2)
        return Trace(
            step=int(path.stem.removeprefix("step-")),
            lanes=tuple(named[thread] for thread in threads),
            lane=np.searchsorted(threads, [event["tid"] for event in spans]),
            kind=np.array([event["cat"] for event in spans], str),
            name=np.array([event["name"] for event in spans], str),
            began=began,
            ended=began + np.array([event["dur"] for event in spans], np.float64) / 1e6,
            rows=figures[:, 0],
            amount=figures[:, 1],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no trace ({error!r}); remove it, and the report is made without it."
        ) from None
