"""Every kind of bad input: one sentence that helps, an exit code, nothing lost, nothing begun too
early.
"""

from __future__ import annotations

import os
import re
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
from bad_input_cases import CASES, CHECKS, GO_ON, WORK, Case, Place, full_disk
from places import ROOT
from tiny_run import lines

from rlhf_jax import iteration
from rlhf_jax.data import rendering
from rlhf_jax.models import weight_table
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source
from rlhf_jax.runtime.checkpoint import store
from rlhf_jax.runtime.checkpoint.folder import steps
from rlhf_jax.setup.models import critic_of

PROGRAMS = {
    name: runpy.run_path(str(ROOT / "launch" / f"{name}.py"), run_name="launch")["main"]
    for name in ("train", "export", "report")
}
SMALL = {"steps": 1, "evaluation__every": 0, "checkpoint__every": 1, "checkpoint__keep": 9}
REWARDS = """
import os, time
def vowels(prompt, response, row): return sum(c in "aeiou" for c in response)
def raises(prompt, response, row): raise KeyError("the answer")
def hangs(prompt, response, row): time.sleep(60)
def no_number(prompt, response, row): return float("nan")
def text(prompt, response, row): return "good"
def dies(prompt, response, row): os._exit(3)
def kind(response):
    return ("raises", "hangs", "no_number", "dies", "", "")[sum(map(ord, response)) % 6]
def sometimes(prompt, response, row):
    return globals()[kind(response) or "vowels"](prompt, response, row)
value = 3
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What cases share: models, prompts, rewards, and the workdir of a run of one step."""
    home = tmp_path_factory.mktemp("home")
    tiny_run.make_files(home)
    (home / "rewards.py").write_text(REWARDS)
    source = open_source(tiny_run.make_model(home / "tiny"))
    tiny_run.make_model(home / "larger", vocab_size=384)
    classifier = critic_of(source.load(np.float32))
    huggingface.save(
        home / "classifier", classifier, source.tokenizer, source.stop_tokens, np.float32
    )
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        assert PROGRAMS["train"](command(Place(home, home), {"workdir": home / "finished"})) == 0
    return home


def use_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of the virtual devices."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def place(home, tmp_path, monkeypatch) -> Iterator[Place]:
    use_one_device(monkeypatch)
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    place = Place(home, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield place
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if place.run.is_mount():
        subprocess.run(["umount", str(place.run)], check=True)


@pytest.fixture
def loads(monkeypatch) -> list:
    """One entry for each model whose weights were read."""
    seen = []
    real = weight_table.assemble
    monkeypatch.setattr(
        weight_table, "assemble", lambda *inputs: seen.append(inputs) or real(*inputs)
    )
    return seen


def command(place: Place, changes: dict[str, Any]) -> list[str]:
    """The command line of a run of one step."""
    changes = SMALL | {"workdir": place.run} | changes
    file = changes.pop("config_file", place.home / "config.py")
    program, option, _, *rest = tiny_run.arguments(place.home, place.home / "tiny", **changes)
    return [program, *([option, str(file)] if file else []), *rest]


def prepared(case: Case, place: Place) -> list[str]:
    """The command line of a case, its mistake made."""
    changes = case.changes | case.prepare(place)
    return command(place, changes) if case.program == "train" else [case.program, str(place.run)]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
        if "__pycache__" not in p.parts  # Python's own, of a reward that it imported
    }


def check_sentence(said: str, words: str) -> None:
    """One sentence with the words; warnings of the project may stand before it."""
    told = [line for line in said.splitlines() if not line.startswith("warning: ")]
    assert len(told) == 1 and told[0].startswith("error: ") and words in told[0], said
    assert told[0].endswith((".", "?")) and not re.search(r"[.!?] [A-Z]", told[0]), (
        f"no one sentence: {told[0]}"
    )


def check_nothing_lost(before: dict[str, bytes | None], after: dict[str, bytes | None]) -> None:
    """What a run has learnt and said is still there, wherever it was moved and whatever was
    added.
    """
    kept = [content for content in after.values() if content is not None]
    for name, content in before.items():
        if content is not None and (
            "checkpoints/" in name or name.endswith((".jsonl", ".safetensors"))
        ):
            assert any(other.startswith(content) for other in kept), name


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(name, place, loads, capsys):
    case = CASES[name]
    arguments = prepared(case, place)
    before = snapshot(place.folder)
    assert PROGRAMS[case.program](arguments) in (1, 2)
    check_sentence(capsys.readouterr().err, case.words.replace("{place}", str(place.folder)))
    after = snapshot(place.folder)
    check_nothing_lost(before, after)
    assert case.found > CHECKS or after == before, "nothing is written before the checks"
    assert case.found == WORK or not loads, "nothing is loaded before the checks"


def test_a_disk_that_is_full_is_told_at_the_save_that_failed_and_once(place, capsys, monkeypatch):
    """Not at the next save, five steps later, nor again as the run ends."""
    real = store.Checkpoints.save

    def save_and_wait(self, *inputs):
        real(self, *inputs)
        while self._manager.is_saving_in_progress():
            time.sleep(0.01)

    monkeypatch.setattr(store.Checkpoints, "save", save_and_wait)
    changes = {"steps": 9, "checkpoint__every": 2} | full_disk(200)(place)
    assert PROGRAMS["train"](command(place, changes)) == 2
    said = capsys.readouterr().err
    check_sentence(said, "The checkpoint of step 2 could not be saved in")
    assert said.count("could not be saved") == said.count("No space left on device") == 1
    assert [line["step"] for line in lines(place.run / "metrics.jsonl")] == [0, 1]
    assert steps(place.run / "checkpoints") == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", range(4, 160, 24))
def test_a_disk_that_fills_up_at_any_place_is_one_sentence(kilobytes, place, capsys):
    """Metrics, samples, timelines and what is exported."""
    changes = {"steps": 3, "checkpoint__every": 0} | full_disk(kilobytes)(place)
    before = snapshot(place.folder)
    assert PROGRAMS["train"](command(place, changes)) == 2
    check_sentence(capsys.readouterr().err, " cannot be written (")
    check_nothing_lost(before, snapshot(place.folder))


OF_WORKDIR = [
    name for name in CASES if name.startswith(("checkpoint", "workdir", "rows", "metrics"))
]
SELDOM = (pytest.mark.slow, pytest.mark.long)
DRY = [name for name, case in CASES.items() if case.program == "train" and case.found < WORK]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_WORKDIR else SELDOM[bool(index % 4)])
        for index, name in enumerate(DRY)
        if name != "disk full at the start"  # which only writing tells
    ],
)
def test_a_dry_run_says_what_a_run_would_say_and_writes_nothing(name, place, loads, capsys):
    arguments = [*prepared(CASES[name], place), "--config.dry_run=True"]
    before = snapshot(place.folder)
    assert PROGRAMS["train"](arguments) == 2
    words = CASES[name].words.replace("{place}", str(place.folder))
    check_sentence(capsys.readouterr().err, words)
    assert snapshot(place.folder) == before and not loads


def test_a_dry_run_says_that_it_has_checked_and_where_a_run_would_go_on(place, capsys):
    for step, said in ((0, "a run would begin in"), (1, "a run would resume from step 1 in")):
        if step:
            place.finished()
        before = snapshot(place.folder)
        assert PROGRAMS["train"](command(place, {"steps": 3, "dry_run": True})) == 0
        told = capsys.readouterr()
        last = told.out.splitlines()[-1]
        assert last.startswith("Checked as a run would be: config, models, prompts, rewards, dev")
        assert f"{said} {place.run}, and nothing was written." in last and not told.err
        assert snapshot(place.folder) == before


def test_the_command_fails_as_its_function(home, tmp_path):
    """In a process of its own, which has already loaded a model."""
    case = CASES["weight is NaN"]
    done = run_command(prepared(case, Place(home, tmp_path)))
    assert done.returncode == 2
    check_sentence(done.stderr, case.words)


def run_command(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    words = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments[1:]]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=clean | {"PYTHONPATH": str(ROOT)} | environment,
    )


def test_a_device_that_is_not_there_is_one_sentence(place):
    done = run_command(command(place, {}), JAX_PLATFORMS="rocm")
    assert done.returncode == 2
    check_sentence(done.stderr, "JAX_PLATFORMS")


@pytest.mark.parametrize(
    "kind", [jax.errors.JaxRuntimeError, ValueError], ids=["running", "reading"]
)
def test_a_device_that_fails_is_one_sentence(place, monkeypatch, capsys, kind):
    """A result that is read on the host tells of its failure by a ValueError."""

    def fail(*_):
        raise kind("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.\nAllocations:\n...")

    monkeypatch.setattr(iteration, "step", fail)
    assert PROGRAMS["train"](command(place, {})) == 1
    check_sentence(capsys.readouterr().err, "lower training.microbatch_rows")


def test_a_batch_that_is_not_finite_is_kept(place, capsys):
    """The post-mortem has the batch; the checkpoint before is as it was and goes on with another
    learning rate.
    """
    case = CASES["loss is not finite"]
    assert PROGRAMS["train"](prepared(case, place)) == 2
    batch = np.load(place.run / "post-mortem" / "step-000001.npz")
    assert batch["tokens"].shape[0] == 16 and np.isfinite(batch["columns.advantages"]).all()
    assert len(lines(place.run / "metrics.jsonl")) == 1
    assert PROGRAMS["train"](command(place, GO_ON | {"steps": 2})) == 0, capsys.readouterr().err
    assert [line["step"] for line in lines(place.run / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_a_reward_that_sometimes_fails_stops_nothing(place, capsys):
    """It raises, hangs, gives NaN and ends its process, each for some answers: they are counted."""
    reward = f"{place.home}/rewards.py:sometimes"
    changes = {
        "steps": 2,
        "reward__functions": reward,
        "reward__seconds": 0.2,
        "reward__failed": -7.0,
        "reward__on_failure": "value",
        "reward__max_failed": 0.9,
    }
    # whose samples are not seen here, but whose failures would stop the run
    changes |= {"evaluation__every": 1}
    assert PROGRAMS["train"](command(place, changes)) == 0, capsys.readouterr().err
    kind = runpy.run_path(str(place.home / "rewards.py"))["kind"]
    samples = [
        (row["step"], kind(row["response"]), row["reward"])
        for row in lines(place.run / "samples.jsonl")
    ]
    assert {why for _, why, _ in samples} == {"", "raises", "hangs", "no_number", "dies"}
    assert all((reward == -7) == bool(why) for _, why, reward in samples)
    for line in lines(place.run / "metrics.jsonl"):
        assert line["reward/sometimes/failed"] == sum(
            bool(why) for step, why, _ in samples if step == line["step"]
        )
