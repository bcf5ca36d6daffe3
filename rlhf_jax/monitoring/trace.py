"""What each slice did in a stage and when: spans by the clock, the share of idle time, a trace that
Perfetto opens.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.runtime import messages
from rlhf_jax.runtime.files import write_atomically

KEPT = 10  # traces of a run: the latest
# Perfetto takes process 0 and thread 0 for the idle task of a kernel, and a thread of its process's
# number for the main one. It writes the numbers behind the names, as in "slice 0 1000".
PROCESS = 1
FIRST_THREAD = 1000


@messages.register
@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of a slice's work. `kind` is "generate", "exchange" or "inference"; times are seconds
    of one clock.
    """

    slice: int
    kind: str
    began: float  # when it was dispatched
    ended: float  # when the host knew that it was over
    rows: int  # live ones of a round, samples that came by an exchange or were scored
    label: str  # the strategy of a round, the model that scored
    amount: int  # tokens, or bytes of an exchange


@dataclasses.dataclass
class Timeline:
    """The spans of one stage, each slice's in the order in which they were dispatched: what came
    before its round.
    """

    spans: list[Span] = dataclasses.field(default_factory=list)
    # of the stage, by this process's clock
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def add(self, span: Span) -> None:
        """One more."""
        self.spans.append(span)


def since(spans: Iterable[Span], start: float) -> list[Span]:
    """The spans by a clock that was 0 at `start`."""
    return [
        dataclasses.replace(span, began=span.began - start, ended=span.ended - start)
        for span in spans
    ]


def apart(spans: Iterable[Span]) -> list[Span]:
    """The spans with the time that was their own, by when they began; rounds of no live row are
    left out.

    A slice does one thing after the other, and the next is dispatched while one still runs: what is
    dispatched waits for the end of what was dispatched before it.
    """
    ends: dict[int, float] = {}
    found = []
    for span in sorted(spans, key=lambda span: span.began):
        began = max(span.began, ends.get(span.slice, span.began))
        ends[span.slice] = ended = max(began, span.ended)
        if span.rows or span.kind != "generate":
            found.append(dataclasses.replace(span, began=began, ended=ended))
    return sorted(found, key=lambda span: span.began)


def idle_share(spans: Iterable[Span], slices: int) -> float:
    """The share of the slices' time, from the first begin to the last end, in which they did
    nothing; 0 of no time.
    """
    own = apart(spans)
    if not own:
        return 0.0
    whole = slices * (max(span.ended for span in own) - own[0].began)
    return 1.0 - sum(span.ended - span.began for span in own) / whole if whole else 0.0


def chrome_trace(spans: Iterable[Span], slices: int) -> dict[str, Any]:
    """The spans in Chrome's trace event format: a thread a slice, microseconds from the first
    begin.

    A counter says how many rows are live over all slices.
    """
    own = apart(spans)
    own = since(own, own[0].began) if own else []
    events = sorted([*map(_event, own), *_live_rows(own)], key=lambda event: event["ts"])
    return {"traceEvents": [*_names(slices), *events], "displayTimeUnit": "ms"}


def write(
    workdir: str | pathlib.Path, step: int, spans: Iterable[Span], slices: int
) -> pathlib.Path:
    """Writes WORKDIR/timeline/step-000012.json, whole or not at all, and returns its path.

    The latest are kept; those of later steps are of a run that was interrupted. An error is one
    OSError that names the file.
    """
    path = pathlib.Path(workdir) / "timeline" / f"step-{step:06d}.json"
    text = json.dumps(chrome_trace(spans, slices), separators=(",", ":"), ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        for old in _superseded(sorted(path.parent.glob("step-*.json")), path):
            old.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"{path} cannot be written ({reason}): make room or name another workdir."
        ) from error
    return path


def _event(span: Span) -> dict[str, Any]:
    """A complete event, in whole microseconds, so that neighbours touch and never overlap."""
    counted = ("samples", "bytes") if span.kind == "exchange" else ("rows", "tokens")
    began = _microseconds(span.began)
    ended = _microseconds(span.ended)
    return {
        "ph": "X",
        "cat": span.kind,
        "name": span.label or span.kind,
        "pid": PROCESS,
        "tid": FIRST_THREAD + span.slice,
        "ts": began,
        "dur": ended - began,
        "args": dict(zip(counted, (span.rows, span.amount), strict=True)),
    }


def _live_rows(own: Sequence[Span]) -> list[dict[str, Any]]:
    """A counter event wherever the number of live rows over all slices changes. Perfetto joins its
    names.
    """
    rounds = [span for span in own if span.kind == "generate"]
    begins = np.array(
        [(_microseconds(span.began), span.rows) for span in rounds], np.int64
    ).reshape(-1, 2)
    ends = np.array([(_microseconds(span.ended), -span.rows) for span in rounds], np.int64).reshape(
        -1, 2
    )
    changes = np.concatenate([begins, ends])
    times, place = np.unique(changes[:, 0], return_inverse=True)
    sums = np.bincount(place, changes[:, 1], len(times)).astype(int)
    points = [
        (at, live) for at, live, change in zip(times, np.cumsum(sums), sums, strict=True) if change
    ]
    return [
        {
            "ph": "C",
            "name": "live rows",
            "pid": PROCESS,
            "ts": int(at),
            "args": {"of all slices": int(live)},
        }
        for at, live in points
    ]


def _names(slices: int) -> list[dict[str, Any]]:
    """What the process and its threads are called, and their order."""
    process = {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "rlhf_jax"}}
    threads = [{"ph": "M", "pid": PROCESS, "tid": FIRST_THREAD + index} for index in range(slices)]
    names = [
        thread | {"name": "thread_name", "args": {"name": f"slice {i}"}}
        for i, thread in enumerate(threads)
    ]
    order = [
        thread | {"name": "thread_sort_index", "args": {"sort_index": i}}
        for i, thread in enumerate(threads)
    ]
    return [process, *names, *order]


def _superseded(paths: list[pathlib.Path], latest: pathlib.Path) -> list[pathlib.Path]:
    """All but the KEPT paths that end with the latest."""
    end = paths.index(latest) + 1
    return paths[: max(0, end - KEPT)] + paths[end:]


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
