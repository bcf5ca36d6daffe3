"""config.json of a Hugging Face folder, read as a `ModelConfig` and written from one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlhf_jax.data.tokenizer import read_json
from rlhf_jax.model.families import FAMILIES, Family
from rlhf_jax.model.weights.sizes import checked
from rlhf_jax.runtime.foreign import reading_foreign
from rlhf_jax.types import ModelConfig, RopeScaling

# How the class of a language model ends in `architectures`, and that of a critic or reward model.
LANGUAGE_MODEL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
# The values of a key under which this project's transformer computes the same function.
SUPPORTED = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
# What the values of keys must be, where they are there; of a list the texts in it.
KINDS = {
    "architectures": list,
    "layer_types": list,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "id2label": dict,
    "tie_word_embeddings": bool,
    "use_sliding_window": bool,
    "sliding_window": int,
    "num_labels": int,
}
KIND_NAMES = {list: "a list of texts", dict: "an object", bool: "true or false", int: "a number"}


def read_config(folder: Path) -> ModelConfig:
    """Read the `ModelConfig` of a folder's config.json.

    A sequence classifier of one label has a scalar head. Raises ValueError that names what is
    missing or not supported, FileNotFoundError where the file is missing.
    """
    file = Path(folder) / "config.json"
    raw = read_json(file)
    with reading_foreign(file, "the config.json of a model"):
        return checked(_read_content(raw, file), file)


def _read_content(raw: dict, file: Path) -> ModelConfig:
    """Make a `ModelConfig` of config.json's content; any error where a value is of another type."""
    for key, kind in KINDS.items():
        value = raw.get(key)
        texts = value if isinstance(value, list) else []
        fits = type(value) is kind and all(isinstance(text, str) for text in texts)
        if value is not None and not fits:
            raise ValueError(f"{file}: {key} is {value!r:.60}; it must be {KIND_NAMES[kind]}.")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        *others, last = (
            f"{f.name} ({f.models})" if f.models else f.name for f in FAMILIES.values()
        )
        raise ValueError(
            f"{file}: architecture {name!r} is not supported; supported are"
            f" {', '.join(others)} and {last}."
        )

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
    """Make a `ModelConfig` of config.json's content; KeyError where a key is missing."""

    def get(key: str) -> int | None:
        return raw[key] if key in family.required_keys else raw.get(key)

    heads = raw["num_attention_heads"]
    kv_heads = get("num_key_value_heads")
    head_dim = get("head_dim")
    context = raw["max_position_embeddings"]
    # As far as a window reaches, a layer that slides one is the same as full attention.
    windowed = family.always_windowed or raw.get("use_sliding_window")
    window = raw.get("sliding_window") if windowed else None
    scalar_head = _is_classifier(raw)
    return ModelConfig(
        family=family.name,
        vocab_size=raw["vocab_size"],
        width=raw["hidden_size"],
        ffn_width=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim or raw["hidden_size"] // heads,
        max_context=min(context, window or context),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=raw["rms_norm_eps"],
        tied=bool(raw.get("tie_word_embeddings", False)) and not scalar_head,
        scalar_head=scalar_head,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _is_classifier(raw: dict) -> bool:
    return any(name.endswith(CLASSIFIER) for name in raw.get("architectures") or ())


def _read_rope(raw: dict, file: Path) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling of the rotary embedding.

    transformers 5 keeps both in `rope_parameters`; 4 in `rope_theta` and `rope_scaling`.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
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
            original_context=rope["original_max_position_embeddings"],
        )
    except KeyError as error:
        raise ValueError(f"{file}: rope scaling of type {kind!r} lacks the key {error}.") from error


def config_json(config: ModelConfig, stop_tokens: tuple[int, ...], dtype: np.dtype) -> dict:
    """Return the content of config.json, in the keys that transformers 4 and 5 both read."""
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
            "original_max_position_embeddings": scaling.original_context,
        }
    head = CLASSIFIER if config.scalar_head else LANGUAGE_MODEL
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
    }
