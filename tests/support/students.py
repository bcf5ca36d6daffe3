"""Texts that a student learns from, and runs that train one."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.settings import TrainingSettings

CONFIG = TrainingSettings(microbatch_rows=2, temperature=0.8, chunk=6, seed=5)
make = jax.jit(init, static_argnums=1)


def responses_of(rows: int, slots: int, vocabulary: int) -> Sequences:
    """Rows of random tokens, of which the last half of each is the response."""
    random = np.random.default_rng(0)
    length = random.integers(slots // 2 + 2, slots + 1, rows).astype(np.int32)
    place = np.arange(slots)
    mask = (place >= slots // 2) & (place < length[:, None])
    tokens = np.where(
        place < length[:, None], random.integers(0, vocabulary, (rows, slots)), 0
    ).astype(np.int32)
    ids = np.arange(7, 7 + rows, dtype=np.uint32)
    return Sequences(tokens, mask, ids.astype(np.int32)).with_columns(sample_ids=ids)


def run(place, name: str, **changes) -> tuple[list[dict], str]:
    """The metrics of a run in the workdir `name`, in a process with one device, and what it
    printed.
    """
    options = {"workdir": place / name, **changes}
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        *tiny_run.arguments(place, place / "tiny", **options)[1:],
    ]
    environment = tiny_run.environment()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return lines(place / name / "metrics.jsonl"), done.stdout
