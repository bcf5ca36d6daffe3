"""Read special and added tokens of a Hugging Face folder, with the precedence of its files.

The order is that of `TokenizersBackend` in transformers 5, which reads tokenizer.json first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from rlhf_jax.runtime.foreign import check_kinds, read_json, reading_foreign

# The keys under which a tokenizer's files name its special tokens.
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The required types of keys, where present; a special token is a text or an object.
SETTING_KINDS: dict[str, tuple[type, ...]] = {
    "add_bos_token": (bool,),
    "add_eos_token": (bool,),
    "add_prefix_space": (bool,),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list, dict),
    "chat_template": (str, list),
    "clean_up_tokenization_spaces": (bool,),
    "extra_special_tokens": (list, dict),
    "model_max_length": (int, float),
    "padding_side": (str,),
    "split_special_tokens": (bool,),
    "tokenizer_class": (str,),
    "truncation_side": (str,),
}
# The fields that an object may have for a token, besides its content.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and special_tokens_map.json where it counts.

    The keys of the latter come first unless the tokens are in `added_tokens_decoder`; a model's own
    key does not. ValueError in one sentence.
    """
    settings = _read_optional(folder / "tokenizer_config.json")
    mapped = _read_optional(folder / "special_tokens_map.json")
    if "added_tokens_decoder" in settings:
        return settings
    first = {key: mapped[key] for key in mapped if key in SPECIAL_TOKENS or not _is_token(key)}
    return mapped | settings | first


def add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Add tokens that only other files name to a tokenizer; return the special tokens by key.

    Raises ValueError if a file gives a token another id than tokenizer.json.
    """
    file, declared = _read_ids(folder, settings)
    named, extra = _special_tokens(settings, folder / "tokenizer_config.json")
    with reading_foreign(folder / "tokenizer.json", "a tokenizer"):
        added = backend.get_added_tokens_decoder().values()
        # A token is special if any source marks it so.
        special = {token.content for token in (*added, *named.values()) if token.special}
        for token in declared.values():
            token.special |= token.content in special
        same = {repr(token) for token in added}
        new = [token for _, token in sorted(declared.items()) if repr(token) not in same]
        backend.add_tokens(new)
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([one for one in (*named.values(), *extra) if one.content not in known])
    for index, token in declared.items():
        given = backend.token_to_id(token.content)
        if given != index:
            raise ValueError(
                f"{file} gives {token.content!r:.60} the id {index}, by"
                f" {folder / 'tokenizer.json'} it has {given}; correct one of the two."
            )
    return {key: token.content for key, token in named.items()}


def _read_ids(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[Path, dict[int, tokenizers.AddedToken]]:
    """Return the file that names tokens by id, and the ids; prefer the newer of two files."""
    if "added_tokens_decoder" in settings:
        file = folder / "tokenizer_config.json"
        named = settings["added_tokens_decoder"] or {}
        return file, {_id(key, file): _token(token, key, file) for key, token in named.items()}
    file = folder / "added_tokens.json"
    content = read_json(file) if file.exists() else {}
    named, extra = _special_tokens(settings, folder / "tokenizer_config.json")
    special = {token.content for token in (*named.values(), *extra)}
    return file, {
        _id(index, file): tokenizers.AddedToken(
            text, normalized=text not in special, special=text in special
        )
        for text, index in content.items()
    }


def _special_tokens(
    settings: Mapping[str, Any], file: Path
) -> tuple[dict[str, tokenizers.AddedToken], list[tokenizers.AddedToken]]:
    """Return the special tokens that have a key, by key, and those that have none."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    keyed = {key: settings[key] for key in settings if _is_token(key)}
    if isinstance(extra, dict):
        keyed |= extra
        extra = []
    order = [*SPECIAL_TOKENS, *(key for key in keyed if key not in SPECIAL_TOKENS)]
    # An empty text means no token.
    named = {
        key: _token(keyed[key], key, file) for key in order if keyed.get(key) not in (None, "")
    }
    return named, [_token(token, "extra_special_tokens", file) for token in extra]


def _is_token(key: str) -> bool:
    return key.endswith("_token") and key not in SETTING_KINDS


def _token(value: Any, key: str, file: Path) -> tokenizers.AddedToken:
    """Make a token from a text (special) or an object; ValueError for anything else."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, dict) else None
    flags = {flag: value[flag] for flag in FLAGS if flag in value} if content else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(
            f"{file}: {key} is {value!r:.60}; it must be a text, or an object with one as its"
            " content."
        )
    return tokenizers.AddedToken(content, **{"special": True, **flags})


def _id(value: Any, file: Path) -> int:
    """Return a token's id; keys of JSON are texts."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is not int or number < 0:
        raise ValueError(f"{file}: {value!r:.60} is no id of a token; it must be a whole number.")
    return number


def _read_optional(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.exists() else {}
    check_kinds(content, SETTING_KINDS, file)
    _special_tokens(content, file)  # for its errors, which name this file
    return content
