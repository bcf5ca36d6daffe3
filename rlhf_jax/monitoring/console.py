"""Show a run on screen: progress, and tables of its resources and results."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.phases import PhaseSeconds

# (heading, key of the metrics, width in characters, format) of the columns of a step's line; those
# whose metric a run has are shown. The panel draws the first of them.
STEP_COLUMNS = (
    ("reward", "reward/mean", 7, ".3f"),
    ("drawn alike", "drafter/acceptance", 11, ".3f"),
    ("kl", "kl/mean", 8, ".4f"),
    ("loss", "loss/policy", 8, ".4f"),
    ("student's", "drafter/loss", 9, ".4f"),
    ("length", "response/length_mean", 7, ".1f"),
    ("tok/s", "generation/tokens_per_second", 7, ".0f"),
    ("tok/round", "generation/tokens_per_round", 9, ".2f"),
    ("gen s", "generation/seconds", 6, ".1f"),
    ("infer s", "inference/seconds", 7, ".1f"),
    ("train s", "training/seconds", 7, ".1f"),
)
TIME_WIDTH = 8  # characters of the last column, the time left

PHASE_SECONDS = 10.0  # between two lines about the phase without a terminal
RECENT_STEPS = 20  # whose median gives the time left
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 24  # drawn in the panel


class Progress:
    """Show the progress of a run: a live panel under the lines of past steps, or lines alone.

    Without a terminal there is no panel. Use as a context manager: call `update` whenever something
    is known, `finish` once per step.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        program: Callable[[], str] = lambda: "",
    ):
        """Begin after some steps; `program` names the program that compiles now, '' for none."""
        self._program = program
        self._total = total
        self._done = done
        self._console = console or Console()
        self._phase = "starting"
        self._live_numbers: Mapping[str, float] = {}
        self._parts: PhaseParts | None = None
        self._seconds: list[float] = []
        self._other_seconds = 0.0
        self._columns: list[tuple[str, str, int, str]] = []
        self._drawn: list[float] = []
        self._counter_width = max(len("step"), 2 * len(str(total)) + 1)
        self._next_line = 0.0
        self._step_start = time.monotonic()
        self._phase_start = self._step_start
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:
        self._step_start = time.monotonic()
        self._phase_start = self._step_start
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, phase: str, parts: PhaseParts | None = None, **numbers: float) -> None:
        """Show the current phase, its parts, and numbers about it by name: `live_rows=5`."""
        now = time.monotonic()
        changed = phase != self._phase
        self._live_numbers = numbers
        self._parts = parts
        if changed:
            self._phase = phase
            self._phase_start = now
        # Without a terminal, each phase of the first step has a line, and later every
        # PHASE_SECONDS.
        due = now >= self._next_line or (changed and not self._seconds)
        if due and not self._console.is_terminal:
            self._next_line = now + PHASE_SECONDS
            counter = self._counter(min(self._done + 1, self._total))
            self.say(f"{counter}  {self._phase}  {self._status()}")

    def finish(
        self, metrics: Mapping[str, float], compiling: float = 0.0, other_seconds: float = 0.0
    ) -> None:
        """End a step: print its line, of the keys in STEP_COLUMNS and the time left.

        compiling: seconds of the step spent waiting for compilers, which later steps need not.
        other_seconds: seconds left for work outside steps, such as evaluations. The first step
        determines the columns, and prints their headings.
        """
        now = time.monotonic()
        self._other_seconds = other_seconds
        if not self._seconds:
            self._columns = [column for column in STEP_COLUMNS if column[1] in metrics]
            headings = [heading.rjust(width) for heading, _, width, _ in self._columns]
            line = ["step".rjust(self._counter_width), *headings, "left".rjust(TIME_WIDTH)]
            self._console.print(Text(" ".join(line), "bold"), soft_wrap=True)
        seconds = metrics.get("step/seconds", now - self._step_start)
        self._seconds.append(seconds - compiling)
        self._drawn += [metrics[key] for _, key, _, _ in self._columns[:1] if key in metrics]
        self._step_start = now
        self._next_line = now + PHASE_SECONDS
        self._done += 1
        cells = [
            (format(float(metrics[key]), form) if key in metrics else "").rjust(width)
            for _, key, width, form in self._columns
        ]
        self.say(" ".join([self._counter(self._done), *cells, self._left().rjust(TIME_WIDTH)]))

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(line.rstrip()), soft_wrap=True)

    def _counter(self, step: int) -> str:
        """Return the number of the step and of all steps."""
        return f"{step}/{self._total}".rjust(self._counter_width)

    def _status(self) -> str:
        """Return the finished parts of the phase, its numbers, and the compiling program."""
        numbers = self._live_numbers.items()
        words = [f"{value:.4g} {name.replace('_', ' ')}" for name, value in numbers]
        if self._parts is not None and self._parts.of > 1:
            words.insert(0, f"{self._parts.done} of {self._parts.of}")
        if program := self._program():
            words.append(program if self._phase == "compiling" else f"compiling {program}")
        return "  ".join(filter(None, words))

    def _left(self) -> str:
        """Return the time left, by the median of recent steps.

        The first step, which compiles, counts only while it is alone.
        """
        recent = self._seconds[1:][-RECENT_STEPS:] or self._seconds
        if not recent:
            return "?"
        seconds = (self._total - self._done) * statistics.median(recent) + self._other_seconds
        return str(datetime.timedelta(seconds=round(seconds)))

    def _panel(self) -> Group:
        """Draw the panel: the step, a bar, the time left, the first column, and the phase."""
        drawn = [float(value) for value in self._drawn[-SPARK_STEPS:]]
        low = min(drawn, default=0.0)
        span = (max(drawn, default=0.0) - low) or 1.0
        sparks = [SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in drawn]

        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"step {min(self._done + 1, self._total)} of {self._total}", "bold"),
            ProgressBar(total=self._total, completed=self._done, width=36),
            Text(f"{self._left()} left", "cyan"),
            Text("".join(sparks), "green"),
        )
        seconds = time.monotonic() - self._phase_start
        self._spinner.update(text=Text(f"{self._phase} {seconds:.0f} s"))
        phase = Table.grid(padding=(0, 2))
        phase.add_row(self._spinner, Text(self._status(), "dim"))
        return Group("", bar, phase)


def describe(title: str, rows: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """Print the table of a run's resources: (name, value) rows under a title."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    (console or Console()).print(Text(title, "bold"), Padding(table, (0, 0, 1, 2)))


def compare(
    measures: Sequence[tuple[str, float, float]],
    samples: Sequence[tuple[str, str, str]],
    console: Console | None = None,
) -> None:
    """Print the changes of a run: (name, before, after) measures, (prompt, before, after) texts.

    A measure has its change next to it.
    """
    numbers = _numbers_table("measure", "before", "after", "change")
    for name, before, after in measures:
        better = before - after if "loss" in name else after - before
        style = "green" if better > 0 else "red" if better < 0 else ""
        change = Text(f"{after - before:+.3f}", style)
        numbers.add_row(Text(name), f"{before:.3f}", f"{after:.3f}", change)
    texts = Table("prompt", "before", "after", box=box.SIMPLE_HEAD, show_lines=True, expand=True)
    for row in samples:
        texts.add_row(*(Text(" ".join(cell.split()), overflow="fold") for cell in row))
    (console or Console()).print(numbers, *([texts] if samples else []))


def table(headings: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print rows of a name and figures under their headings."""
    made = _numbers_table(*headings)
    for name, figures in rows:
        made.add_row(name, *figures)
    Console().print(made)


def warn(sentences: Sequence[str]) -> None:
    """Print the warnings of a run, a line each."""
    console = Console()
    for sentence in sentences:
        console.print(Text("! ", "bold red").append(sentence, "red"))


def where_time_went(phases: Sequence[PhaseSeconds], console: Console | None = None) -> None:
    """Print the seconds of each phase that took more than a hundredth of the total."""
    table = _numbers_table("phase", "seconds", "share", "compiling")
    total = sum(phase.seconds for phase in phases)
    for phase in phases:
        if phase.seconds > total / 100:
            share = f"{phase.seconds / total:.0%}"
            table.add_row(phase.phase, f"{phase.seconds:.1f}", share, f"{phase.compiling:.1f}")
    table.add_row("in all", f"{total:.1f}", "", f"{sum(phase.compiling for phase in phases):.1f}")
    (console or Console()).print(table)


def _numbers_table(name: str, *headings: str) -> Table:
    """Return a table whose columns after the first hold numbers."""
    numbers = (Column(heading, justify="right") for heading in headings)
    return Table(name, *numbers, box=box.SIMPLE_HEAD)
