"""Checkpoints opened and read back by tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlhf_jax.runtime.checkpoint.folder import RUN_FILE
from rlhf_jax.runtime.checkpoint.store import Checkpoints, Restored, named_leaves

IDENTITY = {"seed": 3, "model.path": "tiny", "weights": (1.0, 2.0)}


def as_bytes(tree) -> dict[str, tuple]:
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def opened(folder: Path, keep: int = 2, **changes) -> Checkpoints:
    return Checkpoints(folder, keep, IDENTITY | changes)


def restore(checkpoints: Checkpoints, template) -> Restored:
    restored = checkpoints.restore(template)
    assert restored is not None
    return restored


def listed(folder: Path) -> set[str]:
    """What lies in a folder of checkpoints beside the file that names their run."""
    return {path.name for path in folder.iterdir()} - {RUN_FILE}
