"""Keep the figures of all cases in one JSON file, which is whole after each case.

    {"tiny": false, "device": KIND, "jax": VERSION, "starts": 2,
     "parts": {"speeds": {"done": {CASE: FIGURES}, "failed": {CASE: {"error": SENTENCE, ...}},
                          "left": [CASE], "running": null}}}

Each case has beside its figures the device kind, the version of jax, the date and its seconds.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.contest import tell
from benchmarks.generation import peak_memory
from rlhf_jax.runtime.files import write_atomically

LONGEST_SENTENCE = 400  # characters of an error


class Case(NamedTuple):
    """Name something to measure, and hold the function that returns its figures."""

    name: str
    measure: Callable[[], dict[str, Any]]


@dataclasses.dataclass
class Ledger:
    """Hold the document of a file; several processes use it one after the other."""

    path: Path
    document: dict[str, Any]

    @classmethod
    def open(cls, path: Path, *, tiny: bool) -> Ledger:
        """Read a file, or begin one; ValueError if its figures are of the other sizes."""
        if not path.exists():
            return cls(path, {"tiny": tiny, "device": "", "jax": "", "starts": 0, "parts": {}})
        document = json.loads(path.read_text())
        if document["tiny"] != tiny:
            held = "tiny" if document["tiny"] else "real"
            raise ValueError(f"{path} holds figures of {held} sizes; name another --out.")
        return cls(path, document)

    def begin(self) -> None:
        """Count a start, in which cases that failed before are tried again."""
        self.document["starts"] += 1
        self.write()

    def use_device(self) -> None:
        """Note this process's device and jax; ValueError if figures are there of others."""
        here = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        done = any(part["done"] for part in self.document["parts"].values())
        held = {name: self.document[name] for name in here}
        if done and held != here:
            raise ValueError(
                f"{self.path} holds figures of {held['device']} with jax {held['jax']}; name"
                f" another --out for {here['device']} with jax {here['jax']}."
            )
        self.document |= here

    def stamp(self) -> dict[str, str]:
        """Return the device, the version of jax and the date of figures."""
        where = {name: self.document[name] for name in ("device", "jax")}
        return where | {"date": datetime.date.today().isoformat()}

    def part(self, name: str) -> dict[str, Any]:
        """Return the record of a part."""
        empty = {"done": {}, "failed": {}, "left": [], "running": None}
        return self.document["parts"].setdefault(name, empty)

    def waiting(self, part: str, cases: Sequence[Case]) -> list[Case]:
        """List the cases that this start is still to measure.

        Those that failed in an earlier start come last: one that never ends must not keep the
        others waiting each time.
        """
        record = self.part(part)
        failed = record["failed"]
        now = self.document["starts"]
        waiting = [
            case
            for case in cases
            if case.name not in record["done"] and failed.get(case.name, {}).get("start") != now
        ]
        return sorted(waiting, key=lambda case: case.name in failed)

    def start(self, part: str, case: str, left: Sequence[str]) -> None:
        """Note that a case is being measured, and which come after it."""
        self.part(part).update(running=case, left=list(left))
        self.write()

    def finish(self, part: str, case: str, figures: dict[str, Any], seconds: float) -> None:
        """Keep the figures of a case."""
        record = self.part(part)
        costs = {"case_seconds": round(seconds, 1), "process_peak_bytes": peak_memory()}
        record["done"][case] = figures | self.stamp() | costs
        record["failed"].pop(case, None)
        record["running"] = None
        self.write()

    def fail(self, part: str, case: str, sentence: str) -> None:
        """Keep why a case has no figures."""
        record = self.part(part)
        failure = {"error": sentence[:LONGEST_SENTENCE], "start": self.document["starts"]}
        record["failed"][case] = failure | self.stamp()
        record["running"] = None
        self.write()

    def leave(self, part: str, left: Sequence[str]) -> None:
        """Note the cases that there was no time for."""
        self.part(part)["left"] = list(left)
        self.write()

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.document, indent=1).encode())


def measure(part: str, cases: Sequence[Case], ledger: Ledger, seconds: float) -> bool:
    """Measure the cases of a part, and begin none after a time limit.

    Returns whether one failed and others wait: the caller continues in another process, as an error
    of CUDA persists in its own.
    """
    ends = time.monotonic() + seconds
    waiting = ledger.waiting(part, cases)
    ledger.leave(part, [case.name for case in waiting])
    while waiting and time.monotonic() < ends:
        case = waiting.pop(0)
        left = [other.name for other in waiting]
        ledger.start(part, case.name, left)
        tell(f"{part}: {case.name}")
        began = time.monotonic()
        try:
            figures = case.measure()
        except Exception as error:  # whatever goes wrong in one case, the others are measured
            traceback.print_exc()
            ledger.fail(part, case.name, sentence_of(error))
            return bool(waiting)
        ledger.finish(part, case.name, figures, time.monotonic() - began)
    return False


def sentence_of(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
