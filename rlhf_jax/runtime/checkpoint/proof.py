"""Prove that the files of a checkpoint's arrays are the ones that were written.

An error of orbax and tensorstore for a changed byte may as well be a fault of their own. The
digests of the files, stored next to them, decide.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import orbax.checkpoint as ocp
from etils import epath

from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint import document as documents
from rlhf_jax.runtime.checkpoint.damage import Damaged
from rlhf_jax.runtime.files import write_atomically

PROOF = "files.json"
# File size in bytes up to which the content is digested, and above which only the length is
# checked: the fingerprints of the arrays prove the rest.
MOST_PROVED = 1 << 20


class ProvedArrays(ocp.PyTreeCheckpointHandler):
    """Store arrays as orbax does, with the digests of their files."""

    def finalize(self, directory: epath.Path) -> None:
        """Write the digests, before the folder is renamed as complete."""
        super().finalize(directory)
        if distributed.leads():
            folder = Path(directory)
            proof = json.dumps(documents.make(files=_marks(folder)))
            write_atomically(folder / PROOF, proof.encode(), durable=True)


def check(folder: Path) -> None:
    """Raise Damaged if a file of the arrays has changed or is missing.

    Those of an earlier version cannot be checked. Raises OSError if one cannot be read.
    """
    if not (folder / PROOF).exists():
        return
    marks = _marks(folder)
    for name, mark in documents.read(folder / PROOF)["files"].items():
        if marks.get(name) != mark:
            raise Damaged(
                f"{folder.name}/{name} {'has changed' if name in marks else 'is missing'}"
            )


def _marks(folder: Path) -> dict[str, list]:
    """Return [length, digest] of each file below a folder by its name, without the proof itself.

    The digest of a large one is ''.
    """
    marks = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PROOF:
            size = path.stat().st_size
            digest = "" if size > MOST_PROVED else hashlib.sha256(path.read_bytes()).hexdigest()
            marks[path.relative_to(folder).as_posix()] = [size, digest]
    return marks
