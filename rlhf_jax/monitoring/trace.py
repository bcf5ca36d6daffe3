"""Record the work of each slice in a stage, and write it as a trace for Perfetto."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_jax.runtime import messages
from rlhf_jax.runtime.files import write_atomically, writing

KEPT_TRACES = 10  # number of traces kept of a run, the latest ones
# Perfetto uses process 0 and thread 0 for the idle task of a kernel, and a thread with its
# process's number for the main one. It appends the numbers to the names, as in "slice 0 1000".
PROCESS = 1
FIRST_THREAD = 1000


@messages.register
@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Hold a piece of work in a lane, a slice's or other devices'; times are of one clock."""

    slice: int  # or another lane, after those of slices
    kind: str  # "generate", "exchange", "inference" or "training"
    began: float  # when it was dispatched
    ended: float  # when the host knew that it was over
    rows: int  # live rows of a round, or samples that were transferred or read
    label: str  # the strategy of a round, or the call by its name in a plan
    amount: int  # tokens, or bytes of an exchange


def since(spans: Iterable[Span], start: float) -> list[Span]:
    """Return the spans by a clock that was 0 at `start`."""
    return [
        dataclasses.replace(span, began=span.began - start, ended=span.ended - start)
        for span in spans
    ]


def apart(spans: Iterable[Span]) -> list[Span]:
    """Return the spans without overlaps, sorted by their beginning.

    A slice does one thing at a time, and the next is dispatched while one still runs: a span begins
    at the end of the one dispatched before it. Rounds without live rows are left out.
    """
    ends: dict[int, float] = {}
    spans_apart = []
    for span in sorted(spans, key=lambda span: span.began):
        began = max(span.began, ends.get(span.slice, span.began))
        ends[span.slice] = ended = max(began, span.ended)
        if span.rows or span.kind != "generate":
            spans_apart.append(dataclasses.replace(span, began=began, ended=ended))
    return sorted(spans_apart, key=lambda span: span.began)


def idle_share(spans: Iterable[Span], slices: int) -> float:
    """Return the share of the slices' time in which they were idle; 0 if there is no time.

    Time counts from the first beginning to the last end.
    """
    separate = apart(spans)
    if not separate:
        return 0.0
    whole = slices * (max(span.ended for span in separate) - separate[0].began)
    return 1.0 - sum(span.ended - span.began for span in separate) / whole if whole else 0.0


def chrome_trace(spans: Iterable[Span], lanes: Sequence[str]) -> dict[str, Any]:
    """Return the spans in Chrome's trace event format.

    A lane is a thread of its name, and times are whole microseconds from the first beginning, so
    that neighbours touch and never overlap. A counter has the live rows of all slices.
    """
    separate = apart(spans)
    separate = since(separate, separate[0].began) if separate else []
    events = []
    changes: dict[int, int] = collections.defaultdict(int)  # of the live rows, by time
    for span in separate:
        counted = ("samples", "bytes") if span.kind == "exchange" else ("rows", "tokens")
        began = round(1e6 * span.began)
        ended = round(1e6 * span.ended)
        event = {
            "ph": "X",
            "cat": span.kind,
            "name": span.label or span.kind,
            "pid": PROCESS,
            "tid": FIRST_THREAD + span.slice,
            "ts": began,
            "dur": ended - began,
            "args": dict(zip(counted, (span.rows, span.amount), strict=True)),
        }
        events.append(event)
        if span.kind == "generate":
            changes[began] += span.rows
            changes[ended] -= span.rows
    live = 0
    for at, change in sorted(changes.items()):
        live += change
        if change:
            event = {"ph": "C", "name": "live rows", "pid": PROCESS, "ts": at}
            events.append(event | {"args": {"of all slices": live}})
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [*_names(lanes), *events], "displayTimeUnit": "ms"}


def write(
    workdir: str | pathlib.Path, step: int, spans: Iterable[Span], lanes: Sequence[str]
) -> pathlib.Path:
    """Write WORKDIR/timeline/step-000012.json, completely or not at all, and return its path.

    The latest KEPT_TRACES are kept; those of later steps are of an interrupted run. An error is one
    OSError that names the file.
    """
    path = pathlib.Path(workdir) / "timeline" / f"step-{step:06d}.json"
    text = json.dumps(chrome_trace(spans, lanes), separators=(",", ":"), ensure_ascii=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        traces = sorted(path.parent.glob("step-*.json"))
        end = traces.index(path) + 1
        for superseded in (*traces[: max(0, end - KEPT_TRACES)], *traces[end:]):
            superseded.unlink()
    return path


def _names(lanes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that name the process and its threads, and order the threads."""
    process = {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "rlhf_jax"}}
    names = []
    order = []
    for index, name in enumerate(lanes):
        thread = {"ph": "M", "pid": PROCESS, "tid": FIRST_THREAD + index}
        names.append(thread | {"name": "thread_name", "args": {"name": name}})
        order.append(thread | {"name": "thread_sort_index", "args": {"sort_index": index}})
    return [process, *names, *order]
