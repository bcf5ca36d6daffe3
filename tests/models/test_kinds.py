"""Every field of a model's JSON files that is read: a value of another kind is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folders
import pytest
from folders import Fact

from rlhf_jax.models.files.source import open_source

TEXT, OBJECT, LIST, WHOLE, NUMBER, FLAG, NULL = range(7)
VALUES: dict[int, list[Any]] = {
    TEXT: ["a", ""],
    OBJECT: [{"x": 1}, {"content": 1}],
    LIST: [[1], [{"a": 1}], [[]]],
    WHOLE: [7, 0, -7],
    NUMBER: [0.5, -0.5],
    FLAG: [True, False],
    NULL: [None],
}
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "tool")
# Of each file the kinds that the format has for a field; null is a field that is not there.
SETTINGS: dict[str, tuple[int, ...]] = {f"{name}_token": (TEXT, NULL) for name in SPECIAL} | {
    "add_bos_token": (FLAG, NULL),
    "add_eos_token": (FLAG, NULL),
    "added_tokens_decoder": (NULL,),
    "additional_special_tokens": (NULL,),
    "extra_special_tokens": (NULL,),
    "chat_template": (TEXT, NULL),
    "clean_up_tokenization_spaces": (FLAG, NULL),
    "model_max_length": (WHOLE, NUMBER, NULL),
    "padding_side": (TEXT, NULL),
    "split_special_tokens": (FLAG, NULL),
    "tokenizer_class": (TEXT, NULL),
}
MAP: dict[str, tuple[int, ...]] = {f"{name}_token": (TEXT, NULL) for name in SPECIAL}
CONFIG: dict[str, tuple[int, ...]] = {
    "architectures": (NULL,),
    "attention_bias": (FLAG, NULL),
    "bos_token_id": (WHOLE, NULL),
    "eos_token_id": (WHOLE, LIST, NULL),
    "head_dim": (WHOLE, NULL),
    "hidden_act": (NULL,),
    "hidden_size": (WHOLE,),
    "id2label": (OBJECT, NULL),
    "intermediate_size": (WHOLE,),
    "layer_types": (NULL,),
    "max_position_embeddings": (WHOLE,),
    "mlp_bias": (FLAG, NULL),
    "num_attention_heads": (WHOLE,),
    "num_hidden_layers": (WHOLE,),
    "num_key_value_heads": (WHOLE, NULL),
    "num_labels": (WHOLE, NULL),
    "pad_token_id": (WHOLE, NULL),
    "partial_rotary_factor": (WHOLE, NUMBER, NULL),
    "rms_norm_eps": (WHOLE, NUMBER),
    "rope_parameters": (OBJECT, NULL),
    "rope_scaling": (OBJECT, NULL),
    "rope_theta": (WHOLE, NUMBER),
    "sliding_window": (WHOLE, NULL),
    "tie_word_embeddings": (FLAG, NULL),
    "use_sliding_window": (FLAG, NULL),
    "vocab_size": (WHOLE,),
}
GENERATION = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
FILES: dict[str, dict[str, tuple[int, ...]]] = {
    "tokenizer_config.json": SETTINGS,
    "special_tokens_map.json": MAP,
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "added_tokens.json": {"<think>": (WHOLE,)},
}
CASES = [(name, key) for name, keys in FILES.items() for key in keys]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("whole") / "model", Fact())


@pytest.mark.parametrize(("name", "key"), CASES)
def test_a_value_of_another_kind_is_a_sentence_with_file_and_field(name: str, key: str, whole):
    file = whole / name
    before = file.read_text() if file.exists() else None
    content = json.loads(before or "{}")
    wrong = [
        value for kind, values in VALUES.items() if kind not in FILES[name][key] for value in values
    ]
    try:
        for value in wrong:
            file.write_text(json.dumps(content | {key: value}))
            with pytest.raises(ValueError) as caught:
                print(name, key, value, open_source(whole))
            said = str(caught.value)
            assert name in said and "\n" not in said, (value, said)
    finally:
        file.unlink() if before is None else file.write_text(before)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [{"x\ud800": 1}, {"x": ["\udfff"]}, {"x": {"y": "a\ud800b"}}])
def test_half_a_character_in_a_file_is_a_sentence(name: str, content: dict, tmp_path: Path):
    fact = Fact({name: content})
    with pytest.raises(ValueError, match=f"{name} has half a character"):
        open_source(folders.write_folder(tmp_path / "model", fact))
