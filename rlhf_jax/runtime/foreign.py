"""Read files of other programs: any problem becomes one sentence that names the file.

A reader of a format works within `reading_foreign`; problems that it detects itself have its own
messages, which begin with the file's name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LONGEST_REASON = 160  # characters shown of an error
SURROGATE = re.compile("[\ud800-\udfff]")  # Half of a character: no text has one alone.
KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


@contextlib.contextmanager
def reading_foreign(file: Path, kind: str) -> Iterator[None]:
    """Turn any error about the content of a file within the context into one ValueError.

    kind: the expected kind of file, as "a safetensors file". A message that names the file already
    stays unchanged. Raises FileNotFoundError if there is none, and OSError if the disk fails.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; give the path of {kind}.")
    if not file.is_file():  # a pipe would never end
        raise ValueError(f"{file} is not {kind} but a folder, a pipe or a device.")
    try:
        yield
    except BaseException as error:
        # A panic of a library in Rust is no Exception.
        if not isinstance(error, Exception) and "PanicException" not in type(error).__name__:
            raise
        if isinstance(error, ValueError | OSError) and str(file) in str(error):
            raise
        if isinstance(error, OSError):
            raise OSError(f"{file} cannot be read ({one_line(error)}).") from error
        raise ValueError(f"{file} is not {kind} ({one_line(error)}); get it again.") from error


def one_line(error: BaseException) -> str:
    """Return the essence of an error's message, in one line of `LONGEST_REASON` characters."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if "integer string conversion" in str(error):
        return "a number has thousands of digits"
    # Several sentences become one.
    message = re.sub(r"[.!] (?=[A-Z])", "; ", " ".join(str(error).split()))
    message = message[:LONGEST_REASON].rstrip(".")
    name = type(error).__name__
    return f"{name}: {message}" if isinstance(error, LookupError) or not message else message


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Parse JSON; ValueError for any problem.

    unique: refuse a key that an object has twice; otherwise the last one counts.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(one_line(error)) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; FileNotFoundError or ValueError in one sentence."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; {file.parent} is not a complete model folder.")
    with reading_foreign(file, "valid JSON"):
        content = parse_json(file.read_bytes().decode("utf-8-sig"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object; download it again.")
    if has_surrogate(content):
        raise ValueError(f"{file} has half a character (a lone surrogate); get it again.")
    return content


def check_kinds(
    content: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], file: Path
) -> None:
    """Raise ValueError if a key of a JSON object has a value of none of its kinds.

    null means that a key is absent.
    """
    for key in kinds.keys() & content.keys():
        value = content[key]
        if value is not None and type(value) not in kinds[key]:
            expected = " or ".join(KIND_NAMES[kind] for kind in kinds[key])
            raise ValueError(f"{file}: {key} is {value!r:.60}; it must be {expected}.")


def has_surrogate(value: Any) -> bool:
    """Return whether a lone surrogate is anywhere in a value, which may be nested."""
    if isinstance(value, Mapping):
        return any(has_surrogate(key) or has_surrogate(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return any(map(has_surrogate, value))
    return isinstance(value, str) and SURROGATE.search(value) is not None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} is there twice")
    return content
