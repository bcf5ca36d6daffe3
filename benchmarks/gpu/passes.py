"""Time forward and backward passes of workers in turns: ours in several ways, and transformers'."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.compare import PEER_FOLDER, ask, receive, start
from benchmarks.contest import spread
from benchmarks.gpu.setting import NO_STOP, environment
from rlhf_jax.models.files.huggingface_config import config_json
from rlhf_jax.types import ModelConfig


def take_turns(
    config: ModelConfig, workers: Mapping[str, Mapping[str, Any]], repeats: int
) -> dict[str, Any]:
    """Return the seconds of each worker's passes over the same shape.

    workers: by name the settings of each, with its `script`. One that ends before its time, as its
    program does not compile, has an error in the place of its figures.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        document = config_json(config, NO_STOP, np.dtype(np.float32))
        (folder / "config.json").write_text(json.dumps(document))
        begun = []
        for name, settings in workers.items():
            file = folder / f"{name}.json"
            file.write_text(json.dumps({**settings, "model": str(folder)}))
            line = [sys.executable, str(PEER_FOLDER / settings["script"]), str(file)]
            begun.append(stack.enter_context(start(name, line, environment())))
        answers: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in begun}
        errors = {}
        # the versions, two turns that compile, and those that count
        for turn, worker in itertools.product(range(3 + repeats), begun):
            if worker.name in errors:
                continue
            try:
                answers[worker.name].append(ask(worker, {}) if turn else receive(worker))
            except (SystemExit, BrokenPipeError) as error:  # the first would end the whole part
                errors[worker.name] = {"error": str(error)}
    return {name: errors.get(name) or figures(own) for name, own in answers.items()}


def figures(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a worker's answers: its versions, two turns that compile, the rest."""
    versions, _, _, *turns = answers
    return versions | {
        "seconds": spread([turn["wall"] for turn in turns]),
        "loss": turns[-1]["loss"],
        "peak_device_bytes": turns[-1].get("peak_device_bytes"),
    }


def programs_folder() -> str:
    """Return where compiled programs of this process are kept, for workers to share them."""
    return jax.config.values["jax_compilation_cache_dir"] or ""
