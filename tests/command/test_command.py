"""The console command: what each word prints, and how a config is found."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
import tiny_run
from places import ROOT

from rlhf_jax import command
from rlhf_jax.command import config as config_command
from rlhf_jax.command import export
from rlhf_jax.config import command_line, default, schema


def test_every_command_has_help(capsys):
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in command.COMMANDS:
        assert f"  {name} " in listed
        try:
            assert command.main([name, "--help"]) == 0
        except SystemExit as ended:
            assert ended.code == 0
        assert f"rlhf-jax {name}" in capsys.readouterr().out


def test_help_is_there_within_a_second():
    started = time.monotonic()
    asked = [sys.executable, "-m", "rlhf_jax.command", "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "train" in done.stdout and time.monotonic() - started < 1


def test_a_wrong_word_is_named(capsys):
    assert command.main(["tarin"]) == 2
    assert "there is no command 'tarin'; did you mean 'train'?" in capsys.readouterr().err


def test_version_names_what_a_bug_report_needs(capsys):
    assert command.main(["version"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{said}" for name in ("rlhf_jax", "jax", "python", "devices:"))


def test_every_key_is_printed_with_its_default_and_comment(capsys):
    found = config_command.keys()
    assert [key.name for key in found] == list(schema.flat(default()))
    assert all(key.comment for key in found), [key.name for key in found if not key.comment]
    assert command.main(["config", "kl.c*"]) == 0
    assert "kl.coefficient = 0.04  (float)\n    penalty per nat" in capsys.readouterr().out
    assert command.main(["config", "learning_rate"]) == 0
    keys = re.findall(r"^(\S+) = ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(keys) == [f"{of}.learning_rate" for of in ("critic", "drafter", "training")]
    with pytest.raises(SystemExit):
        command.main(["config", "learnin_rate"])
    assert "near it are" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "grpo_llama31_8b:gpu"])
def test_a_config_of_the_package_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.read(["train", name, "--config.steps=3"]).steps == 3


def test_a_name_that_is_none_lists_those_that_are():
    with pytest.raises(FileNotFoundError, match=r"no config file quikstart .*quickstart_ppo"):
        command_line.load("quikstart")


def test_a_run_needs_no_config():
    words = ["--model", "folder", "--prompts=a.jsonl", "--reward", "r.py:f", "--config.steps=2"]
    config = command_line.read(["train", *words])
    assert (config.model.path, config.data.train, config.steps) == ("folder", "a.jsonl", 2)
    assert config.reward.functions == ("r.py:f",)
    with pytest.raises(ValueError, match="No config is named: begin with rlhf-jax train quick"):
        command_line.read(["train", "--config.steps=2"])
    with pytest.raises(ValueError, match="--reward needs a value"):
        command_line.read(["train", "--model", "folder", "--reward"])


def test_files_beside_the_config_are_found_from_anywhere(tmp_path, monkeypatch):
    tiny_run.make_files(tmp_path)
    (tmp_path / "config.py").write_text(
        "from rlhf_jax.config import default\n"
        "def get_config():\n"
        "    config = default()\n"
        "    config.data.train = 'prompts.jsonl'\n"
        "    config.reward.functions = ('reward.py:vowels', 'other.py:f')\n"
        "    config.reward.metrics = {'v': 'reward.py:vowels'}\n"
        "    config.algorithm.loss = 'reward.py:vowels'\n"
        "    config.sinks = ('reward.py:vowels', 'wandb')\n"
        "    return config\n"
    )
    config = command_line.load(str(tmp_path / "config.py"))
    assert config.data.train == str(tmp_path / "prompts.jsonl")
    assert config.reward.functions == (f"{tmp_path}/reward.py:vowels", "other.py:f")
    assert config.reward.metrics.v == f"{tmp_path}/reward.py:vowels" == config.algorithm.loss
    assert config.sinks == (f"{tmp_path}/reward.py:vowels", "wandb")
    monkeypatch.chdir(tmp_path)
    assert command_line.load("config.py").data.train == "prompts.jsonl"


@pytest.mark.parametrize("config", [None, "{}", '{"model": 1}', "{"])
def test_export_refuses_in_one_sentence(tmp_path, capsys, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert command.main(["export", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "config.json" in said and said.count("\n") == 1


def test_export_finds_the_model_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"path": "org/name"}, "steps": 3}')
    assert export.configured(tmp_path, "model", "path") == "org/name"
