"""The comparison of runs: what tells them apart is named, also where only their own code does."""

from __future__ import annotations

import json
import re

import browser
import pytest
import tiny_run
from pages import HOSTILE, Page, evaluation, lines, row

from rlhf_jax import command
from rlhf_jax.config import default
from rlhf_jax.config.identity import own_code


def leave(folder, code=None, **config):
    """Leave the files of a run in a folder, and return its path."""
    folder.mkdir(parents=True)
    about = {} if code is None else {"code": code}
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"steps": 30, "workdir": str(folder)} | config))
    steps = [row(step) | {"reward/mean": 0.0 if step < 29 else 1.0} for step in range(30)]
    (folder / "metrics.jsonl").write_text(lines(steps))
    held_out = [evaluation(0, 0.25, HOSTILE), evaluation(30, 0.75, HOSTILE)]
    (folder / "evaluations.jsonl").write_text(lines(held_out))
    return str(folder)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (("a", "b"), ["a", "b"]),
        (("a/runs/it", "b/runs/it"), ["a/runs/it", "b/runs/it"]),
        (("a/it", "b/it", "b/that"), ["a/it", "b/it", "that"]),
        (("a/it", "a/../a/it"), ["it", "it"]),
    ],
)
def test_runs_are_named_by_the_fewest_parts_that_tell_them_apart(
    places, names, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for place in places:
        if not (tmp_path / place).exists():
            leave(tmp_path / place)
    assert command.main(["compare", *places]) == 0
    headings = next(one for one in capsys.readouterr().out.splitlines() if "last figures" in one)
    assert headings.split()[2:] == names
    seen = Page((tmp_path / "comparison.html").read_text())
    assert seen.titles[0] == f"{', '.join(names)} · rlhf_jax"


ONE = {"reward.py:f": "0123456789abcdef"}
OTHER = {"/home/me/reward.py:f": "fedcba9876543210"}


@pytest.mark.parametrize(
    ("codes", "changes", "said"),
    [
        (({}, {}), {}, "Their configs are the same."),
        ((ONE, ONE), {}, "Their configs are the same, and so is the code of their own files."),
        ((ONE, None), {}, "the code of their own files is not on record, and may differ."),
        ((ONE, OTHER), {}, "code of reward.py: 01234567 | fedcba98"),
        ((ONE, ONE), {"seed": 2, "plan": ""}, "seed: — | 2"),
    ],
)
def test_what_differs_is_listed(codes, changes, said, tmp_path, capsys):
    """What of the config changes nothing, as where a run lies, is no difference."""
    runs = [leave(tmp_path / "a", codes[0]), leave(tmp_path / "b", codes[1], **changes)]
    page = tmp_path / "page.html"
    for replaced in (False, True):
        assert command.main(["compare", *runs, "--out", str(page)]) == 0
        told = capsys.readouterr().out
        assert any(line.endswith(said) for line in told.splitlines())
        assert ("in place of the file that was there" in told) == replaced
    seen = Page(page.read_text()).text
    together = seen.replace(" ", "")  # a name may be broken after each of its parts
    assert all(part in together for part in said.replace(" ", "").replace(":", "|").split("|"))
    assert "workdir" not in seen and "smoothed" in seen and "smoothed" in told


def test_a_run_knows_its_own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_run.make_files(tmp_path)
    config = default()
    config.reward.functions = ("reward.py:vowels", "format")
    config.reward.metrics = {"own": "reward.py:vowels"}
    before = own_code(config)
    assert list(before) == ["reward.py:vowels"]
    (tmp_path / "reward.py").write_text("def vowels(**_):\n    return 0.0\n")
    assert own_code(config) != before


@pytest.mark.slow
def test_two_runs_may_differ_in_their_own_code_alone(tmp_path, one_device, capsys):
    tiny_run.make_model(tmp_path / "tiny")
    tiny_run.make_files(tmp_path)
    runs = [str(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        changes = {"workdir": run, "steps": 1, "evaluation__every": 0}
        _, *words = tiny_run.arguments(tmp_path, tmp_path / "tiny", **changes)
        assert command.main(["train", *words]) == 0
        with (tmp_path / "reward.py").open("a") as file:
            file.write("# A remark.\n")
    capsys.readouterr()
    assert command.main(["compare", *runs, "--out", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    assert re.match(r"code of reward\.py: \w{8} \| \w{8}\n\n", told), told


@pytest.mark.slow
def test_a_comparison_fits_a_phone(tmp_path):
    runs = [
        leave(tmp_path / place / "runs/default", ONE, generation={"max_new_tokens": number})
        for number, place in enumerate(("trained_for_long", "trained_again"))
    ]
    page = tmp_path / "page.html"
    assert command.main(["compare", *runs, "--out", str(page)]) == 0
    # Tables that are too wide shall widen the page, rather than scroll within it.
    page.write_text(page.read_text().replace("overflow-x: auto", ""))
    for width in (1240, 390):
        assert browser.width_needed(page, tmp_path / "profile", width) <= width
