"""Manage a folder of checkpoints: its steps, and the id of its run.

A run has a random id, which the folder keeps in a small file and every checkpoint in its document.
So a checkpoint copied from another run is recognised, however similar the two runs are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_jax.runtime.checkpoint import document as documents
from rlhf_jax.runtime.checkpoint.damage import Damaged, reason
from rlhf_jax.runtime.files import write_atomically

# The document item of a checkpoint is a folder of this name, with this file.
HOST = "host"
DOCUMENT = "document.json"
# Orbax renames such a folder when it is complete.
UNFINISHED = "*.orbax-checkpoint-tmp*"
# Next to the checkpoints: the id of their run.
RUN_FILE = "run.json"


def claim(folder: Path) -> str:
    """Return the id of the run of a folder of checkpoints.

    Without a valid id file, it is that of the latest checkpoint with a valid document, as of an
    earlier version, or a new one; the file is then written.
    """
    if run := read_run(folder):
        return run
    run = latest_document(folder, run="").get("run") or secrets.token_hex(16)
    content = json.dumps(documents.make(run=run)).encode()
    write_atomically(folder / RUN_FILE, content, durable=True)
    return run


def read_run(folder: Path) -> str:
    """Return the id of the run of a folder; '' without a valid id file."""
    try:
        return documents.read(folder / RUN_FILE).get("run", "")
    except Damaged:
        return ""


def read_document(folder: Path, run: str | None = None) -> dict[str, Any]:
    """Return the document of a checkpoint.

    run: the required id, '' for any, None for that of the folder around it; a checkpoint of an
    earlier version has none. Raises Damaged if it is of another step than its folder, or of another
    run.
    """
    document = documents.read(folder / HOST / DOCUMENT)
    step = document.get("step", int(folder.name))  # that of an earlier version has none
    if step != int(folder.name):
        raise Damaged(f"it is the one of step {step}, renamed or copied")
    wanted = read_run(folder.parent) if run is None else run
    if wanted and document.get("run", wanted) != wanted:
        raise Damaged("it is of another run, copied here")
    if not all(isinstance(document.get(part), dict) for part in ("identity", "leaves", "host")):
        raise Damaged(f"{DOCUMENT} lacks a part")
    return document


def latest_document(folder: Path, run: str | None = None) -> dict[str, Any]:
    """Return the document of the latest checkpoint with a valid one; {} without one.

    run: as in `read_document`. Raises OSError if one cannot be read but nothing proves it damaged.
    """
    for step in reversed(steps(folder)):
        with contextlib.suppress(Damaged):
            return read_document(folder / str(step), run)
    return {}


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    return sorted(int(name) for name in names(folder) if name.isdigit())


def names(folder: Path) -> list[str]:
    """Return the names in a folder, which may be missing.

    `glob` may treat an unreadable folder as empty.
    """
    with naming(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def require_usable(folder: Path) -> None:
    """Raise OSError if checkpoints could not be written to a folder, or it cannot be made."""
    place = folder
    while not place.exists():
        place = place.parent
    with naming(folder):
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def remove_unfinished(folder: Path) -> None:
    """Remove the remains of interrupted saves."""
    for path in folder.glob(UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError within the context into one that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be used for checkpoints ({reason(error)}); name another workdir."
        ) from error
