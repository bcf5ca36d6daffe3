"""Run work on a thread of its own while the caller does something else, and hear of it."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Report = TypeVar("Report")
Made = TypeVar("Made")


class Abandoned(Exception):
    """Report to work beside that nobody waits for it any more."""


class BackgroundTask(Generic[Report, Made]):
    """Run `work` beside the caller; a context manager, which abandons it where it is left early.

    `work` gets a function to report with. What it reports is heard by the caller alone, on the
    caller's thread; the report after the work was abandoned raises Abandoned in it.
    """

    def __init__(self, work: Callable[[Callable[[Report], None]], Made], name: str):
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, name)
        self._result = self._pool.submit(work, self._report)

    def __enter__(self) -> BackgroundTask[Report, Made]:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandoned.set()
        self._pool.shutdown(wait=True)

    def check(self) -> None:
        """Raise what the work has raised so far."""
        if self._result.done():
            self._result.result()

    def result(self, observe: Callable[[Report], None]) -> Made:
        """Wait for the result; `observe` hears what is reported from now on."""
        while not self._reports.empty():
            self._reports.get()
        self._result.add_done_callback(lambda _: self._reports.put(None))
        while (report := self._reports.get()) is not None:
            observe(report)
        return self._result.result()

    def _report(self, report: Report) -> None:
        if self._abandoned.is_set():
            raise Abandoned
        self._reports.put(report)
