"""Run work on a background thread, and receive its reports."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Report = TypeVar("Report")
Made = TypeVar("Made")


class Abandoned(Exception):
    """Signal to background work that it was abandoned."""


class BackgroundTask(Generic[Report, Made]):
    """Run `work` in the background; leaving the context early abandons it.

    `work` gets a function to report with. Only the caller receives the reports, on the caller's
    thread; a report after the work was abandoned raises Abandoned in it.
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
        """Raise an error of the work, if it has one so far."""
        if self._result.done():
            self._result.result()

    def result(self, observe: Callable[[Report], None]) -> Made:
        """Wait for the result; `observe` receives the reports from now on."""
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
