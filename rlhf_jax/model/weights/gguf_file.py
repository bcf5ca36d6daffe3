"""GGUF files parsed: metadata, and tensors as mapped bytes that are dequantised one at a time.

Own code because the reader of the `gguf` package takes seconds over a vocabulary of 49,000; its
type table and its dequantisation are used. The format, versions 2 and 3, is docs/gguf.md of
github.com/ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np

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
DEFAULT_ALIGNMENT = 32  # bytes


class Tensor(NamedTuple):
    """Where a tensor lies, and its shape in the order of rows first, as PyTorch has it."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int  # bytes from the start of the file
    end: int


@dataclasses.dataclass(frozen=True)
class File:
    """A parsed GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Any:
        """The value of a metadata key, `{arch}` standing for the architecture; ValueError if
        missing.
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
        """The value of a metadata key, or `default`."""
        return self.metadata.get(
            key.format(arch=self.metadata.get("general.architecture")), default
        )

    def dequantise(self, name: str) -> np.ndarray:
        """A tensor in float32; ValueError when the `gguf` package cannot decode its type."""
        tensor = self.tensors[name]
        # plain: a memmap's slices are slow
        mapped = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        rows = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        try:
            return gguf.dequantize(mapped[tensor.begin : tensor.end].reshape(rows), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be read: {error}.") from error


def open_file(path: Path) -> File:
    """Parse a GGUF file, reading no weights; FileNotFoundError or ValueError when missing or
    broken.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give the path of a .gguf file.")
    try:
        with path.open("rb") as stream:
            metadata, tensors = _parse(stream)
    except (struct.error, EOFError, ValueError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a GGUF file, or only the beginning of one: {error}."
        ) from error
    size = max((tensor.end for tensor in tensors.values()), default=0)
    if path.stat().st_size < size:
        raise ValueError(
            f"{path} is truncated: it has {path.stat().st_size} bytes and needs {size}; download"
            " it again."
        )
    return File(path, metadata, tensors)


def _parse(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Tensor]]:
    magic, version, num_tensors, num_keys = struct.unpack("<4sIQQ", _take(stream, 24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    metadata = {_string(stream): _value(stream, _integer(stream)) for _ in range(num_keys)}
    headers = [_tensor_header(stream) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    start = -(-stream.tell() // alignment) * alignment
    return metadata, {
        name: _tensor(shape, kind, start + offset) for name, shape, kind, offset in headers
    }


def _take(stream: BinaryIO, size: int) -> bytes:
    taken = stream.read(size)
    if len(taken) < size:
        raise EOFError(f"it ends at byte {stream.tell()}")
    return taken


def _integer(stream: BinaryIO) -> int:
    return int.from_bytes(_take(stream, 4), "little")


def _long(stream: BinaryIO) -> int:
    return int.from_bytes(_take(stream, 8), "little")


def _string(stream: BinaryIO) -> str:
    return _take(stream, _long(stream)).decode("utf-8", errors="replace")


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(stream)
    if kind != ARRAY:
        return _numbers(stream, kind, 1)[0]
    kind = _integer(stream)
    count = _long(stream)
    if kind in (STRING, ARRAY):
        return [_value(stream, kind) for _ in range(count)]
    return _numbers(stream, kind, count)


def _numbers(stream: BinaryIO, kind: int, count: int) -> list:
    dtype = np.dtype(SCALARS[kind])
    return np.frombuffer(_take(stream, count * dtype.itemsize), dtype).tolist()


def _tensor_header(stream: BinaryIO) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = _string(stream)
    rank = _integer(stream)
    shape = tuple(_long(stream) for _ in range(rank))[::-1]  # stored with the fastest axis first
    return name, shape, gguf.GGMLQuantizationType(_integer(stream)), _long(stream)


def _tensor(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, begin: int) -> Tensor:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return Tensor(shape, kind, begin, begin + math.prod(shape) // block * size)
