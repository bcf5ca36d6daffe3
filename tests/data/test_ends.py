"""What ends a text: the union of all that a model's sources name, in the run and in its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folders
import jax
import jax.numpy as jnp
import pytest
import tiny_run
import tokenizers
from folders import Fact

from rlhf_jax.command import train
from rlhf_jax.command.export import export
from rlhf_jax.generation.requests import StopStrings
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source

EOS, END, PAD = 33, 34, 35  # </s>, <|end|>, <pad>
CHATML = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|end|>\n{% endfor %}"
PROMPTED = "{% if add_generation_prompt %}<s>assistant {% endif %}"
TEMPLATES = {  # template: the token that ends a turn
    CHATML + PROMPTED: END,
    CHATML.replace("<|end|>", "{{ eos_token }}") + PROMPTED: EOS,
    CHATML.replace("}}<|end|>", " | trim }} <|end|>") + PROMPTED: END,
    CHATML.replace("<|end|>\n", "<|end|>{{ eos_token }}"): END,
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": None,
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n</s>{% endfor %}": EOS,
    "{% for m in messages %}{{ m.content }}{% endfor %}": None,
    "{{ messages[0].content }}<|end|>": None,
    "{{ raise_exception('no') }}": None,
    "{{ messages | tojson }}": None,
}
# (generation_config.json, config.json, the tokenizer's eos_token, the template's): warned of
NAMES: list[tuple[Any, Any, str | None, bool, bool]] = [
    (EOS, EOS, "</s>", False, False),
    (EOS, END, None, False, True),
    (EOS, None, "<|end|>", False, True),
    (EOS, None, None, True, True),
    (None, EOS, "<|end|>", False, True),
    (None, EOS, None, True, True),
    (None, None, "</s>", True, True),
    ([EOS, END], EOS, "<|end|>", True, False),
    ([END, EOS, PAD], [EOS], "</s>", False, False),
    ([], [EOS], None, False, False),
    (None, None, "<|end|>", True, False),
    (None, None, None, True, False),
    (None, None, None, False, True),
    ([], None, None, False, True),
    (PAD, EOS, "<|end|>", True, True),
]


def folder_of(place: Path, generation: Any, config: Any, eos: str | None, templated: bool) -> Path:
    files: dict[str, Any] = {
        "config.json": {"eos_token_id": config},
        "tokenizer_config.json": {"eos_token": eos},
    }
    if generation is not None:
        files["generation_config.json"] = {"eos_token_id": generation, "temperature": 0.7}
    if templated:
        files["chat_template.jinja"] = CHATML
    return folders.write_folder(place, Fact(files))


def ids_of(value: int | list[int] | None) -> set[int]:
    return set(value if isinstance(value, list) else [] if value is None else [value])


@pytest.mark.parametrize(("generation", "config", "eos", "templated", "warned"), NAMES)
def test_every_source_ends_a_text_here_and_in_the_export(
    generation, config, eos, templated, warned, tmp_path
):
    source = open_source(folder_of(tmp_path / "model", generation, config, eos, templated))
    spelled = {"</s>": {EOS}, "<|end|>": {END}, None: set()}
    expected = ids_of(generation) | ids_of(config) | spelled[eos] | ({END} if templated else set())
    assert set(source.stop_tokens) == expected
    assert len(source.stop_tokens) == len(expected)
    said = source.ends.warning(source.path, has_stop_strings=False)
    assert bool(said) == warned and "\n" not in said
    told = "disagree" if expected else "no token that ends a text"
    assert not warned or (told in said and str(source.path) in said)
    assert all(f"({token})" in said for token in expected if warned)

    saved = tmp_path / "saved"
    model = source.load(jnp.float32)
    huggingface.save(
        saved, model, source.tokenizer, source.stop_tokens, jnp.float32, source.repeated
    )
    for name in ("generation_config.json", "config.json"):
        written = json.loads((saved / name).read_text())
        assert ids_of(written["eos_token_id"]) == expected
    again = open_source(saved)
    assert again.stop_tokens == source.stop_tokens
    said = again.ends.warning(saved, has_stop_strings=True)
    assert not said, "the export has no disagreement left"


def test_without_an_end_stop_strings_are_enough(tmp_path: Path):
    source = open_source(folder_of(tmp_path / "model", None, None, None, False))
    assert not source.ends.warning(source.path, has_stop_strings=True)


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_names_the_end_of_its_turn(template: str, tmp_path: Path):
    folder = folders.write_folder(tmp_path / "model", Fact({"chat_template.jinja": template}))
    assert open_source(folder).tokenizer.end_of_turn() == TEMPLATES[template]


def test_ids_of_the_config_that_is_read_are_those_that_are_exported(tmp_path: Path):
    """Where nothing is said transformers takes 1 for the first token, and it reads a window."""
    changes = {
        "config.json": {"bos_token_id": 3, "pad_token_id": PAD, "model_type": "mistral"}
        | {"architectures": ["MistralForCausalLM"], "sliding_window": 48}
        | {"max_position_embeddings": 256},
        "generation_config.json": {"bos_token_id": 3, "temperature": 0.7},
    }
    source = open_source(folders.write_folder(tmp_path / "model", Fact(changes)))
    assert source.config.max_context == 48
    model = source.load(jnp.float32)
    parts = (source.tokenizer, source.stop_tokens, jnp.float32, source.repeated)
    huggingface.save(tmp_path / "saved", model, *parts)
    for name, expected in changes.items():
        written = json.loads((tmp_path / "saved" / name).read_text())
        assert {key: written[key] for key in expected} == expected
    assert open_source(tmp_path / "saved").config == source.config


def write_model(folder: Path) -> Path:
    """A tiny model that draws special tokens now and then, whose sources disagree."""
    tiny_run.make_model(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([f"<|{number}|>" for number in range(64)])
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|0|>"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 77}))
    return folder


@pytest.mark.slow
def test_a_run_prints_what_ends_a_text_and_stops_at_special_tokens(tmp_path, monkeypatch, capsys):
    """Of 320 tokens 88 end a response of up to 12; without stop strings 25 do."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    changes = {"steps": 1, "evaluation__every": 0, "checkpoint__every": 1}
    changes |= {"generation__stop_strings": "('<|',)"}
    model = write_model(tmp_path / "model")
    with pytest.warns(UserWarning, match="has sources that disagree on which tokens end a text"):
        assert train.main(tiny_run.arguments(tmp_path, model, **changes)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the tokenizer's eos_token: '<|0|>' (256)" in told
    (metrics,) = tiny_run.lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics["response/unfinished"] < 0.2
    for folder in (tmp_path / "run" / "policy", export(tmp_path / "run", None, tmp_path / "out")):
        assert set(open_source(folder).stop_tokens) == {*tiny_run.STOPS, 256}
        assert json.loads((folder / "config.json").read_text())["bos_token_id"] == 77


@pytest.mark.parametrize(("generation", "config", "eos", "templated", "warned"), NAMES[:6])
def test_exports_end_at_the_same_tokens_in_transformers(
    generation, config, eos, templated, warned, tmp_path
):
    pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = open_source(folder_of(tmp_path / "model", generation, config, eos, templated))
    model = source.load(jnp.float32)
    parts = (source.tokenizer, source.stop_tokens, jnp.float32, source.repeated)
    huggingface.save(tmp_path / "saved", model, *parts)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert set(theirs.generation_config.eos_token_id) == set(source.stop_tokens)
    assert set(theirs.config.eos_token_id) == set(source.stop_tokens)
    before = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert theirs.config.bos_token_id == before.bos_token_id


STRINGS = {  # stop string: how many of the tokens of "a<s>b<|end|> c</s>d" it leaves
    "<s>": 2,
    "a<s>": 2,
    "<s>b": 3,
    "b<|end|> c": 6,
    "<|end|>": 4,
    "<|end|> ": 5,
    "</s>": 7,
    "c</s>d": 8,
    "ab": None,
    "<|en": 4,
}


@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("new", [1, 3, 8])
def test_stop_strings_that_are_or_span_special_tokens_are_found(
    string: str, new: int, tmp_path: Path
):
    tokenizer = open_source(folders.write_folder(tmp_path / "model", Fact())).tokenizer
    tokens = tokenizer.encode("a<s>b<|end|> c</s>d")
    assert len(tokens) == 8
    stops = StopStrings((string,), tokenizer.decode_whole)
    counts = range(new, len(tokens) + 1, 1)
    found = (stops.end(tokens[:count], new) for count in counts)
    assert next((end for end in found if end is not None), None) == STRINGS[string]
