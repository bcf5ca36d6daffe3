"""Read GGUF files: configuration, weights (dequantised), tokenizer and chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jax.typing import DTypeLike
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.models import weight_table
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.models.families.family import END_WEIGHTS
from rlhf_jax.models.files.gguf_file import File
from rlhf_jax.models.files.sizes import checked, checked_ids, token_id
from rlhf_jax.models.transformer import rope_frequencies
from rlhf_jax.runtime.foreign import check_kinds, reading_foreign
from rlhf_jax.types import Model, ModelConfig, RopeScaling

# The tensor in which llama.cpp keeps Llama 3's scaling, as one divisor per frequency.
ROPE_DIVISORS = "rope_freqs.weight"
TEMPLATE = "tokenizer.chat_template"
TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"  # If present, it is for tools only.
# The required types of keys, where present.
METADATA_KINDS: dict[str, tuple[type, ...]] = {
    TEMPLATE: (str,),
    TOOL_TEMPLATE: (str,),
    "tokenizer.ggml.add_bos_token": (bool,),
    "tokenizer.ggml.pre": (str,),
}
# Values of `tokenizer.ggml.token_type` whose tokens are never made by merging.
CONTROL = 3
USER_DEFINED = 4
# Llama 3 and Qwen split words alike, except for the number of digits that stay together: DIGITS
# stands for that.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}


def read_config(file: File) -> ModelConfig:
    """Read the `ModelConfig` of a file; ValueError names anything missing or unsupported."""
    with reading_foreign(file.path, "a GGUF file of a model"):
        return checked(_read_metadata(file), file.path)


def _read_metadata(file: File) -> ModelConfig:
    """Make a `ModelConfig` from the metadata; any error if a value has another type."""
    architecture = file["general.architecture"]
    families = {f.gguf_architecture: f for f in FAMILIES.values() if f.gguf_architecture}
    if architecture not in families:
        raise ValueError(
            f"{file.path}: architecture {architecture!r} is not supported; supported are"
            f" {', '.join(families)}."
        )
    family = families[architecture]
    heads = file["{arch}.attention.head_count"]
    width = file["{arch}.embedding_length"]
    head_dim = file.get("{arch}.attention.key_length", width // heads)
    required = {
        "{arch}.expert_count": 0,
        "{arch}.attention.value_length": head_dim,
        "{arch}.rope.dimension_count": head_dim,
    }
    for key, needed in required.items():
        if file.get(key, needed) != needed:
            raise ValueError(
                f"{file.path}: {key.format(arch='*')}={file[key]} is not supported; it must be"
                f" {needed}."
            )

    context = file["{arch}.context_length"]
    # The decimal that a float32 number stands for: 1e-5, not 9.99999974738e-06.
    norm_eps = float(str(np.float32(file["{arch}.attention.layer_norm_rms_epsilon"])))
    config = ModelConfig(
        family=family.name,
        vocab_size=len(file["tokenizer.ggml.tokens"]),
        width=width,
        ffn_width=file["{arch}.feed_forward_length"],
        num_layers=file["{arch}.block_count"],
        num_heads=heads,
        num_kv_heads=file.get("{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=min(context, file.get("{arch}.attention.sliding_window") or context),
        rope_theta=float(file.get("{arch}.rope.freq_base", 10_000.0)),
        norm_eps=norm_eps,
        tied=END_WEIGHTS["head"].gguf not in file.tensors,
    )
    return dataclasses.replace(config, rope_scaling=_read_scaling(file, config))


def _read_scaling(file: File, config: ModelConfig) -> RopeScaling | None:
    """Return the scaling of the rotary embedding of a `config` without one."""
    if ROPE_DIVISORS in file.tensors:
        # The largest divisor is Llama 3's factor; the others must follow from it.
        divisors = file.dequantise(ROPE_DIVISORS)
        scaling = RopeScaling("llama3", factor=float(divisors.max()))
        scaled = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
        if not np.allclose(rope_frequencies(config) / scaled, divisors, rtol=1e-3):
            raise ValueError(
                f"{file.path}: {ROPE_DIVISORS} is not Llama 3's rope scaling, and no other is"
                " supported."
            )
        return scaling

    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", float(file["{arch}.rope.scaling.factor"]))
    if kind != "none":
        raise ValueError(
            f"{file.path}: rope scaling {kind!r} is not supported; supported are linear and llama3."
        )
    return None


def end_tokens(file: File) -> dict[str, tuple[int, ...]]:
    """Return the ids of the tokens that end a text, a turn or a message, under the file's name."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = (token_id(file.metadata, key, file.path) for key in keys)
    return {file.path.name: tuple(dict.fromkeys(one for one in ids if one is not None))}


def repeated(file: File) -> dict[str, dict[str, Any]]:
    """Return the metadata to copy to an export, in the keys of config.json."""
    keys = {"bos_token_id": "bos", "pad_token_id": "padding"}
    ids = {
        key: token_id(file.metadata, f"tokenizer.ggml.{name}_token_id", file.path)
        for key, name in keys.items()
    }
    return {"config.json": ids, "generation_config.json": ids}


def load(file: File, dtype: DTypeLike, shardings: Model | None = None) -> Model:
    """Load the model of a file, layers stacked, dequantised to `dtype`.

    The host holds one weight at a time. `shardings` is a `Model` of `jax.sharding.Sharding`, or
    None for the first local device. Raises ValueError, naming file and tensor, before any weight is
    read.
    """
    config = read_config(file)
    check_tensors(file, config)
    interleaved = FAMILIES[config.family].gguf_interleaved
    names = weight_table.stored_names(config, "gguf")
    heads = {"query": config.num_heads, "key": config.num_kv_heads}

    def read(key: weight_table.WeightKey) -> np.ndarray:
        array = file.dequantise(names[key])
        if key.name not in heads or not interleaved:
            return array
        # [(H, D/2, 2), M], the two halves of each head interleaved, to [(H, 2, D/2), M].
        pairs = array.reshape(heads[key.name], -1, 2, array.shape[1])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return weight_table.assemble(read, config, dtype, shardings)


def check_tensors(file: File, config: ModelConfig) -> None:
    """Raise ValueError, naming the tensor, unless the file holds just the weights of `config`."""
    tensors = {
        name: (file.path, tensor.shape)
        for name, tensor in file.tensors.items()
        if name != ROPE_DIVISORS
    }
    names = weight_table.stored_names(config, "gguf")
    weight_table.check_weights(tensors, names, file.path, config)


def read_tokenizer(file: File) -> Tokenizer:
    """Read the byte-level BPE tokenizer and chat template; ValueError for any other kind."""
    with reading_foreign(file.path, "a GGUF file with a tokenizer"):
        return _make_tokenizer(file)


def _make_tokenizer(file: File) -> Tokenizer:
    """Make the tokenizer from the metadata; any error if a value has another type."""
    kind = file["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer {kind!r} is not supported; only byte-level BPE ('gpt2') is."
        )
    check_kinds(file.metadata, METADATA_KINDS, file.path)
    tokens = file["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    for name, index in ids.items():
        if index is not None and checked_ids([index], file.path, name)[0] >= len(tokens):
            raise ValueError(f"{name} is {index}, and there are {len(tokens)} tokens")
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    settings = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(
        backend=_make_backend(file, special),
        template=file.get(TEMPLATE),
        special=special,
        settings=settings,
        origin=file.path,
        named_templates={"tool_use": file[TOOL_TEMPLATE]} if file.get(TOOL_TEMPLATE) else {},
    )


def _make_backend(file: File, special: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Make the tokenizer from a file's vocabulary, merges and added tokens."""
    kind = file.get("tokenizer.ggml.pre", "default")
    tokens = file["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]]
    # Llama 3 keeps a word in the vocabulary whole, whatever its merges are.
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe")
    )
    backend.pre_tokenizer = _make_pre_tokenizer(kind, file.path)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()

    added = [
        tokenizers.AddedToken(token, special=kind_of == CONTROL, normalized=False)
        for token, kind_of in zip(tokens, file["tokenizer.ggml.token_type"], strict=True)
        if kind_of in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)

    if file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return backend


def _make_pre_tokenizer(kind: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """Make the splitter of texts into words, by llama.cpp's name for it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("default", "gpt-2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind not in DIGITS:
        raise ValueError(
            f"{path}: pre-tokenizer {kind!r} is not supported; supported are gpt-2, smollm,"
            " llama-bpe and qwen2."
        )
    words = pre_tokenizers.Split(
        tokenizers.Regex(WORDS.replace("DIGITS", DIGITS[kind])), behavior="isolated"
    )
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
