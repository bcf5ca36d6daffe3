"""Keep the workdir of a run at a URL, such as gs://bucket/run, by a copy on this machine.

Changes are sent at intervals, and the rest at the end. The URL has the layout of a workdir. A
checkpoint counts there when `mirror.json` lists it, which is written after all its files; so a
machine that is lost in the middle of a transfer leaves the previous one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.files import alone, is_remote, write_atomically
from rlhf_jax.runtime.foreign import one_line

COPIES = "~/.cache/rlhf_jax/workdirs"
CHECKPOINTS = "checkpoints"
# The index at the URL, and the last known one of the copy: an id, and complete checkpoints.
INDEX = "mirror.json"
INTERVAL = 30.0  # seconds between two transfers


def require(workdir: str) -> None:
    """Raise ValueError if a workdir is a URL that cannot be used here; nothing is opened."""
    if is_remote(workdir):
        if distributed.started():
            raise ValueError(
                f"workdir is {workdir}, and the run has several processes, which need a folder that"
                " all see: mount the bucket (gcsfuse, s3fs), and name the folder."
            )
        _open(workdir)


def folder_of(workdir: str) -> Path:
    """Return the folder in which a run works: the workdir itself or, for a URL, its copy here."""
    if not is_remote(workdir):
        return Path(workdir).expanduser()
    url = workdir.rstrip("/")
    place = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(COPIES).expanduser() / place / url.rpartition("/")[2]


@contextlib.contextmanager
def mirrored(workdir: str) -> Iterator[None]:
    """Synchronise `workdir`, if it is a URL, and its copy here within the context.

    The copy is replaced by the content of the URL, unless it is that with files not sent yet.
    Raises ValueError, or OSError if the URL cannot be read and written.
    """
    if not is_remote(workdir):
        yield
        return
    require(workdir)
    folder = folder_of(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, workdir):
        mirror = _Mirror(workdir, folder)
        if not mirror.is_further():
            mirror.bring()
        mirror.claim()
        stop = threading.Event()
        sender = threading.Thread(target=mirror.keep_sending, args=(stop,), daemon=True)
        sender.start()
        try:
            yield
        except BaseException as error:
            try:
                stop.set()
                sender.join()
                mirror.send()
            except (OSError, ValueError) as failure:
                error.add_note(str(failure))
            raise
        stop.set()
        sender.join()
        mirror.send()


def fetched(workdir: str | Path, checkpoints: bool = False) -> Path:
    """Return the folder of a run to read from: for a URL a separate copy.

    checkpoints: whether to include them. The run may be active, here or elsewhere.
    """
    if not is_remote(workdir):
        return Path(workdir).expanduser()
    url = str(workdir)
    folder = folder_of(url).parent / ".read" / folder_of(url).name
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, url):
        _Mirror(url, folder).bring(checkpoints)
    return folder


class _Mirror:
    """Hold the known state of a folder at a URL and of its copy here."""

    def __init__(self, url: str, folder: Path):
        self._url = url
        self._folder = folder
        self._files, self._root = _open(url)
        self._sent: dict[str, tuple[int, int]] = {}  # by file: size and time of change, in ns
        self._id = ""  # of the index at the URL
        self._warned = False

    def is_further(self) -> bool:
        """Return whether the copy is that of the URL, perhaps with files not yet sent."""
        index = self._folder / INDEX
        with self._one_sentence("read"):
            return index.is_file() and json.loads(index.read_bytes()) == self._read_index()

    def bring(self, checkpoints: bool = True) -> None:
        """Replace the copy by the content of the URL, with or without the complete checkpoints."""
        with self._one_sentence("read"):
            steps = self._read_index()["checkpoints"]
            names = list(self._list())
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            step = _step_of(name)
            if step is None or (checkpoints and (steps is None or step in steps)):
                path = self._folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._one_sentence("read"):
                    self._files.get_file(f"{self._root}/{name}", str(path))

    def claim(self) -> None:
        """Record at the URL that this run writes there, and check that it can."""
        with self._one_sentence("written"):
            steps = self._read_index()["checkpoints"]
            for name, size in self._list().items():
                path = self._folder / name
                step = _step_of(name)
                if step is None:
                    continue
                same = path.is_file() and path.stat().st_size == size
                same = same and (steps is None or step in steps)
                self._sent[name] = _mark(path) if same else (-1, 0)
            steps_sent = {step for name in self._sent if (step := _step_of(name))}
            self._write_index(sorted(steps_sent if steps is None else steps))

    def keep_sending(self, stop: threading.Event) -> None:
        """Send changes at intervals, until the event is set."""
        while not stop.wait(INTERVAL):
            try:
                self.send()
            except (OSError, ValueError) as error:
                if not self._warned:
                    print(f"warning: {str(error).rstrip('.')}; tried again.", file=sys.stderr)
                self._warned = True

    def send(self) -> None:
        """Send changed files, then the list of complete checkpoints, then remove deleted files."""
        files = self._own_files()
        changed = [name for name, mark in files.items() if self._sent.get(name) != mark]
        gone = self._sent.keys() - files.keys()
        if not changed and not gone:
            return
        with self._one_sentence("read"):
            is_own = self._read_index()["id"] == self._id
        if not is_own:
            raise ValueError(
                f"Another run has written to {self._url}: stop one of the two, or give this one"
                f" another workdir; what it has done is in {self._folder}."
            )
        with self._one_sentence("written"):
            steps = {_step_of(name) for name in files} - {None}
            # Checkpoints first: the lines of all their steps come after them.
            for name in sorted(changed, key=lambda name: _step_of(name) is None):
                try:
                    self._files.put_file(str(self._folder / name), f"{self._root}/{name}")
                    self._sent[name] = files[name]
                except FileNotFoundError:  # removed meanwhile
                    steps.discard(_step_of(name))
            self._write_index(sorted(step for step in steps if step is not None))
            for name in gone:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._root}/{name}")
                del self._sent[name]

    def _own_files(self) -> dict[str, tuple[int, int]]:
        """Return the files of the copy, with their marks, except unfinished ones."""
        files = {}
        # A folder that is removed meanwhile is skipped, which `rglob` would not do.
        paths = [Path(place) / name for place, _, names in os.walk(self._folder) for name in names]
        for path in paths:
            name = path.relative_to(self._folder).as_posix()
            # the file next to the checkpoints identifies their run
            in_folder = name.startswith(f"{CHECKPOINTS}/") and name.count("/") > 1
            unfinished = in_folder and _step_of(name) is None
            if name != INDEX and path.suffix != ".new" and not unfinished:
                with contextlib.suppress(FileNotFoundError):
                    files[name] = _mark(path)
        return files

    def _list(self) -> dict[str, int]:
        """Return the sizes of the files at the URL."""
        self._files.invalidate_cache()
        listing = self._files.find(self._root, detail=True)
        sizes = {
            place[len(self._root) :].lstrip("/"): one["size"] for place, one in listing.items()
        }
        sizes.pop(INDEX, None)
        return sizes

    def _read_index(self) -> dict[str, Any]:
        """Return the index; without one, another program has put complete files there."""
        try:
            return json.loads(self._files.cat_file(f"{self._root}/{INDEX}"))
        except FileNotFoundError:
            return {"id": "", "checkpoints": None}

    def _write_index(self, steps: list[int]) -> None:
        """Record the complete checkpoints, at the URL and then here."""
        index = {"id": uuid.uuid4().hex, "checkpoints": steps}
        content = json.dumps(index).encode()
        self._files.pipe_file(f"{self._root}/{INDEX}", content)
        self._id = index["id"]
        write_atomically(self._folder / INDEX, content)

    @contextlib.contextmanager
    def _one_sentence(self, verb: str) -> Iterator[None]:
        """Turn errors of the URL's package within the context into one OSError."""
        try:
            yield
        except Exception as error:
            kept = ""
            if verb == "written":
                kept = (
                    f"; what was done here is in {self._folder}: the same command resumes from it"
                )
            raise OSError(f"{self._url} cannot be {verb} ({one_line(error)}){kept}.") from error


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; ValueError if its package is missing."""
    try:
        fsspec = importlib.import_module("fsspec")
        options = {"auto_mkdir": True} if url.startswith("file://") else {}
        files, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        message = str(error).rstrip(".")
        raise ValueError(f"The workdir {url} cannot be opened: {message}.") from error
    return files, root.rstrip("/")


def _step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file is of; None of any other file."""
    first, _, rest = name.partition("/")
    step = rest.partition("/")[0]
    return int(step) if first == CHECKPOINTS and step.isdigit() else None


def _mark(path: Path) -> tuple[int, int]:
    """Return a file's size and its time in ns, which change with it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
