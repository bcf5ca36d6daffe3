"""How files are damaged: by their structure where it is JSON, else byte by byte."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# Values that a key of a JSON file should not have, or may only now and then.
WEIRD: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "zero": 0,
    "half": 0.5,
    "a billion": 10**9,
    "beyond 64 bits": 10**30,
    "infinity": float("inf"),
    "nan": float("nan"),
    "no text": "",
    "a text": "text",
    "a surrogate": "\ud800",
    "no list": [],
    "a list": [1, "a", None],
    "an object": {"a": [1]},
}
# Content that no JSON file may have.
NO_JSON = {
    "empty": b"",
    "half": b'{"a": [1, ',
    "brackets": b"[" * 100_000,
    "braces": b'{"a":' * 100_000,
    "closed brackets": b"[" * 100_000 + b"]" * 100_000,
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"17",
    "NUL": b"\0" * 64,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "digits": b'{"prompt": ' + b"9" * 10_000 + b"}",
}
INTEGERS = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


def places(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in parsed JSON, objects and lists too; of long lists the first."""
    if path:
        yield path
    if isinstance(content, dict):
        for key in list(content)[:40]:
            yield from places(content[key], (*path, key))
    elif isinstance(content, list):
        for index in range(min(len(content), 3)):
            yield from places(content[index], (*path, index))


def changed(content: Any, path: tuple, value: Any) -> Any:
    """Parsed JSON with another value at a path."""
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return content


def as_json(content: Any) -> bytes:
    return json.dumps(content).encode()


def with_header(original: bytes, header: bytes) -> bytes:
    """A safetensors file with another header."""
    length = int.from_bytes(original[:8], "little")
    return len(header).to_bytes(8, "little") + header + original[8 + length :]


def header_of(original: bytes) -> Any:
    return json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])


@st.composite
def damaged_json(draw: st.DrawFn, content: Any) -> bytes:
    """JSON with a value or two that do not belong."""
    for _ in range(draw(st.integers(1, 2))):
        paths = list(places(content))
        if not paths:
            break
        content = changed(
            content, draw(st.sampled_from(paths)), draw(st.sampled_from([*WEIRD.values()]))
        )
    return as_json(content)


@st.composite
def damaged_bytes(draw: st.DrawFn, original: bytes, within: int) -> bytes:
    """Bytes changed, left out or put in; most within the first so many."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        end = draw(st.sampled_from([min(within, len(data)), len(data)]))
        place = draw(st.integers(0, end - 1))
        what = draw(st.sampled_from(["byte", "integer", "cut", "drop", "repeat"]))
        if what == "byte":
            data[place] = draw(st.integers(0, 255))
        elif what == "integer":
            size = draw(st.sampled_from([4, 8]))
            value = draw(st.sampled_from(INTEGERS)) % (1 << 8 * size)
            data[place : place + size] = value.to_bytes(size, "little")
        elif what == "cut":
            del data[place:]
        elif what == "drop":
            del data[place : place + draw(st.integers(1, 64))]
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 64))]
    return bytes(data)


def damaged(name: str, original: bytes) -> st.SearchStrategy[bytes]:
    """Damage of the file of a reader."""
    raw = damaged_bytes(original, 2000)
    if name in (
        "config",
        "tokenizer",
        "settings",
        "generation",
        "index",
        "document",
        "kept",
        "leaves",
    ):
        return st.one_of(damaged_json(json.loads(original)), raw)
    if name == "safetensors":
        headers = damaged_json(header_of(original)).map(
            lambda header: with_header(original, header)
        )
        return st.one_of(headers, raw)
    if name == "jsonl":
        first, second, *_ = original.split(b"\n")
        lines = damaged_json(json.loads(first)).map(lambda line: line + b"\n" + second)
        return st.one_of(lines, raw)
    return raw
