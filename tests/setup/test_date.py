"""A chat template that prints the date: a run that goes on tomorrow is the run it was."""

from __future__ import annotations

import datetime
import functools
import json
import runpy
import types
from pathlib import Path

import jax
import pytest
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax import iteration
from rlhf_jax.config import default
from rlhf_jax.models.files.source import open_source
from rlhf_jax.setup import run_spec
from rlhf_jax.setup.run_spec import _open_dated

DATED = "Today: {{ strftime_now('%d %b %Y %X') }} " + tiny_run.TEMPLATE
YESTERDAY = datetime.date(2026, 3, 1)
TODAY = YESTERDAY + datetime.timedelta(days=1)
STEPS = {"steps": 2, "checkpoint__every": 1, "evaluation__every": 0, "data__max_prompt_tokens": 64}
launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command line of a run of a model whose template prints the date, on one device."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(DATED)
    return functools.partial(tiny_run.arguments, tmp_path, model, **STEPS)


@pytest.fixture
def clock(monkeypatch):
    """Say which day it is."""

    def show(day: datetime.date) -> None:
        read = datetime.date.fromisoformat
        shown = types.SimpleNamespace(today=lambda: day, fromisoformat=read)
        monkeypatch.setattr(run_spec, "datetime", types.SimpleNamespace(date=shown))

    return show


def saved_date(workdir: Path) -> str:
    """The day that the latest checkpoint has."""
    last = max(int(one.name) for one in (workdir / "checkpoints").iterdir() if one.name.isdigit())
    (document,) = (workdir / "checkpoints" / str(last)).rglob("document.json")
    return json.loads(document.read_text())["identity"]["data.date"]


@pytest.mark.slow
def test_a_run_that_goes_on_tomorrow_has_the_prompts_of_its_first_day(
    command, clock, tmp_path, monkeypatch, capsys
):
    clock(YESTERDAY)
    assert launch["main"](command(workdir=tmp_path / "whole")) == 0, capsys.readouterr().err

    score = iteration.score
    seen = []

    def failing(*inputs):
        seen.append(inputs)
        if len(seen) == 2:
            raise ValueError("the machine was needed.")
        return score(*inputs)

    monkeypatch.setattr(iteration, "score", failing)
    assert launch["main"](command()) == 2
    clock(TODAY)
    assert launch["main"](command()) == 0, capsys.readouterr().err
    assert "Resuming from step 1" in capsys.readouterr().out
    found = [lines(tmp_path / name / "samples.jsonl") for name in ("whole", "run")]
    assert found[0] == found[1] and len(found[0]) == 32
    assert saved_date(tmp_path / "run") == saved_date(tmp_path / "whole") == "2026-03-01"

    assert launch["main"](command(workdir=tmp_path / "other", steps=1)) == 0
    assert saved_date(tmp_path / "other") == "2026-03-02"
    assert lines(tmp_path / "other" / "samples.jsonl") != found[0][:16], "it does print the date"


@pytest.mark.slow
def test_the_date_may_be_given(command, clock, tmp_path, capsys):
    clock(YESTERDAY)
    assert launch["main"](command(steps=1, data__date="2024-02-29")) == 0
    assert saved_date(tmp_path / "run") == "2024-02-29"
    clock(TODAY)
    assert launch["main"](command(data__date="2026-03-02")) == 2
    assert "was made with data.date = '2024-02-29'" in capsys.readouterr().err
    assert launch["main"](command()) == 0, "it need not be given again"
    assert saved_date(tmp_path / "run") == "2024-02-29"


@pytest.mark.slow
def test_damage_of_the_latest_checkpoint_leaves_the_day_of_the_one_before(
    command, clock, tmp_path, capsys
):
    clock(YESTERDAY)
    assert launch["main"](command()) == 0
    for document in (tmp_path / "run" / "checkpoints" / "2").rglob("document.json"):
        document.write_text(document.read_text().replace("2026-03-01", "2026-03-09"))
    clock(TODAY)
    assert launch["main"](command(steps=3)) == 0, capsys.readouterr().err
    assert saved_date(tmp_path / "run") == "2026-03-01"


@pytest.mark.parametrize("day", ["tomorrow", "2026-02-30", "20260301", "2026-3-1", "2026-W09-7"])
def test_a_day_that_is_none_is_one_sentence(command, day, capsys):
    assert launch["main"](command(data__date=day)) == 2
    assert f"data.date is '{day}'; it must be a day as 2024-01-31" in capsys.readouterr().err


def test_reward_models_are_told_the_same_day(tmp_path):
    model = tiny_run.make_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    config = default()
    config.data.date = "2024-02-29"
    chat = [{"role": "user", "content": "Hi"}]
    assert _open_dated(str(model), config).tokenizer.render(chat) == "2024-02-29 00:00"
    assert open_source(model).tokenizer.day == datetime.date.today()
