"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file, so that whoever reads it finds the old content or the new one, whole.

    The content is written beside its place, as NAME.new, and renamed. With `durable` the same holds
    for a reader after a power loss. Raises OSError, and then leaves nothing behind.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
