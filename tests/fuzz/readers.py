"""The readers of foreign files, what else reads the same format, and the process that runs both.

A reader gives a value that the format's own reader gives too, or raises one sentence.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf as gguf_package
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import safetensors.numpy
import tokenizers

from rlhf_jax.data import rendering, rows
from rlhf_jax.data.tokenizer import read_tokenizer
from rlhf_jax.models.files import gguf, gguf_file, huggingface, huggingface_config, safetensors_file
from rlhf_jax.rewards import children  # noqa: F401  (its messages are registered)
from rlhf_jax.runtime import messages
from rlhf_jax.runtime.checkpoint import document, store
from rlhf_jax.runtime.checkpoint.damage import Damaged

MORE_MEMORY = 1 << 30  # bytes that a reader may take beyond what the process has
CHAT = [{"role": "user", "content": "Hello"}]
# Of config.json, the key of each size of the model.
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}


# What the checkpoint holds.
STATE = {
    "weights": jnp.arange(2000, dtype=jnp.float32),
    "scales": jnp.ones((3, 5), jnp.bfloat16),
    "count": jnp.asarray(7, jnp.int32),
}


class Reader(NamedTuple):
    """A reader of one file, and the format's own reader of the same, for equal values."""

    read: Callable[[Path], Any]
    own: Callable[[Path], Any]


def tensors(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (str(one.dtype), one.shape, np.asarray(one).tobytes()) for name, one in found.items()
    }


def read_index(file: Path) -> list[str]:
    config = huggingface_config.read_config(file.parent)
    return sorted(huggingface.open_tensors(file.parent, config))


def own_index(file: Path) -> list[str]:
    names = set(json.loads(file.read_bytes())["weight_map"].values())
    return sorted(
        name for one in names for name in safetensors.numpy.load_file(str(file.parent / one))
    )


def read_sizes(file: Path) -> dict[str, Any]:
    config = huggingface_config.read_config(file.parent)
    huggingface.end_tokens(file.parent)
    huggingface.repeated(file.parent)
    return {key: getattr(config, name) for name, key in SIZES.items()}


def own_sizes(file: Path) -> dict[str, Any]:
    raw = json.loads(file.read_bytes())
    return {key: raw[key] for key in SIZES.values()}


def own_ids(file: Path) -> list[int]:
    backend = tokenizers.Tokenizer.from_file(str(file.parent / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    return backend.encode("Hello there").ids


def read_gguf(file: Path) -> Any:
    found = gguf_file.open_file(file)
    gguf.check_tensors(found, gguf.read_config(found))
    gguf.read_tokenizer(found).encode("Hello")
    gguf.end_tokens(found)
    gguf.repeated(found)
    return {name: list(one.shape) for name, one in found.tensors.items()}


def own_gguf(file: Path) -> Any:
    found = gguf_package.GGUFReader(file).tensors
    return {one.name: [int(size) for size in one.shape][::-1] for one in found}


def own_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line.strip()]


def own_document(file: Path) -> Any:
    content = json.loads(file.read_bytes())
    content.pop("sha256")
    return content


def decode_message(file: Path) -> Any:
    return messages.encode(messages.decode(file.read_bytes(), str(file)))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The arrays of a checkpoint; whatever it says where there are none is a sentence."""
    try:
        return tensors(store.read_part(folder.parent, STATE).state)
    except OSError as error:
        raise ValueError(str(error)) from error


READERS = {
    "safetensors": Reader(
        lambda file: tensors(safetensors_file.views(file)),
        lambda file: tensors(safetensors.numpy.load_file(str(file))),
    ),
    "index": Reader(read_index, own_index),
    "config": Reader(read_sizes, own_sizes),
    "tokenizer": Reader(lambda file: read_tokenizer(file.parent).encode("Hello there"), own_ids),
    "template": Reader(
        lambda file: isinstance(read_tokenizer(file.parent).render(CHAT), str), lambda file: True
    ),
    "gguf": Reader(read_gguf, own_gguf),
    "jsonl": Reader(rows.read, own_lines),
    "parquet": Reader(rows.read, lambda file: pyarrow.parquet.read_table(file).to_pylist()),
    "checkpoint": Reader(read_checkpoint, lambda folder: tensors(STATE)),
    "document": Reader(document.read, own_document),
    "message": Reader(decode_message, lambda file: file.read_bytes()),
}


def outcome(name: str, file: Path) -> str:
    """What is wrong with how a file was read; '' where it is a sentence or the right value."""
    try:
        value = READERS[name].read(file)
    except (ValueError, FileNotFoundError, Damaged) as error:
        said = str(error)
        if file.name not in said and str(file.parent) not in said:
            return f"a sentence that names no file: {said}"
        return "" if "\n" not in said and len(said) < 1000 else f"no sentence: {said[:2000]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:2000]
    try:
        own = READERS[name].own(file)
    except Exception as error:
        return f"read, and the format's own reader says {type(error).__name__}: {error}"
    return (
        "" if same(value, own) else f"read as {value!r:.500}, by the format's own as {own!r:.500}"
    )


def same(one: Any, other: Any) -> bool:
    """Equality in which NaN is itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def serve() -> None:
    """Answer what is asked on the standard input: a reader and a file; a line each."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE_MEMORY, held + MORE_MEMORY))
    rendering.SECONDS = 1.0
    for line in sys.stdin:
        name, path = json.loads(line)
        print(json.dumps(outcome(name, Path(path))), flush=True)


if __name__ == "__main__":
    serve()
