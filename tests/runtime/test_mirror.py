"""A workdir behind a URL: what is there is whole whenever the transfer ends, and no run is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
import tiny_run
from fsspec.implementations.local import LocalFileSystem
from places import ROOT

from rlhf_jax.command import main
from rlhf_jax.runtime import distributed, mirror
from rlhf_jax.runtime.checkpoint.folder import claim, read_run


@pytest.fixture
def url(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "one")
    return f"file://{tmp_path}/bucket/run"


def move_to(monkeypatch, home):
    """Go on on another machine."""
    monkeypatch.setenv("HOME", str(home))


def write_step(folder, step):
    """Leave what a run leaves of a step: a line, and a checkpoint of two files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    place = folder / "checkpoints" / str(step)
    (place / "state").mkdir(parents=True)
    (place / "state" / "weights").write_bytes(bytes([step]) * 100)
    (place / "document.json").write_text(str(step))
    if step > 2:
        shutil.rmtree(folder / "checkpoints" / str(step - 2), ignore_errors=True)


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != mirror.INDEX
    }


def test_another_machine_goes_on_with_what_was_sent(url, tmp_path, monkeypatch):
    with mirror.mirrored(url):
        for step in (1, 2, 3):
            write_step(mirror.folder_of(url), step)
        (mirror.folder_of(url) / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()
        left = content(mirror.folder_of(url))
    assert content(tmp_path / "bucket" / "run") == left
    move_to(monkeypatch, tmp_path / "two")
    with mirror.mirrored(url):
        folder = mirror.folder_of(url)
        assert content(folder) == left and folder.is_relative_to(tmp_path / "two")
        write_step(folder, 4)
        left = content(folder)
    assert content(tmp_path / "bucket" / "run") == left
    assert "checkpoints/2/document.json" not in left, "what a run removes is removed there"


CHANGES = 8  # files of two steps and their lines, an index, and two files that go


@pytest.mark.parametrize("calls", range(CHANGES + 1))
def test_a_machine_lost_in_a_transfer_leaves_the_checkpoint_before(
    url, tmp_path, monkeypatch, calls
):
    with mirror.mirrored(url):
        write_step(mirror.folder_of(url), 1)
    left = [0]

    def failing(name):
        real = getattr(LocalFileSystem, name)

        def call(self, *arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("no network")
            return real(self, *arguments, **options)

        return call

    def lose_the_network():
        with monkeypatch.context() as patch:
            left[0] = 1  # for the claim
            for name in ("put_file", "pipe_file", "rm_file"):
                patch.setattr(LocalFileSystem, name, failing(name))
            with mirror.mirrored(url):
                left[0] = calls
                for step in (2, 3):
                    write_step(mirror.folder_of(url), step)

    if calls < CHANGES:
        with pytest.raises(OSError, match=r"run cannot be written \(no network\); what was done"):
            lose_the_network()
    else:
        lose_the_network()
    own = content(mirror.folder_of(url))

    move_to(monkeypatch, tmp_path / "two")
    found = content(mirror.fetched(url, checkpoints=True))
    steps = {name.split("/")[1] for name in found if name.startswith("checkpoints/")}
    assert steps >= {"1"} if calls < CHANGES - 2 else {"2", "3"}
    for step in map(int, steps):
        assert found[f"checkpoints/{step}/state/weights"] == bytes([step]) * 100
        assert found[f"checkpoints/{step}/document.json"] == str(step).encode()
        assert len(found["metrics.jsonl"].splitlines()) >= step

    move_to(monkeypatch, tmp_path / "one")
    with mirror.mirrored(url):
        assert content(mirror.folder_of(url)) == own, "on the machine itself nothing is lost"
    assert content(tmp_path / "bucket" / "run") == own


def test_of_two_runs_in_one_place_the_first_is_told(url, tmp_path, monkeypatch):
    at_work = "Another run is at work in file://"
    written = "Another run has written to file://"
    with pytest.raises(ValueError, match=written), mirror.mirrored(url):
        with pytest.raises(ValueError, match=at_work), mirror.mirrored(url):
            pass
        write_step(mirror.folder_of(url), 1)
        move_to(monkeypatch, tmp_path / "two")
        with mirror.mirrored(url):
            pass


def test_the_file_that_names_the_run_travels_with_its_checkpoints(url, tmp_path, monkeypatch):
    with mirror.mirrored(url):
        folder = mirror.folder_of(url)
        write_step(folder, 1)
        run = claim(folder / "checkpoints")
    move_to(monkeypatch, tmp_path / "two")
    with mirror.mirrored(url):
        assert read_run(mirror.folder_of(url) / "checkpoints") == run


def test_an_index_that_is_none_is_one_sentence(url, tmp_path):
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / mirror.INDEX).write_text("{oops")
    with pytest.raises(OSError, match=r"file://.*/run cannot be read \("), mirror.mirrored(url):
        pass


def test_what_ends_a_run_is_told_first_and_the_lost_transfer_behind_it(url, monkeypatch):
    with pytest.raises(KeyError, match="the run's own") as caught, mirror.mirrored(url):
        write_step(mirror.folder_of(url), 1)
        monkeypatch.setattr(LocalFileSystem, "put_file", lambda *_: 1 / 0)
        raise KeyError("the run's own")
    (note,) = caught.value.__notes__
    assert "cannot be written (division by zero)" in note and "\n" not in note


def test_transfers_go_on_beside_the_run_and_a_failure_is_told_once(
    url, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "INTERVAL", 0.05)
    sent = tmp_path / "bucket/run/metrics.jsonl"
    with mirror.mirrored(url):
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, "put_file", lambda *_: 1 / 0)
            write_step(mirror.folder_of(url), 1)
            time.sleep(0.5)
        deadline = time.monotonic() + 20
        while not sent.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sent.exists()
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_workdir_that_somebody_copied_there_is_gone_on_with(url, tmp_path):
    write_step(tmp_path / "bucket" / "run", 5)
    with mirror.mirrored(url):
        assert "checkpoints/5/document.json" in content(mirror.folder_of(url))


@pytest.mark.parametrize(
    ("place", "started", "sentence"),
    [
        ("zzz://bucket/run", False, "cannot be opened: Protocol not known: zzz."),
        ("memory://bucket/run", True, "several processes.*mount the bucket"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_sentence(place, started, sentence, monkeypatch):
    monkeypatch.setattr(distributed, "started", lambda: started)
    with pytest.raises(ValueError, match=sentence):
        mirror.require(place)
    mirror.require("runs/here")


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_as_if_it_had_never_moved(url, tmp_path, monkeypatch, capfd):
    tiny_run.make_model(tmp_path / "tiny")
    tiny_run.make_files(tmp_path)

    def run(workdir, steps):
        options = {"workdir": workdir, "steps": steps, "checkpoint__every": 1}
        options["deterministic"] = True
        words = [sys.executable, str(ROOT / "launch" / "train.py")]
        words += tiny_run.arguments(tmp_path, tmp_path / "tiny", **options)[1:]
        environment = tiny_run.environment()
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(tmp_path / "here", 3)
    run(url, 1)
    move_to(monkeypatch, tmp_path / "two")
    assert f"Resuming from step 1, saved in {url}/checkpoints" in run(url, 3)
    for name in ("samples.jsonl", "policy/model.safetensors"):
        own = (tmp_path / "bucket" / "run" / name).read_bytes()
        assert own == (tmp_path / "here" / name).read_bytes(), name
    assert main(["report", url]) == 0
    assert main(["export", url, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["export", url]) == 2
    assert "--out FOLDER" in capfd.readouterr().err
