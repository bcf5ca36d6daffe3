"""Small model folders in which two sources disagree on a fact, as other programs leave them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models

LETTERS = "abcdefghijklmnopqrstuvwxyz .<>/|"
SPECIAL = ("<s>", "</s>", "<|end|>", "<pad>")  # ids 32 to 35
TEXTS = ("a <think>b</think> c", "hi</s><s><|end|>", "<|tool|> x <|end|>")
TOKENS = (1, 7, 20, 3, 11, 30, 5, 16)
VOCABULARY = 44
WIDTH, FFN, LAYERS, HEADS, KEYS, HEAD = 16, 24, 2, 2, 1, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": HEAD,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 32,
    "eos_token_id": 33,
}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "clean_up_tokenization_spaces": False,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THINK = {"content": "<think>", "special": False, "normalized": False}
SLASH_THINK = {"content": "</think>", "special": False, "normalized": False}


def added(token: Mapping[str, Any], index: int) -> dict[str, Any]:
    """An entry of `added_tokens_decoder`, whole."""
    return {str(index): {"lstrip": False, "rstrip": False, "single_word": False, **token}}


@dataclasses.dataclass(frozen=True)
class Fact:
    """Changes of the whole folder: keys of JSON files (None takes one out), texts, weights."""

    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = ""  # the name of a change in `change_weights`
    refused: tuple[str, ...] = ()  # the sources that the refusal names; () where it is read


def config(**changes: Any) -> dict[str, Any]:
    return {"config.json": changes}


def settings(**changes: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": changes}


NAMED = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "for tools"}]
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "search"}}]
TOKEN_FILES = ("tokenizer_config.json", "tokenizer.json")

FACTS: dict[str, Fact] = {
    "nothing": Fact(),
    # weights
    "tied, and a head of its own": Fact(config(tie_word_embeddings=True)),
    "tied, and the head is the embedding": Fact(config(tie_word_embeddings=True), "head is embed"),
    "tied, and no head": Fact(config(tie_word_embeddings=True), "no head"),
    "tied, and no embedding": Fact(config(tie_word_embeddings=True), "no embed"),
    "a stale index": Fact({"model.safetensors.index.json": "stale"}, "stale shards"),
    "a tensor in two shards": Fact({"model.safetensors.index.json": "two"}, "two shards"),
    "an index of files that are gone": Fact({"model.safetensors.index.json": "stale"}),
    # rotary embedding
    "rope_scaling beside rope_parameters": Fact(
        config(rope_parameters=DEFAULT, rope_scaling=LINEAR)
    ),
    "rope_scaling default beside rope_parameters linear": Fact(
        config(rope_parameters=LINEAR, rope_scaling={"rope_type": "default"})
    ),
    "an empty rope_scaling": Fact(config(rope_parameters=LINEAR, rope_scaling={})),
    "two thetas": Fact(config(rope_theta=500.0, rope_parameters=DEFAULT)),
    "theta beside rope_parameters that has none": Fact(
        config(rope_theta=500.0, rope_parameters={"rope_type": "default"})
    ),
    "theta in rope_parameters, scaling in rope_scaling": Fact(
        config(
            rope_theta=None, rope_parameters=DEFAULT | {"rope_theta": 500.0}, rope_scaling=LINEAR
        )
    ),
    "theta in rope_scaling, too": Fact(
        config(rope_theta=500.0, rope_scaling=LINEAR | DEFAULT | LINEAR)
    ),
    "two kinds of scaling": Fact(config(rope_scaling=LINEAR | {"type": "default"})),
    "llama3 of no original context": Fact(config(rope_scaling=LLAMA3)),
    "llama3's original context outside": Fact(
        config(
            rope_scaling=LLAMA3 | {"original_max_position_embeddings": 32},
            original_max_position_embeddings=16,
        )
    ),
    "partial_rotary_factor in rope_scaling": Fact(
        config(rope_scaling=LINEAR | {"partial_rotary_factor": 0.5}),
        refused=("config.json", "partial_rotary_factor"),
    ),
    "partial_rotary_factor in two places": Fact(
        config(partial_rotary_factor=0.5, rope_parameters=DEFAULT | {"partial_rotary_factor": 1.0})
    ),
    "no theta": Fact(config(rope_theta=None)),
    # windows
    "a window in a family without": Fact(config(sliding_window=4, use_sliding_window=True)),
    "layers of a window in a family without": Fact(
        config(sliding_window=4, layer_types=["sliding_attention"] * 2)
    ),
    # tokens
    "tokens in added_tokens_decoder alone": Fact(
        settings(added_tokens_decoder=added(THINK, 36) | added(SLASH_THINK, 37))
    ),
    "tokens in added_tokens.json alone": Fact(
        {"added_tokens.json": {"<think>": 36, "</think>": 37}}
    ),
    "tokens in both": Fact(
        settings(added_tokens_decoder=added(THINK, 36)) | {"added_tokens.json": {"<|tool|>": 37}}
    ),
    "tokens in additional_special_tokens": Fact(settings(additional_special_tokens=["<|tool|>"])),
    "tokens in extra_special_tokens": Fact(settings(extra_special_tokens=["<|tool|>", "<think>"])),
    "named extra_special_tokens": Fact(settings(extra_special_tokens={"tool_token": "<|tool|>"})),
    "a token with a name of its own": Fact(settings(tool_token="<|tool|>")),
    "an end token of no vocabulary": Fact(settings(eos_token="<|tool|>")),
    "a special token that is a word": Fact(settings(pad_token="x")),
    "a token with other flags": Fact(
        settings(
            added_tokens_decoder=added(
                {"content": "<|end|>", "special": True, "normalized": False, "lstrip": True}, 34
            )
        )
    ),
    "no longer special": Fact(
        settings(
            added_tokens_decoder=added(
                {"content": "<|end|>", "special": False, "normalized": False}, 34
            )
        )
    ),
    "an added token that is special by its name": Fact(
        settings(bos_token="<think>", added_tokens_decoder=added(THINK, 36))
    ),
    "the map's null of a token with a name of its own": Fact(
        settings(tool_token="<think>")
        | {"special_tokens_map.json": {"tool_token": None, "bos_token": None}}
    ),
    "an id that another token has": Fact(
        settings(added_tokens_decoder=added(THINK, 34)), refused=TOKEN_FILES
    ),
    "an id beyond the next": Fact(
        settings(added_tokens_decoder=added(THINK, 40)), refused=TOKEN_FILES
    ),
    "an added token of another id": Fact(
        {"added_tokens.json": {"<|end|>": 40}}, refused=("added_tokens.json", "tokenizer.json")
    ),
    "the map of special tokens": Fact(
        {"special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": "<pad>"}}
    ),
    "the map of special tokens beside a decoder": Fact(
        settings(added_tokens_decoder=added(THINK, 36))
        | {"special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": "<pad>"}}
    ),
    "the map's null": Fact({"special_tokens_map.json": {"eos_token": None}}),
    "the map's lists": Fact(
        {"special_tokens_map.json": {"additional_special_tokens": ["<|tool|>"]}}
    ),
    "split_special_tokens": Fact(settings(split_special_tokens=True)),
    "add_bos_token": Fact(settings(add_bos_token=True, add_eos_token=True)),
    "padding and truncation": Fact(settings(model_max_length=2, padding_side="left")),
    # templates
    "a template in two places": Fact(
        settings(chat_template="config") | {"chat_template.jinja": "file"}
    ),
    "templates by name, and a file": Fact(
        settings(chat_template=NAMED) | {"chat_template.jinja": "file"}
    ),
    "templates by name": Fact(settings(chat_template=NAMED)),
    "a template for tools in a file of its own": Fact(
        {"chat_template.jinja": "file", TOOL_TEMPLATE: "{{ tools[0].function.name }}"}
    ),
    "a template for tools alone": Fact(
        settings(chat_template=NAMED[:1]) | {TOOL_TEMPLATE: "tools"}, refused=("'default'",)
    ),
    "special tokens of a template": Fact(
        settings(tool_token="<|tool|>", sep_token="|")
        | {"chat_template.jinja": "{{ bos_token }}{{ tool_token }}{{ sep_token }}{{ pad_token }}"}
    ),
}


def draw_weights() -> dict[str, np.ndarray]:
    """Every weight of the model, of numpy's own generator."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, WIDTH),
        "lm_head": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HEADS * HEAD, WIDTH),
            f"{at}.self_attn.k_proj": (KEYS * HEAD, WIDTH),
            f"{at}.self_attn.v_proj": (KEYS * HEAD, WIDTH),
            f"{at}.self_attn.o_proj": (WIDTH, HEADS * HEAD),
            f"{at}.mlp.gate_proj": (FFN, WIDTH),
            f"{at}.mlp.up_proj": (FFN, WIDTH),
            f"{at}.mlp.down_proj": (WIDTH, FFN),
            f"{at}.input_layernorm": (WIDTH,),
            f"{at}.post_attention_layernorm": (WIDTH,),
        }
    shapes["model.norm"] = (WIDTH,)
    return {
        f"{name}.weight": (0.4 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def change_weights(change: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights after a change of a fact's."""
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    if change == "head is embed":
        return tensors | {head: tensors[embed]}
    left_out = {"no head": head, "no embed": embed}.get(change)
    return {name: one for name, one in tensors.items() if name != left_out}


def write_folder(folder: Path, fact: Fact) -> Path:
    """Write a model's folder and apply a fact to it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = draw_weights()
    save_file(change_weights(fact.weights, tensors), folder / "model.safetensors", {"format": "pt"})
    if "shards" in fact.weights:
        stale = {name: -one for name, one in tensors.items()}
        save_file(stale, folder / SHARDS[0], {"format": "pt"})
    if fact.weights == "two shards":
        (folder / "model.safetensors").rename(folder / SHARDS[1])
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(LETTERS)}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    whole: dict[str, dict[str, Any]] = {"config.json": CONFIG, "tokenizer_config.json": SETTINGS}
    for name in whole.keys() | fact.files.keys():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        change = fact.files.get(name, {})
        if change in ("stale", "two"):
            names = dict.fromkeys(tensors, SHARDS[0])
            names |= {"model.norm.weight": SHARDS[1]} if change == "two" else {}
            change = {"metadata": {}, "weight_map": names}
        if isinstance(change, str):
            file.write_text(change)
        else:
            content = whole.get(name, {}) | change
            kept = {k: v for k, v in content.items() if v is not None or name not in whole}
            file.write_text(json.dumps(kept))
    return folder
