"""Runs as one process and as several, scripts of this folder as ranks, and what a run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import soon
import tiny_run
from places import ROOT, SUPPORT
from tiny_run import lines

from rlhf_jax.runtime import joining, signing

TWO_SLICES = {"mesh__slices": 2, "mesh__fsdp": 4, "compilation_cache": ""}
PPO = TWO_SLICES | {"evaluation__every": 0, "algorithm__name": "ppo"}
NUMBERS = ("loss/policy", "loss/value", "kl/mean", "gradient/norm")
KEY = "of the tests" * 3
MEASURED = ("seconds", "per_second", "idle_share", "memory/host")


def environment(devices: int) -> dict[str, str]:
    """Of a process with so many devices of its own, whose programs are compiled soon rather than
    well, and not kept: those that are read back have their collectives in other orders.
    """
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # With few threads eight devices of one process may wait for each other forever; see
    # joining.THREADS.
    return (
        os.environ
        | paths
        | soon.environment(devices)
        | {"JAX_PLATFORMS": "cpu", "NPROC": str(joining.THREADS)}
        | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        | {signing.KEY: KEY}
    )


def arguments(place: Path, name: str, **changes) -> list[str]:
    return tiny_run.arguments(place, place / "tiny", workdir=place / name, **changes)[1:]


def one(place: Path, name: str, **changes) -> None:
    """One process with eight devices."""
    words = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments(place, name, **changes)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment(8), timeout=600
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def launched(place: Path, name: str, ranks: int = 2, **changes) -> Iterator[subprocess.Popen]:
    """Processes that share eight devices; whatever happens, none is left.

    No program of theirs is kept, not even where the environment asks for it.
    """
    words = [str(ROOT / "launch" / "local.sh"), str(ranks), *arguments(place, name, **changes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kept = place / "kept"
    asked = environment(8 // ranks) | {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(kept),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.Popen(words, env=asked, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not kept.exists()


def two(place: Path, name: str, ranks: int = 2, **changes) -> tuple[int, str, str]:
    """Exit code, output and errors, of two processes or more."""
    with launched(place, name, ranks, **changes) as process:
        out, errors = process.communicate(timeout=600)
    return process.returncode, out, errors


def ranks_of(
    script: str, *act: str, ranks: int = 2, devices: int, keys: Sequence[str] = (KEY,) * 4
) -> tuple[list[int], list[str]]:
    """The exit codes of processes that run a file of this folder, and what they say on stderr."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(SUPPORT / script), str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = [
        subprocess.Popen(
            [*words, str(rank), *act], env=environment(devices) | {signing.KEY: key}, **pipes
        )
        for rank, key in zip(range(ranks), keys, strict=False)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in begun]
    finally:
        for process in begun:
            process.kill()
    return [process.returncode for process in begun], errors


def left_by(workdir: Path) -> dict:
    """What a deterministic run promises to be equal."""
    steps = [
        {key: value for key, value in line.items() if not key.endswith(MEASURED)}
        for line in lines(workdir / "metrics.jsonl")
    ]
    files = ("samples.jsonl", "evaluations.jsonl", "policy/model.safetensors")
    return {"metrics": steps} | {name: (workdir / name).read_bytes() for name in files}


def check_steps(run: Path, other: Path) -> None:
    """Ask for equal texts, and for numbers within 1e-4, relative where they are above 1."""
    assert lines(run / "samples.jsonl") == lines(other / "samples.jsonl")
    pairs = list(zip(lines(run / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True))
    worst = max(abs(a[key] - b[key]) / max(1.0, abs(a[key])) for a, b in pairs for key in NUMBERS)
    print(json.dumps({"steps": len(pairs), "largest difference": worst}))
    assert worst <= 1e-4
