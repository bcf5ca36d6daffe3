"""Checkpoints opened and read back by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.runtime.checkpoint.folder import RUN_FILE
from rlhf_jax.runtime.checkpoint.store import Checkpoints, Restored, named_leaves
from rlhf_jax.types import Trained

WORDS = 1 << 16
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


def make_state(seed: int) -> Any:
    """A policy of every kind of leaf, the state of its optimizer, and no critic."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (4, WORDS // 4), dtype=np.uint32)
    policy: Any = {
        # any bits: NaNs with a message, -0.0, denormals
        "bits": jnp.asarray(bits.view(np.float32)),
        # any bits but NaNs, whose message a copy loses where tests compile soon
        "half": jnp.asarray(bits[0].astype(np.uint16) & np.uint16(0xBFFF)).view(jnp.bfloat16),
        "none": None,
        "flags": (jnp.asarray(bits[1, :5] % 2 == 0), jnp.int8(-seed)),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 9))
    )
    return Trained(policy, optimizer.init({"bits": policy["bits"]}), jnp.int32(seed))


def save(folder: Path, *saved: int) -> None:
    with opened(folder) as checkpoints:
        for step in saved:
            checkpoints.save(step, make_state(step), {"step": step})


def flip(folder: Path) -> None:
    file = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    flip_in(file)


def flip_in(file: Path, word: bytes = b"") -> None:
    """Change a bit in the middle of a file, or of the first `word` in it."""
    content = bytearray(file.read_bytes())
    place = content.index(word) + len(word) // 2 if word else len(content) // 2
    content[place] ^= 4
    file.write_bytes(content)
