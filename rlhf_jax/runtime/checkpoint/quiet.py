"""Silence orbax: the caller reports its errors, in one sentence each."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator

import absl.logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the logs of orbax within the context, and permanently the output of unfinished tasks.

    Those may come late, from tensorstore's threads.
    """
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger("asyncio").addFilter(_not_of_orbax)
    hook = sys.unraisablehook
    if getattr(hook, "func", None) is not _unless_of_orbax:
        sys.unraisablehook = functools.partial(_unless_of_orbax, hook)
    try:
        yield
    finally:
        absl.logging.set_verbosity(verbosity)


def release(error: BaseException) -> None:
    """Collect, without a warning, the unfinished tasks that an error's traceback holds.

    Collected later, they would print unexpected warnings.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "coroutine ... was never awaited"
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        gc.collect()


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Pass a record of asyncio unless it is about a task that orbax did not await."""
    text = logging.Formatter().format(record).lower()  # with the traceback
    return not any(name in text for name in ("orbax", "tensorstore", "ocdbt"))


def _unless_of_orbax(
    hook: Callable[[sys.UnraisableHookArgs], object], seen: sys.UnraisableHookArgs
) -> None:
    """Call the hook for uncatchable errors, unless the error is one of orbax.

    Such are coroutines of orbax that are collected, and calls by tensorstore of a loop that an
    error has ended.
    """
    coroutine = getattr(getattr(seen.object, "cr_code", None), "co_filename", "")
    if "orbax" not in coroutine and str(seen.exc_value) != "Event loop is closed":
        hook(seen)
