"""Write the records of a run to its files: JSON lines, and TensorBoard's events."""

from __future__ import annotations

import collections
import io
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf_jax.runtime.files import write_atomically, writing

# Imported when a run writes: planning and measuring do not need the package.
if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

# Keys of every line of metrics.jsonl; others depend on the parts of a run.
REQUIRED = ("step", "step/seconds")

# The files of records, one per line, that a run appends to.
LINES = ("metrics", "evaluations", "samples", "strategies")

# Number of samples shown of a step, and before and after the run.
SHOWN_SAMPLES = 6

# Names in trackers of the samples of a step, and of an evaluation.
SAMPLES = "samples"
HELD_OUT = "held-out samples"
SAMPLE_COLUMNS = ("prompt", "response", "reward")

# Files of a run in its workdir, to be moved if an earlier run left them.
RUN_FILES = (
    "config.json",
    "about.json",
    "objective.json",  # of earlier versions
    *(f"{name}.jsonl" for name in LINES),
    "tensorboard",
    "sinks",
    "timeline",
    "policy",
    "best",
    "report.html",
)


T = TypeVar("T")


class Writer:
    """Append to the files of one run: metrics, evaluations, samples, strategies, and TensorBoard's.

    `first_step` is the first step that this run will write. Lines of that step and later, left by a
    run that was interrupted after its last checkpoint, are removed, so that no step is there twice.
    An error of writing is one OSError that names the file.
    """

    def __init__(self, workdir: str | pathlib.Path, first_step: int):
        from tensorboardX.event_file_writer import EventsWriter

        folder = pathlib.Path(workdir)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.jsonl" for name in LINES]
        for path in paths:
            kept = [line for line in _lines(path) if _parsed(path, line)["step"] < first_step]
            with writing(path):
                write_atomically(path, b"".join(line + b"\n" for line in kept), durable=True)
        self._events_folder = folder / "tensorboard"
        with writing(self._events_folder):
            # Rewritten from the lines of metrics and evaluations, the only source of truth.
            self._events_folder.mkdir(exist_ok=True)
            for old in self._events_folder.glob("events.*"):
                old.unlink()
            self._events = EventsWriter(str(self._events_folder / "events"))
            for path in paths[:2]:
                for line in _lines(path):
                    self._events.write_event(_event(row := _parsed(path, line)))
                    if samples := row.get("samples"):
                        self._events.write_event(_text_event(HELD_OUT, row["step"], samples))
            rows = (_parsed(paths[2], line) for line in _lines(paths[2]))
            for step, samples in itertools.groupby(rows, key=lambda row: row["step"]):
                self._events.write_event(_text_event(SAMPLES, step, [*samples]))
            self._events.flush()
        self._files: dict[str, io.FileIO] = {}
        for name, path in zip(LINES, paths, strict=True):
            # Without a buffer, a failed write does not fail again later.
            with writing(path):
                self._files[name] = path.open("ab", buffering=0)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write a step's metrics: Python, numpy or JAX scalars by key.

        Raises ValueError if a key of REQUIRED is missing or a value is not finite.
        """
        if missing := [key for key in REQUIRED if key not in metrics]:
            raise ValueError(f"The metrics of a step miss {', '.join(missing)}.")
        numbers = {}
        for key, value in metrics.items():
            scalar = np.asarray(value).item()
            if not math.isfinite(scalar):
                raise ValueError(
                    f"Metric {key} is {scalar} at step {metrics['step']}; lower the learning rate"
                    " or check the reward."
                )
            numbers[key] = scalar
        self._append("metrics", numbers)
        self._add_event(_event(numbers))

    def write_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the step's "samples", or its "strategies" at each number of live rows: a line each.

        A line has the step, and all fields of the row.
        """
        rows = [*rows]
        for row in rows:
            self._append(name, {"step": step, **row})
        if name == SAMPLES and rows:
            self._add_event(_text_event(SAMPLES, step, rows))

    def write_evaluation(
        self, step: int, means: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write a line for an evaluation: `step` (updates done before it), means and samples."""
        self._append("evaluations", {"step": step, **means, "samples": samples})
        self._add_event(_event({"step": step, **means}))
        self._add_event(_text_event(HELD_OUT, step, samples))

    def sync(self) -> None:
        """Sync all lines to disk.

        A checkpoint that is saved afterwards lacks none.
        """
        for file in self._files.values():
            with writing(str(file.name)):
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files.values(), self._events):
            file.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a record to the file of a name as one line, at once."""
        text = json.dumps(
            row,
            ensure_ascii=False,
            allow_nan=False,
            default=lambda value: np.asarray(value).tolist(),
        )
        rest = memoryview((text + "\n").encode())
        file = self._files[name]
        with writing(str(file.name)):
            while rest:
                rest = rest[file.write(rest) :]

    def _add_event(self, event: Event) -> None:
        """Add to TensorBoard's file."""
        with writing(self._events_folder):
            self._events.write_event(event)
            self._events.flush()


def check(workdir: str | pathlib.Path) -> None:
    """Raise ValueError if the files of a resumed run have an invalid line."""
    for name in LINES:
        read_rows(workdir, name)


def open_run(
    workdir: str | pathlib.Path, config: str, first_step: int = 0, about: str = "{}"
) -> Writer:
    """Return a writer for a run in `workdir`, and write its config (JSON) next to its files.

    about: JSON, too: the "title" of the run, digests of its own "code", and its "environment";
    report and comparison read it.

    A run that resumes, at a `first_step` above 0, continues the existing files. A new one keeps
    those of an earlier run: they move to a folder `earlier-N` in the same place.
    """
    folder = pathlib.Path(workdir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        old = [folder / name for name in RUN_FILES if (folder / name).exists()]
        if old and first_step == 0:
            names = [path.name.removeprefix("earlier-") for path in folder.glob("earlier-*")]
            number = 1 + max((int(name) for name in names if name.isdigit()), default=0)
            earlier = folder / f"earlier-{number}"
            earlier.mkdir()
            for path in old:
                path.rename(earlier / path.name)
    for path, text in (folder / "config.json", config), (folder / "about.json", about):
        with writing(path):
            write_atomically(path, (text + "\n").encode(), durable=True)
    return Writer(folder, first_step)


def read_rows(workdir: str | pathlib.Path, *names: str) -> list[dict[str, Any]]:
    """Return the records of a run's files of these names, one file after the other."""
    paths = [pathlib.Path(workdir) / f"{name}.jsonl" for name in names]
    return [_parsed(path, line) for path in paths for line in _lines(path)]


def before_and_after(workdir: str | pathlib.Path) -> tuple[list, list]:
    """Return the rows of `console.compare`, from a run's first and last evaluation.

    They are (name, before, after) of the common measures, and (prompt, before, after) of up to
    SHOWN_SAMPLES samples, `paired` and evenly spread.
    """
    path = pathlib.Path(workdir) / "evaluations.jsonl"
    lines = _lines(path)
    if not lines:
        return [], []
    first = _parsed(path, lines[0])
    last = _parsed(path, lines[-1])
    measures = [(key, first[key], last[key]) for key in first if key in last and is_measure(key)]

    pairs = [
        (one["prompt"], one["response"], other["response"])
        for one, other in paired(first.get("samples", []), last.get("samples", []))
    ]
    return measures, spread(pairs)


def spread(rows: Sequence[T]) -> list[T]:
    """Return SHOWN_SAMPLES of some rows, or all if they are fewer, evenly spread over them."""
    return [*rows[:: -(-len(rows) // SHOWN_SAMPLES) or 1]]


def paired(*batches: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Pair samples of several batches by equal prompts.

    The first response to a prompt is paired with the first, the second with the second. The rest is
    left out.
    """
    others = []
    for batch in batches[1:]:
        by_prompt = collections.defaultdict(list)
        for sample in reversed(batch):
            by_prompt[sample["prompt"]].append(sample)
        others.append(by_prompt)
    return [
        (sample, *(other[sample["prompt"]].pop() for other in others))
        for sample in batches[0]
        if all(other[sample["prompt"]] for other in others)
    ]


def is_measure(key: str) -> bool:
    """Return whether a key of evaluations.jsonl is a measure of the policy."""
    return key not in ("step", "samples") and not key.startswith("eval/generation/")


def _lines(path: pathlib.Path) -> list[bytes]:
    """Return the complete lines of a file, which end with a newline; none if it is missing."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _parsed(path: pathlib.Path, line: bytes) -> dict[str, Any]:
    """Return the record in a line of a file, with a whole number as its step."""
    try:
        row = json.loads(line)
        return row | {"step": int(row["step"])}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: the line {line[:60]!r} is no record of a step; remove it to resume."
        ) from error


def _event(row: Mapping[str, Any]) -> Event:
    """Return the numbers of a record as TensorBoard's points of one step."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    points = [
        Summary.Value(tag=key, simple_value=float(value))
        for key, value in row.items()
        if key not in ("step", "samples")
    ]
    return Event(wall_time=time.time(), step=row["step"], summary=Summary(value=points))


def _text_event(tag: str, step: int, samples: Sequence[Mapping[str, Any]]) -> Event:
    """Return some samples of a step as TensorBoard's text, a table in Markdown."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.summary import text

    def cell(value: object) -> str:
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        return " ".join(shown.split()).replace("|", "\\|")

    heading = [SAMPLE_COLUMNS, ("---",) * len(SAMPLE_COLUMNS)]
    rows = [[cell(row.get(name)) for name in SAMPLE_COLUMNS] for row in spread(samples)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (*heading, *rows))
    return Event(wall_time=time.time(), step=step, summary=text(tag, table))
