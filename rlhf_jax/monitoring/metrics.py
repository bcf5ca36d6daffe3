"""What a run says: JSON lines and TensorBoard on disk; progress and tables on screen."""

from __future__ import annotations

import collections
import contextlib
import datetime
import io
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from rlhf_jax.runtime.files import write_atomically

# Keys that every line of metrics.jsonl has; seconds are wall seconds of the phase.
REQUIRED = (
    "step",
    "reward/mean",
    "kl/mean",
    "response/length_mean",
    "generation/seconds",
    "generation/tokens",
    "generation/rounds",
    "generation/tokens_per_second",
    "generation/tokens_per_round",
    "inference/seconds",
    "training/seconds",
    "loss/policy",
)

# (heading, key, width, format) of the columns of a step line.
COLUMNS = (
    ("reward", "reward/mean", 7, ".3f"),
    ("kl", "kl/mean", 8, ".4f"),
    ("loss", "loss/policy", 8, ".4f"),
    ("length", "response/length_mean", 7, ".1f"),
    ("tok/s", "generation/tokens_per_second", 7, ".0f"),
    ("tok/round", "generation/tokens_per_round", 9, ".2f"),
    ("gen s", "generation/seconds", 6, ".1f"),
    ("infer s", "inference/seconds", 7, ".1f"),
    ("train s", "training/seconds", 7, ".1f"),
)

RUN_FILES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "evaluations.jsonl",
    "strategies.jsonl",
    "tensorboard",
    "timeline",
    "policy",
    "report.html",
)

HEARTBEAT = 10.0  # seconds between phase lines where there is no terminal
SPARKS = "▁▂▃▄▅▆▇█"


class Writer:
    """Appends to the files of one run: metrics, evaluations, samples and strategies as JSON lines,
    and TensorBoard's `events`.

    `first_step` is the first step that this run will write; what a run that was interrupted after
    its last checkpoint left of that step and later is removed, so no step stands there twice. An
    error of writing is one OSError that names the file.
    """

    def __init__(self, workdir: str | pathlib.Path, first_step: int):
        folder = pathlib.Path(workdir)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lines = [
            folder / f"{name}.jsonl" for name in ("metrics", "evaluations", "samples", "strategies")
        ]
        for path in lines:
            _cut(path, first_step)
        self._events = folder / "tensorboard"
        self._board = _replay(self._events, lines[:2])
        self._files = self._metrics, self._evaluations, self._samples, self._strategies = [
            *map(_open, lines)
        ]

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One line of numbers; raises ValueError if a required key misses or a value is not
        finite.
        """
        missing = [key for key in REQUIRED if key not in metrics]
        if missing:
            raise ValueError(f"The metrics of a step miss {', '.join(missing)}.")
        numbers = {key: _number(key, value, metrics["step"]) for key, value in metrics.items()}
        _append(self._metrics, numbers)
        self._draw(numbers)

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line a sample: the step and whatever the sample holds (prompt, response, reward,
        ...).
        """
        for sample in samples:
            _append(self._samples, {"step": step, **sample})

    def write_strategies(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """One line for each strategy at each number of live rows of the step's roll-outs."""
        for row in rows:
            _append(self._strategies, {"step": step, **row})

    def write_evaluation(
        self, step: int, means: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """One line an evaluation: `step` (updates done before it), the means and the samples."""
        _append(self._evaluations, {"step": step, **means, "samples": samples})
        self._draw({"step": step, **means})

    def sync(self) -> None:
        """Returns when a power loss would spare every line so far: a checkpoint that is then saved
        lacks none.
        """
        for file in self._files:
            with _writing(str(file.name)):
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files."""
        for file in (*self._files, self._board):
            file.close()

    def _draw(self, row: Mapping[str, Any]) -> None:
        with _writing(self._events):
            self._board.write_event(_event(row))
            self._board.flush()


class Progress:
    """Shows where a run is: a live panel under the lines of past steps, or lines alone without a
    terminal.

    Use as a context manager: `update` whenever something is known, `finish` once a step.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None):
        self._total = total
        self._done = done
        self._console = console or Console()
        self._phase = "starting"
        self._live_numbers = {}
        self._seconds = []
        self._rewards = []
        self._step_start = self._phase_start = time.monotonic()
        self._next_line = 0.0
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:
        self._step_start = self._phase_start = time.monotonic()
        self._console.print(Text(_heading(self._total), "bold"), soft_wrap=True)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, phase: str, **numbers: float) -> None:
        """Says the phase that runs now, and numbers about it by name: `live_rows=5`."""
        now = time.monotonic()
        changed = phase != self._phase
        self._live_numbers = numbers
        if changed:
            self._phase = phase
            self._phase_start = now
        if not self._console.is_terminal and (
            now >= self._next_line or (changed and not self._seconds)
        ):
            self._next_line = now + HEARTBEAT
            self.say(
                f"{self._counter(min(self._done + 1, self._total))}  {self._phase} "
                f" {_spoken(numbers)}"
            )

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Ends a step: prints its line from the keys in COLUMNS, and reckons the time left."""
        now = time.monotonic()
        self._seconds.append(now - self._step_start)
        self._rewards.append(float(metrics["reward/mean"]))
        self._step_start, self._next_line, self._done = now, now + HEARTBEAT, self._done + 1
        cells = [format(float(metrics[key]), form).rjust(width) for _, key, width, form in COLUMNS]
        self.say(" ".join([self._counter(self._done), *cells, self._left().rjust(8)]))

    def say(self, line: str) -> None:
        """Prints a line above the panel."""
        self._console.print(Text(line.rstrip()), soft_wrap=True)

    def _counter(self, step: int) -> str:
        return f"{step}/{self._total}".rjust(_counter_width(self._total))

    def _left(self) -> str:
        """Time left, by the median of recent steps; the first, which compiles, counts only while
        alone.
        """
        recent = self._seconds[1:][-20:] or self._seconds
        return _duration((self._total - self._done) * statistics.median(recent)) if recent else "?"

    def _panel(self) -> Group:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"step {min(self._done + 1, self._total)} of {self._total}", "bold"),
            ProgressBar(total=self._total, completed=self._done, width=36),
            Text(f"{self._left()} left", "cyan"),
            Text(_sparkline(self._rewards[-24:]), "green"),
        )
        self._spinner.update(
            text=Text(f"{self._phase} {time.monotonic() - self._phase_start:.0f} s")
        )
        phase = Table.grid(padding=(0, 2))
        phase.add_row(self._spinner, Text(_spoken(self._live_numbers), "dim"))
        return Group("", bar, phase)


def open_run(workdir: str | pathlib.Path, config: str, first_step: int = 0) -> Writer:
    """A writer for a run in `workdir`, its config (JSON) beside it.

    A run that resumes, at a `first_step` above 0, goes on in the files that are there. One that
    starts keeps those of an earlier run: they move to a folder `earlier-N` in the same place.
    """
    folder = pathlib.Path(workdir)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if first_step == 0:
            _keep_earlier(folder)
    path = folder / "config.json"
    with _writing(path):
        write_atomically(path, (config + "\n").encode(), durable=True)
    return Writer(folder, first_step)


def _keep_earlier(folder: pathlib.Path) -> None:
    """Moves an earlier run's files out of the way."""
    old = [folder / name for name in RUN_FILES if (folder / name).exists()]
    if old:
        numbers = (path.name.removeprefix("earlier-") for path in folder.glob("earlier-*"))
        number = 1 + max((int(name) for name in numbers if name.isdigit()), default=0)
        (folder / f"earlier-{number}").mkdir()
        for path in old:
            path.rename(folder / f"earlier-{number}" / path.name)


def before_and_after(workdir: str | pathlib.Path, shown: int = 6) -> tuple[list, list]:
    """What `compare` shows of a run, from its first and its last evaluation: the measures that both
    have, and `shown` samples. Samples are paired where their prompts are equal, in order; the rest
    is left out.
    """
    path = pathlib.Path(workdir) / "evaluations.jsonl"
    lines = _lines(path)
    if not lines:
        return [], []
    first = _parsed(path, lines[0])
    last = _parsed(path, lines[-1])
    measures = [(key, first[key], last[key]) for key in first if key in last and is_measure(key)]
    texts = _paired(first.get("samples", []), last.get("samples", []))
    return measures, texts[:: -(-len(texts) // shown) or 1]


def is_measure(key: str) -> bool:
    """Whether a line of evaluations.jsonl has a measure of the policy under this key."""
    return key not in ("step", "samples") and not key.startswith("eval/generation/")


def _paired(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """(prompt, before, after): the first response to a prompt with the first, the second with the
    second.
    """
    left = collections.defaultdict(list)
    for sample in reversed(after):
        left[sample["prompt"]].append(sample["response"])
    pairs = ((sample["prompt"], sample["response"], left[sample["prompt"]]) for sample in before)
    return [(prompt, response, later.pop()) for prompt, response, later in pairs if later]


def describe(title: str, rows: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """Prints the table of what a run will use: (name, value) rows under a title."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console = console or Console()
    console.print(Text(title, "bold"), Padding(table, (0, 0, 1, 2)))


def compare(
    measures: Sequence[tuple[str, float, float]],
    samples: Sequence[tuple[str, str, str]],
    console: Console | None = None,
) -> None:
    """Prints (name, before, after) measures with their change, and (prompt, before, after)
    texts.
    """
    console = console or Console()
    numbers = Table("measure", box=box.SIMPLE_HEAD)
    for heading in ("before", "after", "change"):
        numbers.add_column(heading, justify="right")
    for name, before, after in measures:
        style = "green" if after > before else "red" if after < before else ""
        numbers.add_row(
            Text(name), f"{before:.3f}", f"{after:.3f}", Text(f"{after - before:+.3f}", style)
        )
    texts = Table("prompt", "before", "after", box=box.SIMPLE_HEAD, show_lines=True, expand=True)
    for row in samples:
        texts.add_row(*(Text(" ".join(cell.split()), overflow="fold") for cell in row))
    console.print(numbers, texts)


def _cut(path: pathlib.Path, first_step: int) -> None:
    """Leaves the file without the lines of `first_step` and later, and without a torn last line."""
    kept = [line for line in _lines(path) if _parsed(path, line)["step"] < first_step]
    with _writing(path):
        write_atomically(path, b"".join(line + b"\n" for line in kept), durable=True)


def _open(path: pathlib.Path) -> io.FileIO:
    """The file opened to append, without a buffer: what fails to be written does not wait to fail
    again.
    """
    with _writing(path):
        return path.open("ab", buffering=0)


def _lines(path: pathlib.Path) -> list[bytes]:
    """The complete lines of a file that may be missing; what follows the last newline is torn."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _parsed(path: pathlib.Path, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        return row | {"step": int(row["step"])}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: the line {line[:60]!r} is no record of a step; remove it to resume."
        ) from error


def _append(file: io.FileIO, row: Mapping[str, Any]) -> None:
    """Adds a line at once."""
    text = json.dumps(
        row, ensure_ascii=False, allow_nan=False, default=lambda value: np.asarray(value).tolist()
    )
    rest = memoryview((text + "\n").encode())
    with _writing(str(file.name)):
        while rest:
            rest = rest[file.write(rest) :]


def _replay(folder: pathlib.Path, files: Sequence[pathlib.Path]) -> EventsWriter:
    """TensorBoard's event file, written anew from JSON lines: they alone decide which steps stand
    there.
    """
    with _writing(folder):
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.*"):
            old.unlink()
        board = EventsWriter(str(folder / "events"))
        for path in files:
            for line in _lines(path):
                board.write_event(_event(_parsed(path, line)))
        board.flush()
    return board


def _event(row: Mapping[str, Any]) -> Event:
    """The numbers of a record as points of one step."""
    points = [
        Summary.Value(tag=key, simple_value=float(value))
        for key, value in row.items()
        if key not in ("step", "samples")
    ]
    return Event(wall_time=time.time(), step=row["step"], summary=Summary(value=points))


@contextlib.contextmanager
def _writing(path: str | pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): make room or name another"
            " workdir."
        ) from error


def _number(key: str, value: Any, step: Any) -> int | float:
    """A Python number from a Python, numpy or JAX scalar."""
    scalar = np.asarray(value).item()
    if not math.isfinite(scalar):
        raise ValueError(
            f"Metric {key} is {scalar} at step {step}; lower the learning rate or check the reward."
        )
    return scalar


def _counter_width(total: int) -> int:
    return max(len("step"), 2 * len(str(total)) + 1)


def _heading(total: int) -> str:
    headings = (heading.rjust(width) for heading, _, width, _ in COLUMNS)
    return " ".join(["step".rjust(_counter_width(total)), *headings, "left".rjust(8)])


def _spoken(numbers: Mapping[str, float]) -> str:
    return "  ".join(f"{value:.4g} {name.replace('_', ' ')}" for name, value in numbers.items())


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _sparkline(values: Sequence[float]) -> str:
    low = min(values, default=0.0)
    span = (max(values, default=0.0) - min(values, default=0.0)) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in values)
