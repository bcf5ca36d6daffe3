"""Read config.json of a Hugging Face folder as a `ModelConfig`, and write it from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax.models.families import FAMILIES, Family
from rlhf_jax.models.files.sizes import checked, token_id
from rlhf_jax.runtime.foreign import check_kinds, read_json, reading_foreign
from rlhf_jax.types import ModelConfig, RopeScaling

# Suffixes in `architectures` of the class of a language model, and of a critic or reward model.
LANGUAGE_MODEL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
# The context before scaling; next to the scaling's key, or within it.
ORIGINAL = "original_max_position_embeddings"
# The values of a key under which this project's transformer computes the same function.
SUPPORTED = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
# The required types of keys, where present; sizes are checked as numbers.
CONFIG_KINDS: dict[str, tuple[type, ...]] = {
    "architectures": (list,),
    "layer_types": (list,),
    "rope_parameters": (dict,),
    "rope_scaling": (dict,),
    "id2label": (dict,),
    "hidden_act": (str,),
    "mlp_bias": (bool,),
    "attention_bias": (bool,),
    "partial_rotary_factor": (int, float),
    "tie_word_embeddings": (bool,),
    "use_sliding_window": (bool,),
    "sliding_window": (int,),
    "max_window_layers": (int,),
    "num_labels": (int,),
}
WINDOW = 4096  # transformers' default if `sliding_window` is missing and counts.
# Keys copied to an export, as no `ModelConfig` has them.
REPEATED = (
    "bos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)


def read_config(folder: Path) -> ModelConfig:
    """Read the `ModelConfig` of a folder's config.json.

    A sequence classifier of one label has a scalar head. Raises ValueError that names anything
    missing or unsupported, FileNotFoundError if the file is missing.
    """
    file = Path(folder) / "config.json"
    raw = read_json(file)
    with reading_foreign(file, "the config.json of a model"):
        return checked(_read_content(raw, file), file)


def _read_content(raw: dict, file: Path) -> ModelConfig:
    """Make a `ModelConfig` from config.json's content; any error if a value has another type."""
    check_kinds(raw, CONFIG_KINDS, file)
    for key in ("architectures", "layer_types"):
        if not all(isinstance(text, str) for text in raw.get(key) or ()):
            raise ValueError(f"{file}: {key} is {raw[key]!r:.60}; it must be a list of texts.")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        *others, last = (
            f"{f.name} ({f.models})" if f.models else f.name for f in FAMILIES.values()
        )
        raise ValueError(
            f"{file}: architecture {name!r} is not supported; supported are"
            f" {', '.join(others)} and {last}."
        )

    rope = _rope(raw)
    check_kinds(rope, CONFIG_KINDS, file)
    for key, allowed in SUPPORTED.items():
        value = rope.get(key, raw.get(key))
        if value not in allowed:
            raise ValueError(
                f"{file}: {key}={value!r} is not supported; it must be {allowed[0]!r}."
            )
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"{file}: layers of type {sorted(kinds)} are not supported; only attention is."
        )
    # Two is transformers' default.
    labels = raw.get("num_labels")
    labels = len(raw.get("id2label") or range(2)) if labels is None else labels
    if _is_classifier(raw) and labels != 1:
        raise ValueError(
            f"{file}: a classifier of {labels} labels is not supported; a reward model has one."
        )

    theta, scaling = _read_rope(raw, file)
    try:
        return _convert(raw, FAMILIES[name], theta, scaling)
    except KeyError as error:
        raise ValueError(f"{file}: the key {error} of a {name} model is missing.") from error
    except (TypeError, ArithmeticError) as error:
        raise ValueError(
            f"{file}: a size of the model is not a number above 0 ({error})."
        ) from error


def _convert(raw: dict, family: Family, theta: float, scaling: RopeScaling | None) -> ModelConfig:
    """Make a `ModelConfig` from config.json's content; KeyError if a key is missing."""

    def get(key: str, default: int) -> int:
        value = raw[key] if key in family.required_keys else raw.get(key)
        return default if value is None else value

    heads = raw["num_attention_heads"]
    context = raw["max_position_embeddings"]
    # Up to the length of its window, a sliding layer equals full attention.
    windowed = family.always_windowed or raw.get("use_sliding_window")
    window = raw.get("sliding_window", WINDOW) if windowed else None
    scalar_head = _is_classifier(raw)
    return ModelConfig(
        family=family.name,
        vocab_size=raw["vocab_size"],
        width=raw["hidden_size"],
        ffn_width=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", raw["hidden_size"] // heads),
        max_context=context if window is None else min(context, window),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=raw["rms_norm_eps"],
        tied=bool(raw.get("tie_word_embeddings", False)) and not scalar_head,
        scalar_head=scalar_head,
    )


def repeated(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder's config.json to copy to an export; ids are checked."""
    file = Path(folder) / "config.json"
    raw = read_json(file)
    for key in ("bos_token_id", "pad_token_id"):
        token_id(raw, key, file)
    kept = {key: raw[key] for key in REPEATED if key in raw}
    if FAMILIES[raw["model_type"]].always_windowed or raw.get("use_sliding_window"):
        kept.setdefault("sliding_window", WINDOW)
    return kept


def _is_classifier(raw: dict) -> bool:
    return any(name.endswith(CLASSIFIER) for name in raw.get("architectures") or ())


def _rope(raw: dict) -> dict[str, Any]:
    """Return the keys of the rotary embedding: transformers 4's come before 5's."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _read_rope(raw: dict, file: Path) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling of the rotary embedding."""
    rope = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    nested = any(isinstance(value, dict) for value in rope.values())
    if nested or kind not in ("default", "linear", "llama3"):
        what = "rope parameters that differ by layer are" if nested else f"rope type {kind!r} is"
        raise ValueError(f"{file}: {what} not supported; supported are default, linear and llama3.")
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", rope["factor"])
        return theta, RopeScaling(
            kind="llama3",
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_context=raw.get(ORIGINAL, rope.get(ORIGINAL, raw["max_position_embeddings"])),
        )
    except KeyError as error:
        raise ValueError(f"{file}: rope scaling of type {kind!r} lacks the key {error}.") from error


def config_json(
    config: ModelConfig,
    stop_tokens: tuple[int, ...],
    dtype: np.dtype,
    repeated: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return the content of config.json, in the keys that transformers 4 and 5 both read.

    repeated: keys of the config.json that the model came with; they override those made here.
    """
    labels = {}
    if config.scalar_head:
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    scaling = config.rope_scaling
    rope = None
    if scaling is not None and scaling.kind == "linear":
        rope = {"rope_type": "linear", "type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            ORIGINAL: scaling.original_context,
        }
    head = CLASSIFIER if config.scalar_head else LANGUAGE_MODEL
    if len(repeated.get("layer_types") or ()) != config.num_layers:  # those of a student's teacher
        repeated = {key: value for key, value in repeated.items() if key != "layer_types"}
    return labels | {
        "architectures": [FAMILIES[config.family].class_prefix + head],
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
        "rope_scaling": rope,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "sliding_window": None,
        "use_sliding_window": False,
        "eos_token_id": list(stop_tokens) or None,
        **repeated,
    }
