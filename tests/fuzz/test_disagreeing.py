"""Folders whose sources disagree: a sentence, or what transformers makes of them, and of what is
exported again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import folders
import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from disagreeing import folders_apart
from folder_readings import TOLERANCE, read

from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import Source, open_source


def settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=True
    )


def opened(folder: Path, fact: folders.Fact) -> Source | None:
    """The model of a folder, or None where that is a sentence which names one of its files."""
    shutil.rmtree(folder, ignore_errors=True)
    folders.write_folder(folder, fact)
    try:
        return open_source(folder)
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error), error
        return None


def contents(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text()) if (folder / name).exists() else {}


def declared(folder: Path) -> dict[str, int]:
    """The ids of tokens by the file that counts, read plainly."""
    decoder = contents(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if decoder is None:
        return contents(folder, "added_tokens.json")
    return {token["content"]: int(index) for index, token in decoder.items()}


def named_ends(folder: Path) -> set[int]:
    """The ids that files of a folder name as ends, and the template's."""
    found = set()
    for name in ("generation_config.json", "config.json"):
        ids = contents(folder, name).get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return found | ({34} if (folder / "chat_template.jinja").exists() else set())


def check_tokens_and_ends(folder: Path, source: Source) -> None:
    tokenizer = source.tokenizer
    for token, index in declared(folder).items():
        assert tokenizer.encode(token) == [index]
    for token in tokenizer.special.values():
        assert len(tokenizer.encode(token)) == 1
    eos = tokenizer.special.get("eos_token")
    ends = named_ends(folder) | set(tokenizer.encode(eos) if eos else [])
    assert set(source.stop_tokens) == ends


def check_export(place: Path, source: Source) -> None:
    model = source.load(jnp.float32)
    parts = (source.tokenizer, source.stop_tokens, jnp.float32, source.repeated)
    huggingface.save(place, model, *parts)
    again = open_source(place)
    assert again.config == source.config and again.stop_tokens == source.stop_tokens
    assert not again.ends.warning(place, has_stop_strings=True)
    for text in folders.TEXTS:
        ids = source.tokenizer.encode(text)
        assert again.tokenizer.encode(text) == ids
        assert again.tokenizer.decode(ids) == source.tokenizer.decode(ids)
    before = contents(source.path, "config.json")
    kept = {key: before[key] for key in ("bos_token_id", "pad_token_id") if key in before}
    assert kept.items() <= contents(place, "config.json").items()


def try_some(examples: int) -> None:
    read_ones = 0
    with tempfile.TemporaryDirectory() as place:

        @settings(examples)
        @hypothesis.given(folders_apart())
        def try_one(fact: folders.Fact) -> None:
            nonlocal read_ones
            folder = Path(place, "model")
            source = opened(folder, fact)
            if source is not None:
                read_ones += 1
                check_tokens_and_ends(folder, source)
                check_export(Path(place, "saved"), source)

        try_one()
    assert read_ones > examples / 4


def test_folders_apart_are_refused_or_each_source_counts():
    try_some(15)


@pytest.mark.slow
def test_more_folders_apart_are_refused_or_each_source_counts():
    try_some(300)


@pytest.mark.slow
def test_folders_apart_are_read_as_by_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert torch
    from golden.make import read_by_transformers

    with tempfile.TemporaryDirectory() as place:

        @settings(200)
        @hypothesis.given(folders_apart())
        def try_one(fact: folders.Fact) -> None:
            folder = Path(place, "model")
            source = opened(folder, fact)
            if source is None:
                return
            expected = read_by_transformers(folder)
            actual = read(source)
            logits = actual.pop("logits")
            np.testing.assert_allclose(logits, expected.pop("logits"), atol=TOLERANCE, rtol=0)
            assert actual == expected

        try_one()
