"""The user's own code: FILE.py:NAME in a config, and registries that accept such names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from rlhf_jax.runtime.files import SHIPPED, find

T = TypeVar("T")


class Registry(dict[str, T]):
    """Hold the objects that a key of the config may name; FILE.py:NAME is loaded on first use."""

    def __init__(self, key: str, check: Callable[[Any], str], own: dict[str, T] | None = None):
        """Begin with `own`; `check` returns why an object of a file is invalid, or ''."""
        super().__init__(own or {})
        self._key = key
        self._check = check

    def __missing__(self, name: str) -> T:
        if not is_of_file(name):
            raise KeyError(name)
        loaded = load_named(name, self._key)
        if refusal := self._check(loaded):
            raise ValueError(f"{self._key} {name!r} {refusal}.")
        self[name] = loaded
        return loaded

    def require(self, name: str) -> None:
        """Raise ValueError, in one sentence, if there is nothing of that name."""
        if name not in self and not is_of_file(name):
            known = ", ".join(own for own in self if not is_of_file(own))
            raise ValueError(
                f"{self._key} is {name!r}; it must be one of {known}, or FILE.py:NAME."
            )
        self[name]


def is_of_file(name: str) -> bool:
    """Return whether a name is FILE.py:NAME."""
    file, _, own = name.rpartition(":")
    return file.endswith(".py") and own.isidentifier()


def split_name(spec: str, what: str) -> tuple[str, str]:
    """Return file or module, and name, of a spec; nothing is imported.

    ValueError or FileNotFoundError, in one sentence that begins with `what`, if it has another
    form, or if there is no such file.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"{what} {spec!r} must look like path/to/file.py:name or package.module:name."
        )
    if place.endswith(".py") and not find(place).is_file():
        raise FileNotFoundError(
            f"{what} {spec!r}: there is no file {place} in {pathlib.Path.cwd()} or {SHIPPED}."
        )
    return place, name


def load_named(spec: str, what: str) -> Any:
    """Return the object named by "package.module:name" or "path/to/file.py:name".

    A relative path is looked up in the current folder, then among the files of the package.
    ValueError or FileNotFoundError, in one sentence that begins with `what`, for a wrong form,
    file, import or name.
    """
    place, name = split_name(spec, what)
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(
            f"{what} {spec!r} cannot be imported: {type(error).__name__}: {error}."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{what} {spec!r}: {place} defines no {name!r}.")
    return getattr(module, name)


def file_digest(name: str) -> str:
    """Return 16 hexadecimal digits that identify a file's content."""
    return hashlib.sha256(find(name).read_bytes()).hexdigest()[:16]


def _load_file(place: str) -> types.ModuleType:
    """Run a Python file as a module, once."""
    path = find(place).resolve()
    name = f"{path.stem}_{hashlib.sha256(bytes(path) + path.read_bytes()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # a link whose target has another name
        raise ImportError(f"{path} does not end in .py")
    # Registered because dataclasses look up their module.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
