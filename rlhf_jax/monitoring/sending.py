"""Send each step of a run to its sinks once, in the background and across interruptions."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_jax.monitoring.metrics import HELD_OUT, SAMPLES, spread
from rlhf_jax.monitoring.sinks import SINKS, TrackedRun, record_name
from rlhf_jax.runtime.files import write_atomically

LAST_WAIT = 60.0  # seconds for sinks to finish when the run ends


@dataclasses.dataclass
class Measured:
    """Hold the numbers and samples of a step."""

    numbers: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
    samples: dict[str, list[Mapping[str, Any]]] = dataclasses.field(
        default_factory=lambda: {SAMPLES: [], HELD_OUT: []}
    )


class Sender:
    """Hold records back until their checkpoint is on disk, then send them to the sinks.

    So a step that is repeated after a kill is sent once; most trackers keep the first version of a
    step. The received steps are in WORKDIR/sinks, so a new or failed sink gets the missing ones.
    """

    def __init__(
        self,
        names: Sequence[str],
        workdir: pathlib.Path,
        config: dict[str, Any],
        written: Iterable[Mapping[str, Any]],
        say: Callable[[str], None],
    ):
        """Start a thread for each sink; `written` are the lines of the run's files."""
        self._rows: dict[int, Measured] = {}  # by step
        for line in written:
            if "response" in line:
                self._rows.setdefault(line["step"], Measured()).samples[SAMPLES].append(line)
            else:
                numbers = {key: line[key] for key in line if key != "samples"}
                self.add(line["step"], numbers, held_out=line.get("samples", ()))
        self._threads = [_SinkThread(name, workdir, config, say) for name in names]

    def add(
        self,
        step: int,
        numbers: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
        held_out: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add the numbers of a step, and its samples or those of an evaluation."""
        metrics = {key: float(value) for key, value in numbers.items() if key != "step"}
        measured = self._rows.setdefault(step, Measured())
        measured.numbers.update(metrics)
        measured.samples[SAMPLES] += samples
        measured.samples[HELD_OUT] += held_out

    def send(self, before: float) -> None:
        """Send the records before a step to all sinks; returns at once."""
        for step in sorted(step for step in self._rows if step < before):
            measured = self._rows.pop(step)
            for thread in filter(threading.Thread.is_alive, self._threads):
                thread.rows.put((step, measured))

    def close(self) -> None:
        """End the sinks, and wait for those that are not too slow."""
        for thread in self._threads:
            thread.rows.put(None)
        deadline = time.monotonic() + LAST_WAIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _SinkThread(threading.Thread):
    """Make a sink and write to it, until the end or its first error."""

    def __init__(
        self, name: str, workdir: pathlib.Path, config: dict[str, Any], say: Callable[[str], None]
    ):
        super().__init__(name=f"sink {name}", daemon=True)
        self.rows: queue.SimpleQueue[tuple[int, Measured] | None] = queue.SimpleQueue()
        self._sink_name = name
        self._say = say
        self._record = workdir / "sinks" / f"{record_name(name)}.json"
        self._run = TrackedRun(uuid.uuid4().hex[:8], workdir, config)
        self._next = 0
        self.start()

    def run(self) -> None:
        """Write records in order."""
        try:
            if self._record.exists():
                record = json.loads(self._record.read_text())
                self._run = dataclasses.replace(self._run, id=record["id"])
                self._next = record["next"]
            self._record.parent.mkdir(exist_ok=True)
            self._note()
            sink = SINKS[self._sink_name](self._run)
            last = getattr(sink, "last_step", lambda: None)()
            self._next = self._next if last is None else last + 1
            write_samples = getattr(sink, "write_samples", None)
            while row := self.rows.get():
                step, measured = row
                if step >= self._next:
                    for name, samples in measured.samples.items():
                        if samples and write_samples is not None:
                            write_samples(step, name, spread(samples))
                    sink.write(step, measured.numbers)
                    self._next = step + 1
                    self._note()
            sink.close()
        except Exception as error:  # a tracker's code may raise anything
            message = " ".join(str(error).split())
            self._say(
                f"Sink {self._sink_name} failed ({type(error).__name__}: {message}) and gets no"
                f" more of this run; start it again to send the rest, from step {self._next} on."
            )

    def _note(self) -> None:
        """Record the sink's id of this run, and the steps it has received."""
        record = json.dumps({"id": self._run.id, "next": self._next})
        write_atomically(self._record, record.encode())
