"""Prove that the files which hold a checkpoint's arrays are the ones that were written.

What orbax and tensorstore raise where a byte has changed may as well be a fault of their own. The
digests of the files, which lie beside them, tell.
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
# Bytes of a file up to which its content is proved, and above which its length: the fingerprints of
# the arrays prove the rest.
MOST_PROVED = 1 << 20


class ProvedArrays(ocp.PyTreeCheckpointHandler):
    """Store arrays as orbax does, and beside them the digests of their files."""

    def finalize(self, directory: epath.Path) -> None:
        """Write the digests, before the folder gets the name of a complete one."""
        super().finalize(directory)
        if distributed.leads():
            folder = Path(directory)
            proof = json.dumps(documents.make(files=_marks(folder)))
            write_atomically(folder / PROOF, proof.encode(), durable=True)


def check(folder: Path) -> None:
    """Raise Damaged where a file of the arrays is not as it was written, or is missing.

    Nothing is known of those of an earlier version. Raises OSError if one cannot be read.
    """
    if not (folder / PROOF).exists():
        return
    found = _marks(folder)
    for name, mark in documents.read(folder / PROOF)["files"].items():
        if found.get(name) != mark:
            raise Damaged(
                f"{folder.name}/{name} {'has changed' if name in found else 'is missing'}"
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
