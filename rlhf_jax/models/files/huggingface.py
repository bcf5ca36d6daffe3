"""Read weights of Hugging Face folders, and write whole folders that `transformers` loads.

`huggingface_config` reads and writes their config.json.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.models import weight_table
from rlhf_jax.models.families.family import END_WEIGHTS
from rlhf_jax.models.files import huggingface_config, safetensors_file
from rlhf_jax.models.files.huggingface_config import config_json
from rlhf_jax.models.files.sizes import checked_ids, token_id
from rlhf_jax.runtime.foreign import read_json
from rlhf_jax.types import Model, ModelConfig

SCALAR_HEAD = "score.weight"  # The head of a sequence classifier, in every family.
SHARD_BYTES = 5_000_000_000  # The most bytes of one file, as transformers splits them.
ROWS = 4096  # Rows of two matrices compared at a time: the first ones may decide.


def end_tokens(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the ids of the tokens that end a text, by the file of the folder that names them."""
    by_file = {}
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        if ids is not None:
            by_file[name] = checked_ids(
                ids if isinstance(ids, list) else [ids], file, "eos_token_id"
            )
    return by_file


def repeated(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a folder's JSON files to copy to an export, by the file's name."""
    file = Path(folder) / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    for key in ("bos_token_id", "pad_token_id"):
        token_id(generation, key, file)
    return {
        "config.json": huggingface_config.repeated(folder),
        "generation_config.json": generation,
    }


def read_config(folder: Path) -> ModelConfig:
    """Read the `ModelConfig` of a folder; its weights decide whether a tied head really is.

    As in transformers 5, a head that differs from the embedding counts. Errors are those of
    `huggingface_config.read_config` and of the weights' files.
    """
    config = huggingface_config.read_config(folder)
    if not config.tied:
        return config
    tensors = _views(Path(folder))
    embed, head = (tensors.get(END_WEIGHTS[name].huggingface) for name in ("embed", "head"))
    if embed is None or head is None:
        return config
    parts = [slice(start, start + ROWS) for start in range(0, len(embed), ROWS)]
    tied = embed.shape == head.shape and all(
        np.array_equal(embed[part].astype(np.float32), head[part].astype(np.float32))
        for part in parts
    )
    return dataclasses.replace(config, tied=tied)


def load(folder: Path, dtype: DTypeLike, shardings: Model | None = None) -> Model:
    """Load the model of a folder, layers stacked, in `dtype`.

    Each device reads only its own slices. `shardings` is a `Model` of `jax.sharding.Sharding`, or
    None for the first local device. Raises ValueError or FileNotFoundError, naming file and tensor,
    before any weight is read.
    """
    config = read_config(folder)
    tensors = open_tensors(folder, config)
    names = _names(config)
    return weight_table.assemble(lambda key: tensors[names[key]], config, dtype, shardings)


def open_tensors(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return every weight of a folder by its name there, as mapped views; reads no data.

    Raises ValueError or FileNotFoundError unless they are the weights of `config`.
    """
    folder = Path(folder)
    tensors = _views(folder)
    if config.tied:
        # A head in a tied model equals the embedding, so it is read in its place.
        head = tensors.pop(END_WEIGHTS["head"].huggingface, None)
        if head is not None:
            tensors.setdefault(END_WEIGHTS["embed"].huggingface, head)
    shapes = {name: (folder, view.shape) for name, view in tensors.items()}
    weight_table.check_weights(shapes, _names(config), folder, config)
    return tensors


def _views(folder: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a folder's files by its name there, as mapped views."""
    tensors = {}
    for file in _weight_files(folder):
        tensors |= safetensors_file.views(file)
    # Old files repeat parts of the configuration.
    return {name: one for name, one in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: the index counts if there is no single file.

    Raises ValueError if the index is invalid, FileNotFoundError if a file is missing.
    """
    files = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists() and not files[0].exists():
        weight_map = read_json(index).get("weight_map")
        values = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not values or not all(isinstance(v, str) and Path(v).name == v for v in values):
            raise ValueError(
                f"{index}: its weight_map must name files of the folder, one for each weight."
            )
        files = [folder / name for name in sorted(set(values))]
    missing = [file for file in files if not file.exists()]
    if missing and list(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} has only pytorch_model.bin; convert it to safetensors: nothing is unpickled."
        )
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} is missing; download the model's safetensors files again."
        )
    return files


def _names(config: ModelConfig) -> dict[weight_table.WeightKey, str]:
    """Return the name in a folder of every weight of a model."""
    names = weight_table.stored_names(config, "huggingface")
    if config.scalar_head:
        names[weight_table.WeightKey("head", None)] = SCALAR_HEAD
    return names


def save(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer | None,
    stop_tokens: tuple[int, ...],
    dtype: DTypeLike,
    repeated: Mapping[str, Mapping[str, Any]] = {},
) -> None:
    """Write a folder that `transformers` loads: weights, configuration, tokenizer if given.

    Texts end at `stop_tokens` there, too. repeated: of the model's `Source`, by the file's name.
    The weights are written in `dtype`; above `SHARD_BYTES` they are split into several files with
    an index. The folder appears completely or not at all: it is written next to its place and
    renamed; an existing one is replaced. Raises ValueError if the head does not fit the
    configuration, OSError, in one sentence, if the disk fails.
    """
    outputs = 1 if model.config.scalar_head else model.config.vocab_size
    if model.head is not None and model.head.shape[-1] != outputs:
        raise ValueError(
            f"{folder}: {outputs} outputs are configured, the head has {model.head.shape[-1]}."
        )
    folder = Path(folder)
    dtype = np.dtype(dtype)
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        own = repeated.get("config.json", {})
        _write_json(partial / "config.json", config_json(model.config, stop_tokens, dtype, own))
        _write_weights(partial, model, dtype)
        ends = {"eos_token_id": list(stop_tokens) or None}
        generation = {**repeated.get("generation_config.json", {}), **ends}
        _write_json(partial / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save(partial)

        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        # On a full disk safetensors has an error of its own.
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"{folder} cannot be written ({reason}); make room, or name another folder."
        ) from error
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(folder: Path, model: Model, dtype: np.dtype) -> None:
    """Write the weights to safetensors files, with an index if there are several."""
    names = _names(model.config)
    # Groups of at most `SHARD_BYTES`; one weight that alone is larger is a group of its own.
    shards: list[list[weight_table.WeightKey]] = [[]]
    total = 0
    size = 0
    for key, shape in weight_table.weight_keys(model.config):
        weight = int(np.prod(shape)) * dtype.itemsize
        if shards[-1] and size + weight > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += weight
        total += weight

    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = folder / f"model{part}.safetensors"
        tensors = {}
        for key in shard:
            stored = weight_table.stored_weight(model, key)
            tensors[names[key]] = np.ascontiguousarray(stored.astype(dtype))
        save_file(tensors, file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", file)  # safetensors forgets the umask
        weight_map |= dict.fromkeys(tensors, file.name)

    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
