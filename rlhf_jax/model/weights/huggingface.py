"""Hugging Face folders: configuration and weights in, and out again so that `transformers` loads
them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rlhf_jax.data.tokenizer import Tokenizer, read_json
from rlhf_jax.model import weight_table
from rlhf_jax.model.weights import safetensors_file
from rlhf_jax.types import Model, ModelConfig, RopeScaling

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# the latter is a critic or reward model
LANGUAGE_MODEL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
# A key of config.json and the values under which this project's transformer is the same function.
SUPPORTED = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}
SCALAR_HEAD = "score.weight"
SHARD_BYTES = 5_000_000_000


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json; ValueError names what is missing or not
    supported.

    A sequence classifier of one label has a scalar head.
    """
    file = Path(folder) / "config.json"
    raw = read_json(file)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{file}: architecture {family!r} is not supported; supported are"
            " llama (Llama 2 to 3.3, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5) and qwen3."
        )
    _refuse_unsupported(raw, file)
    theta, scaling = _read_rope(raw, file)
    try:
        return _config(raw, family, theta, scaling)
    except KeyError as error:
        raise ValueError(f"{file}: the key {error} of a {family} model is missing.") from error
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file}: a size of the model is not a number above 0 ({error})."
        ) from error


def _config(raw: dict, family: str, theta: float, scaling: RopeScaling | None) -> ModelConfig:
    heads = raw["num_attention_heads"]
    # What each family's own configuration class takes a missing key for.
    kv_heads = raw.get("num_key_value_heads") if family == "llama" else raw["num_key_value_heads"]
    head_dim = raw["head_dim"] if family == "qwen3" else raw.get("head_dim")
    context = raw["max_position_embeddings"]
    scalar_head = _is_classifier(raw)
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        width=raw["hidden_size"],
        ffn_width=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim or raw["hidden_size"] // heads,
        max_context=min(context, _window(raw, family) or context),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=raw["rms_norm_eps"],
        tied=bool(raw.get("tie_word_embeddings", False)) and not scalar_head,
        scalar_head=scalar_head,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _is_classifier(raw: dict) -> bool:
    return any(name.endswith(CLASSIFIER) for name in raw.get("architectures") or ())


def _window(raw: dict, family: str) -> int | None:
    """Tokens that a sliding-window layer sees: up to that length it equals full attention."""
    if family == "mistral" or raw.get("use_sliding_window"):
        return raw.get("sliding_window")
    return None


def _refuse_unsupported(raw: dict, file: Path) -> None:
    rope = raw.get("rope_parameters") or {}
    for key, allowed in SUPPORTED.items():
        value = raw.get(key, rope.get(key))
        if value not in allowed:
            raise ValueError(
                f"{file}: {key}={value!r} is not supported; it must be {allowed[0]!r}."
            )
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"{file}: layers of type {sorted(kinds)} are not supported; only attention is."
        )
    # Two is what transformers takes where nothing is said.
    labels = raw.get("num_labels") or len(raw.get("id2label") or range(2))
    if _is_classifier(raw) and labels != 1:
        raise ValueError(
            f"{file}: a classifier of {labels} labels is not supported; a reward model has one."
        )


def _read_rope(raw: dict, file: Path) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling`.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    nested = any(isinstance(value, dict) for value in rope.values())
    if nested or kind not in ("default", "linear", "llama3"):
        what = "rope parameters that differ by layer are" if nested else f"rope type {kind!r} is"
        raise ValueError(f"{file}: {what} not supported; supported are default, linear and llama3.")
    try:
        return float(theta), _read_scaling(kind, rope)
    except KeyError as error:
        raise ValueError(f"{file}: rope scaling of type {kind!r} lacks the key {error}.") from error


def _read_scaling(kind: str, rope: dict) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    return RopeScaling(
        kind="llama3",
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_context=rope["original_max_position_embeddings"],
    )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Token ids that end a text: generation_config.json's, else config.json's; () where neither
    names one.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def padding_token(folder: Path) -> int | None:
    """The token id that config.json names as padding; None where it names none."""
    return read_json(Path(folder) / "config.json").get("pad_token_id")


def load(folder: Path, dtype, shardings: Model | None = None) -> Model:
    """The model in a folder, layers stacked, in `dtype`; each device reads only its own slices.

    `shardings` is a `Model` of `jax.sharding.Sharding`, or None for the first local device. Raises
    ValueError or FileNotFoundError, naming file and tensor, before any weight is read.
    """
    config = read_config(folder)
    tensors = open_tensors(folder, config)
    return weight_table.assemble(
        lambda place: tensors[_name(place, config)], config, dtype, shardings
    )


def open_tensors(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Every weight of a folder, a mapped view by its name there, checked against `config`; reads no
    data.
    """
    files = _weight_files(Path(folder))
    opened = {file: safetensors_file.views(file) for file in files}
    expected = {
        _name(place, config): weight_table.stored_shape(place[0], shape)
        for place, shape in weight_table.places(config)
    }
    found = {
        name: (file, view.shape)
        for file, tensors in opened.items()
        for name, view in tensors.items()
        if not _redundant(name, config)
    }
    weight_table.check(found, expected, Path(folder), config)
    return {name: opened[file][name] for name, (file, _) in found.items()}


def _redundant(name: str, config: ModelConfig) -> bool:
    """Old files repeat what the configuration already says: the tied head, the rope frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == NAMES["head"])


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        files = [
            folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))
        ]
    else:
        files = [single]
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


def _name(place: weight_table.Place, config: ModelConfig) -> str:
    field, layer = place
    if field == "head" and config.scalar_head:
        return SCALAR_HEAD
    return NAMES[field] if layer is None else f"model.layers.{layer}.{NAMES[field]}"


def save(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer | None,
    stop_tokens: tuple[int, ...],
    dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` loads: weights in `dtype`, configuration, tokenizer if
    given.

    The folder appears whole or not at all: it is written beside its place and renamed; one already
    there is replaced. Weights over `shard_bytes` are split into several files with an index. Raises
    OSError in one sentence.
    """
    outputs = 1 if model.config.scalar_head else model.config.vocab_size
    if model.head is not None and model.head.shape[-1] != outputs:
        raise ValueError(
            f"{folder}: {outputs} outputs are configured, the head has {model.head.shape[-1]}."
        )
    folder = Path(folder)
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(partial, model, tokenizer, stop_tokens, np.dtype(dtype), shard_bytes)
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


def _write(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer | None,
    stop_tokens: tuple[int, ...],
    dtype,
    shard_bytes: int,
) -> None:
    folder.mkdir(parents=True)
    _write_weights(folder, model, dtype, shard_bytes)
    _write_json(folder / "config.json", config_json(model.config, stop_tokens, dtype))
    _write_json(folder / "generation_config.json", {"eos_token_id": list(stop_tokens) or None})
    if tokenizer is not None:
        tokenizer.save(folder)


def config_json(config: ModelConfig, stop_tokens: tuple[int, ...], dtype: np.dtype) -> dict:
    """config.json of a model, in the keys that transformers 4 and 5 both read."""
    labels = (
        {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.scalar_head else {}
    )
    return labels | {
        "architectures": [
            FAMILIES[config.family] + (CLASSIFIER if config.scalar_head else LANGUAGE_MODEL)
        ],
        "model_type": config.family,
        "torch_dtype": dtype.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_json(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "sliding_window": None,
        "use_sliding_window": False,
        "eos_token_id": list(stop_tokens) or None,
    }


def _scaling_json(scaling: RopeScaling | None) -> dict | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _write_weights(folder: Path, model: Model, dtype: np.dtype, shard_bytes: int) -> None:
    shards = list(_shards(model.config, dtype, shard_bytes))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        name = f"model{part}.safetensors"
        tensors = {_name(place, model.config): _stored(model, place, dtype) for place in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors would keep it from other users
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = (
            sum(int(np.prod(shape)) for _, shape in weight_table.places(model.config))
            * dtype.itemsize
        )
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(
    config: ModelConfig, dtype: np.dtype, shard_bytes: int
) -> Iterator[list[weight_table.Place]]:
    """The places of a model in groups of at most `shard_bytes`, or of one weight where it alone is
    larger.
    """
    group = []
    size = 0
    for place, shape in weight_table.places(config):
        weight = int(np.prod(shape)) * dtype.itemsize
        if group and size + weight > shard_bytes:
            yield group
            group = []
            size = 0
        group.append(place)
        size += weight
    yield group


def _stored(model: Model, place: weight_table.Place, dtype: np.dtype) -> np.ndarray:
    array = weight_table.to_stored(place[0], weight_table.weight_at(model, place))
    return np.ascontiguousarray(array.astype(dtype))


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
