"""Hold the host's part of a checkpoint, and proofs of the rest, in a JSON document."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax.runtime.checkpoint.damage import Damaged, reading
from rlhf_jax.runtime.foreign import one_line, parse_json


def make(**parts: Any) -> dict[str, Any]:
    """Make a document of JSON values that shares nothing with `parts`, and holds its own digest.

    parts: JSON values, numpy arrays and scalars, in lists and in dicts with string keys.
    """
    content = json.loads(json.dumps(parts, default=_encoded))
    return content | {"sha256": _digest(content)}


def read(file: Path) -> dict[str, Any]:
    """Return the parts of a document, with writable numpy arrays.

    Raises Damaged if it has changed; see `reading` for the other errors.
    """
    with reading(file):
        data = file.read_bytes()
    try:
        content = parse_json(data)
    except ValueError as error:
        raise Damaged(f"{file.name} cannot be read, {one_line(error)}") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise Damaged(f"{file.name} has changed")
    return json.loads(json.dumps(content), object_hook=_decoded)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, saved, own) of each key of `own` whose value in `saved` differs.

    A key that `saved` lacks has the value None there.
    """
    own = json.loads(json.dumps(own))  # tuples become lists, as they did in `saved`
    return [(key, saved.get(key), value) for key, value in own.items() if saved.get(key) != value]


def _digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of the content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """Return a numpy array or scalar as JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"A {type(value).__name__} is neither JSON nor a numpy array.")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def _decoded(value: dict[str, Any]) -> Any:
    """Return the numpy array that a JSON object encodes, or the object itself."""
    if value.keys() != {"dtype", "shape", "base64"}:
        return value
    # A bytearray, unlike bytes, can be written to.
    data = bytearray(base64.b64decode(value["base64"]))
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"])
