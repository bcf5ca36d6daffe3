"""Keep the batch of a step that failed, for debugging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint.store import named_leaves


def keep_batch(workdir: Path, step: int, batch: Any) -> str:
    """Write the batch of a step, an array under each name; return a sentence with the file."""
    path = workdir / "post-mortem" / f"step-{step:06d}.npz"
    if distributed.leads():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, **named_leaves(batch))
        except OSError as failure:
            return f"the batch could not be kept ({failure.strerror or failure})"
    return f"the batch is in {path}"
