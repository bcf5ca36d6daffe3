"""The command that talks with a model: its answers, what it says meanwhile, and what it refuses."""

from __future__ import annotations

import pytest
import tiny_run

from rlhf_jax.command import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0"], "--tokens is 0; an answer needs 1 or more."),
        ([], "holds neither policy/, as a run's workdir does once the run has ended, nor"),
    ],
)
def test_what_cannot_answer_is_one_sentence(words, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")  # as a run has from its start
    assert main(["chat", str(tmp_path), "--say", "a", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    shown = capsys.readouterr().out
    assert "\n    rlhf-jax chat runs/quickstart" in shown
    assert [shown.count(f"(default: {value})") for value in ("0.0", "256", "0")] == [1, 1, 1]


@pytest.mark.slow
def test_a_policy_answers_each_message_and_the_conversation_grows(tmp_path, capsys):
    tiny_run.make_model(tmp_path / "policy")
    words = ["chat", str(tmp_path), "--tokens", "4"]
    answers = []
    for says in (["Say a"], ["Say a", "Say b"]):
        assert main([*words, *(word for said in says for word in ("--say", said))]) == 0
        told = capsys.readouterr()
        assert told.err.splitlines() == ["loading the model ...", "compiling the first answer ..."]
        answers.append(told.out)
    first, both = answers
    assert both.startswith(first) and len(both) > len(first)
    assert main([*words, "--say", "a" * 200]) == 2
    assert "there is room for 128; begin a new one." in capsys.readouterr().err
