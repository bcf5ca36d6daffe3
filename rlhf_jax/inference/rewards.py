"""Rewards of finished samples: plain Python functions `(prompt, response, row) -> float`, on the host."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import numbers
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

Reward = Callable[[str, str, dict[str, Any]], float]

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def load_reward(spec: str) -> Reward:
    """The function named by "package.module:function" or "path/to/file.py:function".

    A relative path is looked up in the current folder, then in the repository. One sentence tells
    what is wrong: the form, the file, the import, the name, or that it is no function.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"Reward {spec!r} must look like path/to/file.py:function or package.module:function.")
    module = _load_file(place, spec) if place.endswith(".py") else _load(spec, lambda: importlib.import_module(place))
    reward = getattr(module, name, None)
    if reward is None:
        raise ValueError(f"Reward {spec!r}: {place} defines no {name!r}.")
    if not callable(reward):
        raise ValueError(f"Reward {spec!r} is of type {type(reward).__name__}, not a function.")
    return cast(Reward, reward)


def score(
    reward: Reward, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, Any]]
) -> np.ndarray:
    """Rewards of samples, float32 [B]; a failing call, a non-number or a non-finite one names its sample."""
    samples = enumerate(zip(prompts, responses, rows, strict=True))
    return np.array([_one(reward, index, *sample) for index, sample in samples], np.float32)


def _one(reward: Reward, index: int, prompt: str, response: str, row: dict[str, Any]) -> np.float32:
    where = f"of sample {index} (prompt {prompt!r:.60}, response {response!r:.60})"
    name = getattr(reward, "__name__", repr(reward))
    try:
        value = reward(prompt, response, row)
    except Exception as error:
        raise ValueError(f"Reward {name} {where} failed with {type(error).__name__}: {error}.") from error
    if not isinstance(value, numbers.Real | np.bool_):
        raise ValueError(f"Reward {name} {where} is of type {type(value).__name__}; it must return one float.")
    if not abs(float(value)) <= float(np.finfo(np.float32).max):  # also true of NaN
        raise ValueError(f"Reward {name} {where} is {value}; it must be a finite float32.")
    return np.float32(value)


def _load_file(place: str, spec: str) -> types.ModuleType:
    candidates = [folder / pathlib.Path(place).expanduser() for folder in (pathlib.Path.cwd(), REPOSITORY)]
    path = next((path.resolve() for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"Reward {spec!r}: there is no file {place} in {candidates[0].parent} or {REPOSITORY}.")
    return _load(spec, lambda: _execute(path))


def _execute(path: pathlib.Path) -> types.ModuleType:
    """Runs a Python file as a module of its own, registered because dataclasses look their module up."""
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(spec: str, load: Callable[[], types.ModuleType]) -> types.ModuleType:
    try:
        return load()
    except Exception as error:  # the user's file may raise anything
        raise ValueError(f"Reward {spec!r} cannot be imported: {type(error).__name__}: {error}.") from error
