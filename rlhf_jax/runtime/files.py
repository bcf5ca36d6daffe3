"""Find the files that a run names, and write files atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# The folder that contains `configs`: of the wheel the package's own, of a clone its root.
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent


def find(name: str | Path, folder: str | Path = "") -> Path:
    """Return the path of the file or folder of this name.

    It is looked up as given, then in `folder`, if given, then among the files of the package. If
    there is none, it is the path as given.
    """
    path = Path(name).expanduser()
    places = [path, *([Path(folder) / path] if folder else []), SHIPPED / path]
    return next((place for place in places if place.exists()), path)


def is_remote(place: str | Path) -> bool:
    """Return whether a place is a URL, such as gs://bucket/prompts.jsonl."""
    return "://" in str(place)


@contextlib.contextmanager
def alone(folder: Path, workdir: str | Path) -> Iterator[None]:
    """Lock the folder `workdir` against other runs within the context.

    The lock ends with the process, however that ends. Raises ValueError if another has it.
    """
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"Another run is at work in {workdir}: stop it, or name another workdir."
        ) from error
    finally:
        os.close(place)


@contextlib.contextmanager
def writing(
    path: str | Path, advice: str = ": make room or name another workdir"
) -> Iterator[None]:
    """Turn an OSError within the context into one that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{path} cannot be written ({reason}){advice}.") from error


def write_atomically(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file atomically: a reader finds the old or the new content, complete.

    The content is written next to its place, as NAME.new, and renamed. With `durable` the same
    holds for a reader after a power loss. Raises OSError, and then leaves nothing behind.
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
