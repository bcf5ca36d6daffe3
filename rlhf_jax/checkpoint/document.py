"""The JSON document of a checkpoint: what belongs to the host, and what proves the rest."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Damaged(Exception):
    """Why a checkpoint cannot be trusted."""


def make(**parts: Any) -> dict[str, Any]:
    """A document of JSON values that shares nothing with `parts`, and holds its own digest.

    parts: JSON values, numpy arrays and scalars, in lists and in dicts with string keys.
    """
    content = json.loads(json.dumps(parts, default=_encoded))
    return content | {"sha256": _digest(content)}


def read(file: Path) -> dict[str, Any]:
    """The parts of a document, arrays as numpy arrays that may be written to; raises Damaged where they changed."""
    try:
        content = json.loads(file.read_bytes())
        digest = content.pop("sha256")
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise Damaged(f"{file.name} cannot be read, {reason(error)}") from error
    if digest != _digest(content):
        raise Damaged(f"{file.name} has changed")
    return json.loads(json.dumps(content), object_hook=_decoded)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved, own) of each key of `own` that `saved` has another value for, or none (None)."""
    own = json.loads(json.dumps(own))  # tuples become lists, as they did in `saved`
    return [(key, saved.get(key), value) for key, value in own.items() if saved.get(key) != value]


def reason(error: BaseException) -> str:
    """The heart of an error's message; tensorstore's are long, and say last what happened first."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    code = re.search(r"os_error_code='(\d+)'", text)
    if code:
        return os.strerror(int(code[1]))
    return re.sub(r"^[A-Z_]+: (.*: )?| \[(tensorstore|source).*", "", text)[:160]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """A numpy array or scalar as JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"A {type(value).__name__} is neither JSON nor a numpy array.")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() != {"dtype", "shape", "base64"}:
        return value
    data = bytearray(base64.b64decode(value["base64"]))  # a bytearray, unlike bytes, can be written to
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"])
