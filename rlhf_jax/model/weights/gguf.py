"""GGUF files: configuration, weights (dequantised), tokenizer and chat template in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.model import weight_table
from rlhf_jax.model.transformer import rope_frequencies
from rlhf_jax.model.weights.gguf_file import File
from rlhf_jax.types import Model, ModelConfig, RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")  # general.architecture; Mistral's files say llama
NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "output": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
}
# how llama.cpp keeps Llama 3's scaling: one divisor a frequency
ROPE_DIVISORS = "rope_freqs.weight"
# tokenizer.ggml.token_type
CONTROL = 3
USER_DEFINED = 4
WORDS = (  # Llama 3's and Qwen's splitting, but for how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_config(file: File) -> ModelConfig:
    """The `ModelConfig` of a file; ValueError names what is missing or not supported."""
    family = file["general.architecture"]
    if family not in FAMILIES:
        raise ValueError(
            f"{file.path}: architecture {family!r} is not supported; supported are"
            f" {', '.join(FAMILIES)}."
        )
    heads = file["{arch}.attention.head_count"]
    width = file["{arch}.embedding_length"]
    head_dim = file.get("{arch}.attention.key_length", width // heads)
    _refuse_unsupported(file, head_dim)
    context = file["{arch}.context_length"]
    config = ModelConfig(
        family=family,
        vocab_size=len(file["tokenizer.ggml.tokens"]),
        width=width,
        ffn_width=file["{arch}.feed_forward_length"],
        num_layers=file["{arch}.block_count"],
        num_heads=heads,
        num_kv_heads=file.get("{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=min(context, file.get("{arch}.attention.sliding_window") or context),
        rope_theta=float(file.get("{arch}.rope.freq_base", 10_000.0)),
        norm_eps=_shortest(file["{arch}.attention.layer_norm_rms_epsilon"]),
        tied=NAMES["head"] not in file.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return dataclasses.replace(config, rope_scaling=_read_scaling(file, config))


def _shortest(value: float) -> float:
    """The decimal that was meant by a number kept in float32: 1e-5, not 9.99999974738e-06."""
    return float(str(np.float32(value)))


def _refuse_unsupported(file: File, head_dim: int) -> None:
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


def _read_scaling(file: File, config: ModelConfig) -> RopeScaling | None:
    kind = file.get("{arch}.rope.scaling.type", "none")
    if ROPE_DIVISORS in file.tensors:
        return _llama3_scaling(file, config)
    if kind == "linear":
        return RopeScaling("linear", float(file["{arch}.rope.scaling.factor"]))
    if kind != "none":
        raise ValueError(
            f"{file.path}: rope scaling {kind!r} is not supported; supported are linear and llama3."
        )
    return None


def _llama3_scaling(file: File, config: ModelConfig) -> RopeScaling:
    """Llama 3's scaling from its divisors: the largest is the factor, the rest must follow from
    it.
    """
    divisors = file.dequantise(ROPE_DIVISORS)
    scaling = RopeScaling("llama3", factor=float(divisors.max()))
    scaled = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if not np.allclose(rope_frequencies(config) / scaled, divisors, rtol=1e-3):
        raise ValueError(
            f"{file.path}: {ROPE_DIVISORS} is not Llama 3's rope scaling, and no other is"
            " supported."
        )
    return scaling


def stop_tokens(file: File) -> tuple[int, ...]:
    """Token ids that end a text, the end of a turn included; () where the file names none."""
    keys = (
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    )
    ids = [file.get(key) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def load(file: File, dtype, shardings: Model | None = None) -> Model:
    """The model in a file, layers stacked, dequantised to `dtype`, one weight on the host at a
    time.

    `shardings` is a `Model` of `jax.sharding.Sharding`, or None for the first local device. Raises
    ValueError, naming file and tensor, before any weight is read.
    """
    config = read_config(file)
    check_tensors(file, config)

    def read(place: weight_table.Place) -> np.ndarray:
        array = file.dequantise(_name(place))
        heads = {"query": config.num_heads, "key": config.num_kv_heads}.get(place[0])
        return _halves(array, heads) if heads and config.family == "llama" else array

    return weight_table.assemble(read, config, dtype, shardings)


def check_tensors(file: File, config: ModelConfig) -> None:
    """Raise ValueError, naming the tensor, unless the file holds just the weights of `config`."""
    found = {
        name: (file.path, tensor.shape)
        for name, tensor in file.tensors.items()
        if name != ROPE_DIVISORS
    }
    expected = {
        _name(place): weight_table.stored_shape(place[0], shape)
        for place, shape in weight_table.places(config)
    }
    weight_table.check(found, expected, file.path, config)


def _name(place: weight_table.Place) -> str:
    field, layer = place
    return NAMES[field] if layer is None else f"blk.{layer}.{NAMES[field]}"


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: it interleaves the two halves of each head, [(H, D/2, 2), M]."""
    rows, width = array.shape
    return array.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def read_tokenizer(file: File) -> Tokenizer:
    """The byte-level BPE tokenizer and chat template of a file; ValueError for any other kind."""
    kind = file["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer {kind!r} is not supported; only byte-level BPE ('gpt2') is."
        )
    tokens = file["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    settings = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(
        _backend(file, special), file.get("tokenizer.chat_template"), special, settings, file.path
    )


def _backend(file: File, special: Mapping[str, str]) -> tokenizers.Tokenizer:
    kind = file.get("tokenizer.ggml.pre", "default")
    vocabulary = {token: index for index, token in enumerate(file["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is in the vocabulary as it is, whatever its merges say.
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe")
    )
    backend.pre_tokenizer = _pre_tokenizer(kind, file.path)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    _add_special(backend, file)
    if file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return backend


def _pre_tokenizer(kind: str, path: Path) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("default", "gpt-2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if kind not in digits:
        raise ValueError(
            f"{path}: pre-tokenizer {kind!r} is not supported; supported are gpt-2, smollm,"
            " llama-bpe and qwen2."
        )
    words = pre_tokenizers.Split(
        tokenizers.Regex(WORDS.replace("DIGITS", digits[kind])), behavior="isolated"
    )
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _add_special(backend: tokenizers.Tokenizer, file: File) -> None:
    kinds = file["tokenizer.ggml.token_type"]
    marked = [
        tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(file["tokenizer.ggml.tokens"], kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(marked)
