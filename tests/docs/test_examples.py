"""The examples of the documents run as they stand, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

# The one of an algorithm is a command that wants a config: test_examples_algorithm.py runs it.
EXAMPLES = [ROOT / "docs" / "examples" / f"{name}.py" for name in ("new_drafter", "new_estimator")]


def said_by(example: Path) -> str:
    """What an example prints, in a process of its own: what it registers stays there."""
    run = subprocess.run(
        [sys.executable, str(example)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def a_new_drafter_writes_the_plain_text(said: str) -> None:
    lines = re.findall(r"^(\S+): (\d+) rounds, (.+)$", said, re.MULTILINE)
    (_, plain_rounds, plain), (name, rounds, text) = lines
    assert name == "toy-chain-2" and text == plain
    assert int(rounds) < int(plain_rounds)


# What an example's output must show, by its file's name, beside that it runs.
SHOWN = {"new_drafter": a_new_drafter_writes_the_plain_text}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example):
    said = said_by(example)
    SHOWN.get(example.stem, bool)(said)
