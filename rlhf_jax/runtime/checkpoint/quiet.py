"""Orbax without its voices: an error of it is told by the caller, in one sentence."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import absl.logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Unsaid: the logs of orbax, and for good what its unfinished tasks cry after an error."""
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger("asyncio").addFilter(_not_of_orbax)
    hook = sys.unraisablehook  # stays: tensorstore's threads may come late
    if getattr(hook, "func", None) is not _unless_of_orbax:
        sys.unraisablehook = functools.partial(_unless_of_orbax, hook)
    try:
        yield
    finally:
        absl.logging.set_verbosity(verbosity)


def release(error: BaseException) -> None:
    """Collect the unfinished tasks that an error's traceback holds now, and not where they would be
    heard.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "coroutine ... was never awaited"
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        gc.collect()


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """False for a task or future of asyncio that orbax did not wait for."""
    text = logging.Formatter().format(record).lower()  # with the traceback
    return not any(voice in text for voice in ("orbax", "tensorstore", "ocdbt"))


def _unless_of_orbax(hook: Callable[[Any], object], seen: Any) -> None:
    """Not for a coroutine of orbax that is collected, or tensorstore calling a loop that ended with
    an error.
    """
    coroutine = getattr(getattr(seen.object, "cr_code", None), "co_filename", "")
    if "orbax" not in coroutine and str(seen.exc_value) != "Event loop is closed":
        hook(seen)
