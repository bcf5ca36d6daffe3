"""Redirect library output to a file, and leave the screen to Python.

XLA and gloo write past Python: a line for each connection, and a stack of C++ frames when they end
a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

FOLDER = "log"  # of the workdir
STREAMS = {"stdout": 1, "stderr": 2}
READ_BYTES = 1 << 16  # of the latest output


def screen() -> int:
    """Return the file descriptor of Python's standard error, else that of the process."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2


class NativeLog:
    """Redirect standard output and error of this process to a file; Python keeps the screen.

    The file is temporary until the workdir exists, since a refused run leaves none.
    """

    def __init__(self, workdir: Path | None = None):
        self._workdir = workdir
        self._kept = False
        self._began = 0  # bytes that earlier attempts of the run have left in the file
        self._lock = threading.Lock()
        handle, path = tempfile.mkstemp(prefix="rlhf_jax-", suffix=".txt")
        self.path = Path(path)
        before = sys.stderr
        sys.stdout.flush()
        before.flush()
        for name in ("stdout", "stderr"):
            old = getattr(sys, name)
            how = {"encoding": old.encoding, "errors": old.errors}
            setattr(sys, name, os.fdopen(os.dup(STREAMS[name]), "w", buffering=1, **how))
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)
        _lead_to(handle)
        os.close(handle)

    def keep(self, rank: int) -> None:
        """Move the file to the workdir, if that exists by now and is writable."""
        with self._lock, contextlib.suppress(OSError):
            if self._kept or self._workdir is None or not self._workdir.is_dir():
                return
            path = self.of_rank(rank)
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                self._began = file.tell()
                _lead_to(file.fileno())
                file.write(self.path.read_bytes())
            self.path.unlink()
            self.path = path
            self._kept = True

    def of_rank(self, rank: int) -> Path:
        """Return the file of a rank in the workdir."""
        return (self._workdir or Path()) / FOLDER / f"rank-{rank}.txt"

    def words(self) -> str:
        """Return the latest library output of this process; '' if that is discarded."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._began, size - READ_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def discard(self) -> None:
        """Remove the file of a process that ends by itself before it had a workdir."""
        with self._lock, contextlib.suppress(OSError):
            if not self._kept:
                self.path.unlink()


def _lead_to(handle: int) -> None:
    for stream in STREAMS.values():
        os.dup2(handle, stream)
