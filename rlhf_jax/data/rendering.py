"""Run chat templates in a process of their own, which is ended if one exceeds its limits.

A template is code that came with a model. The process that runs it, and its limits, are in
`templates.py`.
"""

from __future__ import annotations

import datetime
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_jax.data.templates import MOST_CHARACTERS, SECONDS

Message = Mapping[str, Any]  # A chat message, as {"role": "user", "content": "..."}.

START_SECONDS = 120.0  # Includes Python's start, so it is the longest wait for a first answer.
AT_ONE_TIME = 1024  # Conversations in flight.
PIECE = 1 << 16  # Bytes read or written at a time.
_ENCODER = json.JSONEncoder(default=str, skipkeys=True)
LONGEST_ANSWER = 6 * MOST_CHARACTERS + 1024  # Bytes; JSON has up to six for a character.


class RenderingError(ValueError):
    """Report why a conversation could not be rendered, and its index."""

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


class Renderer:
    """Render conversations in one chat template, for one fixed day.

    Its process begins with the first conversation, and ends with this object or this process,
    killed or not. Threads may share it.
    """

    def __init__(self, template: str, day: datetime.date):
        self._first = _line([template, day.isoformat(), SECONDS])
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._end = lambda: None

    def render(
        self, conversations: Sequence[Sequence[Message]], arguments: Mapping[str, Any]
    ) -> list[str]:
        """Return the text of each conversation; RenderingError for the first that fails.

        A value without a JSON form, such as a date, is given to the template as its text.
        """
        texts: list[str] = []
        given = _line(dict(arguments))
        with self._lock:
            for start in range(0, len(conversations), AT_ONE_TIME):
                part = conversations[start : start + AT_ONE_TIME]
                lines = [_line([dict(message) for message in one]) for one in part]
                self._ask(given + b"".join(lines), texts, len(texts) + len(part))
        return texts

    def _ask(self, lines: bytes, texts: list[str], count: int) -> None:
        """Send lines to the process and collect its answers until there are `count` texts."""
        if self._process is None or self._process.poll() is not None:  # ended from outside
            self._end()
            self._process = _start()
            self._end = weakref.finalize(self, _end, self._process)
            lines = self._first + lines
        answers = _answers(self._process, lines)
        try:
            while len(texts) < count:
                text, failure = json.loads(next(answers).decode())
                if failure:
                    raise RenderingError(failure, len(texts))
                texts.append(text)
        except BaseException as error:
            # Later answers would be taken for those to the next request.
            self._end()
            if isinstance(error, _Ended):
                raise RenderingError(str(error), len(texts)) from None
            raise


class _Ended(Exception):
    """Signal that the process ended."""


def _line(value: Any) -> bytes:
    return _ENCODER.encode(value).encode() + b"\n"


def _start() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlhf_jax.data.templates"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _answers(process: subprocess.Popen, sent: bytes) -> Iterator[bytes]:
    """Write bytes to a process, and yield the lines that it writes meanwhile and after."""
    assert process.stdin is not None and process.stdout is not None
    unsent = memoryview(sent)
    unread = b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    poll.register(process.stdin, select.POLLOUT)
    while True:
        ready = dict(poll.poll(1000 * START_SECONDS))
        if not ready:
            raise _Ended(_late())
        if process.stdin.fileno() in ready:
            try:
                unsent = unsent[process.stdin.write(unsent[:PIECE]) or 0 :]
            except BrokenPipeError:  # its end shows in its output
                unsent = unsent[:0]
            if not unsent:
                poll.unregister(process.stdin)
        if process.stdout.fileno() in ready:
            piece = process.stdout.read(PIECE)
            if not piece:
                raise _Ended(_ending(process))
            *whole, unread = (unread + piece).split(b"\n")
            yield from whole
            if len(unread) > LONGEST_ANSWER:
                raise _Ended(f"it writes over {MOST_CHARACTERS:,} characters")


def _late() -> str:
    return f"it takes longer than {SECONDS:g} s"


def _ending(process: subprocess.Popen) -> str:
    """Describe how a process that no longer answers has ended."""
    try:
        code = process.wait(1)
    except subprocess.TimeoutExpired:
        return "its process closed its output"
    if code == -signal.SIGALRM:
        return _late()
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its process ended with {how}"


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
