"""Folders whose sources disagree are read as transformers 5 reads them, or refused with both named;
exported, they are the same again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folders
import jax.numpy as jnp
import numpy as np
import pytest
from folder_readings import TOLERANCE, read
from places import GOLDEN

from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source

THEIRS = json.loads((GOLDEN / "folders.json").read_text(encoding="utf-8"))


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    rest = {key: value for key, value in actual.items() if key != "logits"}
    assert rest == {key: value for key, value in expected.items() if key != "logits"}
    np.testing.assert_allclose(actual["logits"], expected["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", folders.FACTS)
def test_folders_of_disagreeing_sources_are_read_as_by_transformers(name: str, tmp_path: Path):
    fact = folders.FACTS[name]
    folder = folders.write_folder(tmp_path / "model", fact)
    if fact.refused:
        with pytest.raises(ValueError) as caught:
            open_source(folder)
        assert all(source in str(caught.value) for source in fact.refused), caught.value
        return
    source = open_source(folder)
    assert_same(read(source), THEIRS[name])
    model = source.load(jnp.float32)
    parts = (source.tokenizer, source.stop_tokens, jnp.float32, source.repeated)
    huggingface.save(tmp_path / "saved", model, *parts)
    saved = open_source(tmp_path / "saved")
    assert_same(read(saved), THEIRS[name])
    assert saved.stop_tokens == source.stop_tokens


def test_the_facts_make_a_difference():
    """Of most facts transformers makes something else than of the folder without one."""
    assert set(THEIRS) == {name for name, fact in folders.FACTS.items() if not fact.refused}
    alike = [name for name, found in THEIRS.items() if found == THEIRS["nothing"]]
    assert len(alike) < len(THEIRS) / 2
