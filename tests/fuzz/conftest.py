"""Whole files, copies of them to damage, and the process that reads those."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from child import Child

# Files that another one's reader reads, too.
READ_WITH = {
    "settings": "tokenizer",
    "generation": "config",
    "arrays": "checkpoint",
    "leaves": "checkpoint",
    "manifest": "checkpoint",
    "kept": "checkpoint",
}


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> dict[str, Path]:
    import originals  # not before the options are read: see `pytest_configure`

    return originals.make(tmp_path_factory.mktemp("originals"))


@pytest.fixture(scope="session")
def process() -> Iterator[Child]:
    from child import Child

    own = Child()
    yield own
    own.close()


@pytest.fixture
def place(whole, tmp_path) -> Callable[[str], Path]:
    """A file of this test's own, whose neighbours are whole."""
    copies: dict[Path, Path] = {}

    def copied(name: str) -> Path:
        parents = whole[name].parents
        folder = next((one for one in parents if one.name == "checkpoints"), parents[0])
        if folder not in copies:
            copies[folder] = Path(shutil.copytree(folder, tmp_path / str(len(copies))))
        return copies[folder] / whole[name].relative_to(folder)

    return copied


@pytest.fixture
def judge(place, process) -> Callable[[str, bytes], str]:
    """What is wrong with how a file of other content is read, in the place of a whole one."""

    def outcome(name: str, content: bytes) -> str:
        place(name).write_bytes(content)
        read = READ_WITH.get(name, name)
        return process.outcome(read, place(read))

    return outcome
