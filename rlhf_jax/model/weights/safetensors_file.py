"""safetensors files as memory-mapped views, read where they are touched, bfloat16 included.

Own code because the numpy reader of the `safetensors` package knows no bfloat16 and its flax reader
puts whole tensors on a device. The format is a length (8 bytes, little endian), a JSON header, and
the bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

# The dtypes that are read, by their names in a header.
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
HEADER_LIMIT = 100_000_000  # The most bytes of a header, as in the format's own reader.


def views(file: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a file as a read-only view of the mapped bytes; reads no data.

    Raises ValueError when the file is truncated or broken, or holds anything but floats.
    """
    header, start = _read_header(file)
    specs = {name: spec for name, spec in header.items() if name != "__metadata__"}
    try:
        ends = [start + spec["data_offsets"][1] for spec in specs.values()]
        _check_size(file, max([start, *ends]))
        mapped = np.memmap(file, np.uint8, mode="r")
        return {
            name: _view(file, name, spec, mapped=mapped, start=start)
            for name, spec in specs.items()
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is not a safetensors file: its header is broken.") from error


def _read_header(file: Path) -> tuple[dict, int]:
    """Return the header, and the byte at which the data begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if file.stat().st_size < 8 or length > HEADER_LIMIT:
            raise ValueError(f"{file} is not a safetensors file, or only the beginning of one.")
        _check_size(file, 8 + length)
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(
                f"{file} is not a safetensors file: its header is not JSON."
            ) from error
    return header, 8 + length


def _check_size(file: Path, size: int) -> None:
    held = file.stat().st_size
    if held < size:
        raise ValueError(
            f"{file} is truncated: it has {held} bytes and needs {size}; download it again."
        )


def _view(file: Path, name: str, spec: dict, *, mapped: np.ndarray, start: int) -> np.ndarray:
    """Return the view that a tensor's entry of the header describes; data begin at `start`."""
    dtype = FLOATS.get(spec["dtype"])
    shape = tuple(spec["shape"])
    begin, end = spec["data_offsets"]
    if dtype is None:
        raise ValueError(
            f"{file}: tensor {name!r} is of type {spec['dtype']}; only {', '.join(FLOATS)} are"
            " read."
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{file}: tensor {name!r} {list(shape)} does not fit its {end - begin} bytes."
        )
    return np.ndarray(shape, dtype, buffer=mapped, offset=start + begin)
