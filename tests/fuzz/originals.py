"""Whole files of every format that is read, small enough to be damaged a thousand times."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import readers
import tiny_run

from rlhf_jax.models.files import huggingface
from rlhf_jax.models.transformer import init
from rlhf_jax.rewards.children import RewardCall
from rlhf_jax.rewards.combination import Response
from rlhf_jax.runtime import messages
from rlhf_jax.runtime.checkpoint import document, store

ROWS = [
    {"prompt": "Say a", "answer": "a", "level": 1.5},
    {"prompt": [{"role": "user", "content": "Say b"}], "answer": "b", "level": 2.0},
]


def make(folder: Path) -> dict[str, Path]:
    """Write one file for each reader; each folder may be copied and damaged alone."""
    model = tiny_run.make_model(folder / "model", num_layers=1)
    (model / "chat_template.jinja").write_text(tiny_run.TEMPLATE)
    found = {
        "safetensors": model / "model.safetensors",
        "config": model / "config.json",
        "tokenizer": model / "tokenizer.json",
        "settings": model / "tokenizer_config.json",
        "generation": model / "generation_config.json",
        "template": model / "chat_template.jinja",
    }
    split = folder / "split"
    shutil.copytree(model, split)
    names = list(huggingface.open_tensors(model, tiny_config()))
    shard = "model-00001-of-00001.safetensors"
    (split / "model.safetensors").rename(split / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    found["index"] = split / "model.safetensors.index.json"
    found["index"].write_text(json.dumps(index))

    gguf = folder / "gguf"
    gguf.mkdir()
    tied = init(jax.random.key(0), dataclasses.replace(tiny_config(), vocab_size=64))
    found["gguf"] = gguf_files.write_gguf(gguf / "model.gguf", tied)
    plain = folder / "rows"
    plain.mkdir()
    found["jsonl"] = plain / "rows.jsonl"
    found["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found["parquet"] = plain / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1] * 3), found["parquet"])
    found["document"] = plain / "document.json"
    host = {"position": {"epoch": 1}, "lengths": np.arange(3).tolist()}
    found["document"].write_text(json.dumps(document.make(identity={"a": 1}, host=host)))
    found |= make_checkpoint(folder / "checkpoints")
    found["message"] = plain / "message"
    response = Response("p", tiny_chat(), ROWS[0], "text", [1, 2], 3)
    found["message"].write_bytes(messages.encode(RewardCall(1, 2.0, [response])))
    return found


def make_checkpoint(folder: Path) -> dict[str, Path]:
    """A checkpoint, which is read as a whole, and files of it that are damaged."""
    with store.Checkpoints(folder, 1, {"seed": 0}) as checkpoints:
        checkpoints.save(1, readers.STATE, {"position": 1})
    checkpoint = folder / "1"
    files = [path for path in (checkpoint / "state").rglob("d/*") if path.is_file()]
    return {
        "checkpoint": checkpoint,
        "arrays": max(files, key=lambda path: path.stat().st_size),
        "leaves": checkpoint / "state" / "_METADATA",
        "manifest": checkpoint / "state" / "manifest.ocdbt",
        "kept": checkpoint / "host" / "document.json",
    }


def tiny_config():
    return dataclasses.replace(tiny_run.CONFIG, num_layers=1)


def tiny_chat() -> list[dict]:
    return [{"role": "user", "content": "p"}]
