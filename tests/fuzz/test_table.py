"""A table of malformed files by kind: each is one sentence, or what the format's own reader has.

A row names a file and what it holds instead of what it should.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator

import damage
import pytest

Change = Callable[[bytes], bytes]

CONFIG_KEYS = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "id2label",
    "eos_token_id",
    "pad_token_id",
)
SETTINGS_KEYS = ("bos_token", "eos_token", "pad_token", "chat_template", "tokenizer_class")
ROW_KEYS = ("prompt", "answer")
SPEC_KEYS = ("dtype", "shape", "data_offsets")
JSON_FILES = (
    "config",
    "settings",
    "generation",
    "tokenizer",
    "index",
    "jsonl",
    "document",
    "kept",
    "leaves",
)
LEAF = ("tree_metadata", "('weights',)")
BINARY_FILES = (
    "safetensors",
    "gguf",
    "parquet",
    "message",
    "document",
    "tokenizer",
    "arrays",
    "manifest",
)
NAMES_OF_FILES = (
    "../model.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "",
    ".",
    "..",
    "nowhere",
)
ROWS = {
    "no prompt": {"question": "a"},
    "no messages": {"prompt": []},
    "a message without a role": {"prompt": [{"content": "a"}]},
    "a message without content": {"prompt": [{"role": "user"}]},
    "content that is a list": {"prompt": [{"role": "user", "content": [1]}]},
    "a role that no template knows": {"prompt": [{"role": "king", "content": "a"}]},
    "an answer at the end": {"prompt": [{"role": "assistant", "content": "a"}]},
    "a surrogate": {"prompt": "\ud800"},
    "a surrogate in a message": {"prompt": [{"role": "user", "content": "a\udfff"}]},
    "a surrogate in another column": {"prompt": "a", "answer": "\ud800"},
    "a surrogate in a name": {"prompt": "a", "\ud800": 1},
    "NUL": {"prompt": "a\0b"},
    "NUL in a message": {"prompt": [{"role": "user", "content": "\0"}]},
    "a million characters": {"prompt": "a" * 1_000_000},
    "beyond 64 bits": {"prompt": "a", "answer": 1 << 70},
}
OFFSETS = {"negative": [-8, 0], "backwards": [8, 0], "beyond": [0, 1 << 40], "three": [0, 1, 2]}
TEMPLATES = {
    "no end": "{% for m in messages %}",
    "an unknown name": "{{ nowhere.of.all }}",
    "a division": "{{ 1 / 0 }}",
    "a missing index": "{{ messages[7]['content'] }}",
    "a sum of kinds": "{{ 1 + 'a' }}",
    "a power": "{{ 10.0 ** 400 }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an attribute": "{{ messages.__class__.__mro__ }}",
    "an exception": "{{ raise_exception('no') }}",
    "a filter that is none": "{{ messages|nothing }}",
    "no UTF-8": b"\xff\xfe\xfa",
    "a loop without end": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a number without end": "{{ 10 ** (10 ** 10) }}",
    "gigabytes": "{{ 'a' * 10 ** 10 }}",
    "gigabytes in pieces": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "gigabytes in a variable": "{% set a = namespace(b='a' * 99999) %}{% for i in range(99999) %}"
    "{% set a.b = a.b + a.b %}{% endfor %}",
    "a number in tojson": "{{ messages|tojson(indent='a') }}",
}


def with_value(path: tuple, value: object) -> Change:
    def change(original: bytes) -> bytes:
        return damage.as_json(damage.changed(json.loads(original), path, value))

    return change


def with_spec(key: str, value: object) -> Change:
    """Another value in the header of the first tensor."""

    def change(original: bytes) -> bytes:
        header = damage.header_of(original)
        first = next(name for name in header if name != "__metadata__")
        return damage.with_header(
            original, damage.as_json(damage.changed(header, (first, key), value))
        )

    return change


def with_header(header: bytes) -> Change:
    return lambda original: damage.with_header(original, header)


def without_key(key: str) -> Change:
    def change(original: bytes) -> bytes:
        content = json.loads(original)
        content.pop(key, None)
        return damage.as_json(content)

    return change


def overlapping(original: bytes) -> bytes:
    """Two tensors with the bytes of the second."""
    header = damage.header_of(original)
    names = [name for name in header if name != "__metadata__"]
    same = [name for name in names if header[name]["shape"] == header[names[0]]["shape"]]
    header[same[0]] = header[same[-1]]
    return damage.with_header(original, damage.as_json(header))


def with_bytes(place: int, own: bytes) -> Change:
    return lambda original: original[:place] + own + original[place + len(own) :]


def instead(content: bytes) -> Change:
    return lambda original: content


def cases_of_json() -> Iterator[tuple[str, str, Change]]:
    """(file, what is wrong, change) of values that do not belong, and of what is no JSON."""
    for what, value in damage.WEIRD.items():
        for key in CONFIG_KEYS:
            yield "config", f"{key} {what}", with_value((key,), value)
        for key in SETTINGS_KEYS:
            yield "settings", f"{key} {what}", with_value((key,), value)
        for key in SPEC_KEYS:
            yield "safetensors", f"{key} {what}", with_spec(key, value)
        for key in ROW_KEYS:
            yield "jsonl", f"{key} {what}", instead(damage.as_json({"prompt": "a", key: value}))
        yield "generation", f"eos {what}", with_value(("eos_token_id",), value)
        yield "index", f"weight_map {what}", with_value(("weight_map",), value)
        yield "index", f"a file {what}", with_value(("weight_map", "lm_head.weight"), value)
        yield "document", f"host {what}", with_value(("host",), value)
        yield "leaves", f"arrays {what}", with_value(("tree_metadata",), value)
        yield "leaves", f"name {what}", with_value((*LEAF, "key_metadata", 0, "key"), value)
        yield "safetensors", f"header {what}", with_header(damage.as_json(value))
    for key in CONFIG_KEYS:
        yield "config", f"{key} missing", without_key(key)
    for name in JSON_FILES:
        for what, content in damage.NO_JSON.items():
            yield name, what, instead(content)
    for place in NAMES_OF_FILES:
        yield "index", f"{place!r}", with_value(("weight_map", "lm_head.weight"), place)
    for what, row in ROWS.items():
        yield "jsonl", f"a row with {what}", instead(damage.as_json(row))
    for what, text in TEMPLATES.items():
        yield "template", what, instead(text if isinstance(text, bytes) else text.encode())


def cases_of_bytes() -> Iterator[tuple[str, str, Change]]:
    """(file, what is wrong, change) of offsets, lengths and parts."""
    for what, offsets in OFFSETS.items():
        yield "safetensors", f"offsets {what}", with_spec("data_offsets", offsets)
    yield "safetensors", "overlapping", overlapping
    for length in damage.INTEGERS:
        head = length.to_bytes(8, "little")
        yield "safetensors", f"{length} bytes of header", with_bytes(0, head)
        for place, what in ((8, "tensors"), (16, "keys"), (24, "bytes of the first key")):
            yield "gguf", f"{length} {what}", with_bytes(place, head)
    for version in (0, 1, 4, 1 << 31):
        yield "gguf", f"version {version}", with_bytes(4, struct.pack("<I", version))
    for name in BINARY_FILES:
        for part in (0, 1, 7, 8, 9, 64):
            yield name, f"{part} bytes", lambda original, part=part: original[:part]
        yield name, "the second half", lambda original: original[len(original) // 2 :]
        yield name, "its content again", lambda original: original + original


TABLE = [*cases_of_json(), *cases_of_bytes()]


def test_the_table_has_at_least_400_kinds_of_damage():
    assert len({(name, what) for name, what, _ in TABLE}) == len(TABLE) >= 400


@pytest.mark.parametrize("name", sorted({name for name, _, _ in TABLE}))
def test_every_malformed_file_ends_in_a_sentence_or_as_its_format_says(name, whole, judge):
    original = whole[name].read_bytes()
    found = {what: judge(name, change(original)) for one, what, change in TABLE if one == name}
    wrong = {what: said for what, said in found.items() if said}
    assert not wrong, "\n".join(f"{what}: {said}" for what, said in wrong.items())


@pytest.mark.parametrize(
    "name", ["safetensors", "config", "tokenizer", "template", "gguf", "jsonl", "parquet", "index"]
)
def test_a_pipe_in_place_of_a_file_is_a_sentence(name, place, process):
    file = place(name)
    file.unlink()
    os.mkfifo(file)
    assert process.outcome(name, file) == ""
