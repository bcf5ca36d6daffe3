"""Decide from a read error whether a checkpoint is damaged, or only unavailable for now."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rlhf_jax.runtime import distributed, messages
from rlhf_jax.runtime.checkpoint.quiet import release
from rlhf_jax.runtime.foreign import LONGEST_REASON

# Prefixes of tensorstore's messages for files that are missing, too short or changed.
PROOFS = ("NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS", "FAILED_PRECONDITION")
# Its messages for bytes that it did not write.
DECODING = "Error decoding"
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


@messages.register_error
class Damaged(Exception):
    """Report why a checkpoint cannot be trusted."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error within the context into Damaged if it proves damage, else into OSError.

    Files that are missing, incomplete or changed are damage. Wrongly calling a valid checkpoint
    damaged would lose work, so errors without proof (too many open files, an error of the disk, no
    permission, no memory, an error of orbax) leave it in place. An error of the device is not
    converted.
    """
    try:
        yield
    except Damaged:
        raise
    except Exception as error:
        if distributed.is_of_device(root(error)):
            raise root(error) from None
        release(error)
        if _proves_damage(root(error)):
            raise Damaged(f"{path.name} cannot be read, {reason(error)}") from error
        raise OSError(
            f"{path} cannot be read ({reason(error)}); the checkpoint stays as it is:"
            " repeat the command, or move it away to resume from the one before it."
        ) from error


def reason(error: BaseException) -> str:
    """Return the essence of an error's message.

    Those of tensorstore are long, with the first cause at the end.
    """
    error = root(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if number := _os_error(text):
        return os.strerror(number)
    return re.sub(r"^[A-Z_]+: (.*: )?| \[(tensorstore|source).*", "", text)[:LONGEST_REASON]


def root(error: BaseException) -> BaseException:
    """Return the error that caused all others in its chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _proves_damage(error: BaseException) -> bool:
    """Return whether an error implies files that are missing, incomplete or changed."""
    if isinstance(error, OSError):
        # orbax's own has no number
        return isinstance(error, FileNotFoundError) or error.errno in MISSING
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return True
    text = str(error)
    proved = text.partition(": ")[0] in PROOFS or DECODING in text
    return proved and _os_error(text) in (0, *MISSING)


def _os_error(text: str) -> int:
    """Return the errno in a message of tensorstore, or 0."""
    code = re.search(r"os_error_code=\\?'(\d+)", text)
    return int(code[1]) if code else 0
