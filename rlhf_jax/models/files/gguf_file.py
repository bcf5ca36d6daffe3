"""Parse GGUF files: metadata, and mapped tensors that are dequantised one at a time.

Own code, because the reader of the `gguf` package takes seconds over a vocabulary of 49,000; its
type table and its dequantisation are used. The format, versions 2 and 3, is docs/gguf.md of
github.com/ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from rlhf_jax.runtime.foreign import reading_foreign

# The package is imported when a file is read, so that other runs do not need it.
if TYPE_CHECKING:
    import gguf

# Kinds of metadata values, as the format numbers them; the rest are numbers, by their numpy dtype.
STRING = 8
ARRAY = 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
LARGE = 1 << 20  # Bytes from which on the size is checked against the file first.
MAX_RANK = 4  # Axes of a tensor, at most.
MOST_NUMBERS = 1 << 62  # Of a tensor.
DEFAULT_ALIGNMENT = 32  # Tensors begin at a multiple of this many bytes by default.


class Tensor(NamedTuple):
    """Hold the place of a tensor in a file, and its shape with rows first, as in PyTorch."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int  # Bytes from the start of the file.
    end: int


@dataclasses.dataclass(frozen=True)
class File:
    """Hold a parsed GGUF file: its metadata, and the places of its tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Any:
        """Return the value of a metadata key; ValueError if it is missing.

        `{arch}` in the key stands for the file's architecture.
        """
        value = self.get(key)
        if value is None:
            name = key.format(arch=self.metadata.get("general.architecture"))
            raise ValueError(
                f"{self.path}: the metadata key {name!r} is missing; it is not a whole language"
                " model."
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key as `[]` does, or `default` if it is missing."""
        return self.metadata.get(
            key.format(arch=self.metadata.get("general.architecture")), default
        )

    def dequantise(self, name: str) -> np.ndarray:
        """Read a tensor as float32; ValueError if the `gguf` package cannot decode its type."""
        import gguf

        tensor = self.tensors[name]
        # A plain array, since slices of a memmap are slow.
        mapped = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        rows = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        try:
            return gguf.dequantize(mapped[tensor.begin : tensor.end].reshape(rows), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be read: {error}.") from error


def open_file(path: Path) -> File:
    """Parse a GGUF file, reading no weights.

    Raises FileNotFoundError or ValueError, in one sentence, if it is missing or broken.
    """
    path = Path(path)
    with reading_foreign(path, "a GGUF file"), path.open("rb") as stream:
        metadata, tensors = _parse(stream)
    size = max((tensor.end for tensor in tensors.values()), default=0)
    if path.stat().st_size < size:
        raise ValueError(
            f"{path} is truncated: it has {path.stat().st_size} bytes and needs {size}; download"
            " it again."
        )
    return File(path, metadata, tensors)


def _parse(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read (metadata, tensors) from the beginning of a file; errors as in `open_file`."""
    import gguf

    magic, version, num_tensors, num_keys = struct.unpack("<4sIQQ", _take(stream, 24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    metadata = {}
    for _ in range(num_keys):
        key = _read_string(stream)
        metadata[key] = _read_value(stream, _read_integer(stream, 4))

    headers = []
    for _ in range(num_tensors):
        name = _read_string(stream)
        rank = _read_integer(stream, 4)
        if rank > MAX_RANK:
            raise ValueError(f"tensor {name!r:.60} has {rank} axes")
        # The fastest axis is stored first.
        shape = tuple(_read_integer(stream, 8) for _ in range(rank))[::-1]
        kind = gguf.GGMLQuantizationType(_read_integer(stream, 4))
        headers.append((name, shape, kind, _read_integer(stream, 8)))

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r:.60}, which is no power of two")
    start = -(-stream.tell() // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in headers:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block or math.prod(shape) >= MOST_NUMBERS:
            raise ValueError(f"tensor {name!r:.60} cannot be of the shape {list(shape)}")
        begin = start + offset
        tensors[name] = Tensor(shape, kind, begin, end=begin + math.prod(shape) // block * size)
    return metadata, tensors


def _take(stream: BinaryIO, size: int) -> bytes:
    left = os.fstat(stream.fileno()).st_size - stream.tell() if size > LARGE else size
    taken = stream.read(min(size, left))
    if len(taken) < size:
        raise EOFError(f"it is only the beginning of one: of {size} bytes {len(taken)} are there")
    return taken


def _read_integer(stream: BinaryIO, size: int) -> int:
    return int.from_bytes(_take(stream, size), "little")


def _read_string(stream: BinaryIO) -> str:
    return _take(stream, _read_integer(stream, 8)).decode("utf-8")


def _read_value(stream: BinaryIO, kind: int) -> Any:
    """Read a metadata value of a kind; ValueError if the format knows no such kind."""
    if kind == STRING:
        return _read_string(stream)
    element = _read_integer(stream, 4) if kind == ARRAY else kind
    count = _read_integer(stream, 8) if kind == ARRAY else 1
    if element in (STRING, ARRAY):
        return [_read_value(stream, element) for _ in range(count)]
    if element not in SCALARS:
        raise ValueError(f"a value is of the kind {element}, which there is not")
    dtype = np.dtype(SCALARS[element])
    values = np.frombuffer(_take(stream, count * dtype.itemsize), dtype).tolist()
    return values if kind == ARRAY else values[0]
