"""Sinks hear of each step once, whatever happens to the run; one that fails ends nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import subprocess
import sys
import time

import pytest
import tiny_run
from places import ROOT

from rlhf_jax.config import default
from rlhf_jax.monitoring import metrics
from rlhf_jax.monitoring.sending import Sender
from rlhf_jax.monitoring.sinks import SINKS, TrackedRun
from rlhf_jax.setup.validation import validate

OWN = """
import json

class Lines:
    def __init__(self, run):
        self.path = run.workdir / f"{type(self).__name__}.jsonl"
        self.id = run.id

    def write(self, step, numbers):
        with self.path.open("a") as file:
            file.write(json.dumps({"id": self.id, "step": step, **numbers}) + "\\n")

    def close(self):
        pass

class Texts(Lines):
    def write_samples(self, step, name, samples):
        self.write(step, {"name": name, "responses": [sample["response"] for sample in samples]})

class Breaks(Lines):
    def write(self, step, numbers):
        if step == 1:
            raise OSError("the server is gone")
        super().write(step, numbers)

class Nothing:
    pass
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def heard(folder, name="Lines"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def sender(own, name, written=()):
    said = []
    return Sender([f"{own}:{name}"], own.parent, {"seed": 1}, written, said.append), said


def test_samples_are_sent_to_sinks_that_show_them(own):
    """Some of each step's and each evaluation's, also of those that a killed run had written."""
    rows = [{"step": 0, "prompt": "p", "response": f"r{i}", "reward": 1.0} for i in range(12)]
    before = [{"step": 0, "a": 1, "samples": rows[:1]}, *rows]
    sending, said = sender(own, "Texts", before)
    sending.add(1, {"a": 2}, samples=rows[:2])
    sending.send(before=2)
    sending.close()
    told = [(row["step"], row["name"], row["responses"]) for row in heard(own.parent, "Texts")
            if "name" in row]  # fmt: skip
    assert (
        told
        == [
            (0, metrics.SAMPLES, ["r0", "r2", "r4", "r6", "r8", "r10"]),
            (0, metrics.HELD_OUT, ["r0"]),
            (1, metrics.SAMPLES, ["r0", "r1"]),
        ]
        and not said
    )


def test_a_step_is_sent_once_its_checkpoint_is_on_disk(own):
    sending, said = sender(own, "Lines")
    for step in range(4):
        sending.add(step, {"step": step, "reward/mean": step / 2})
        sending.add(step, {"eval/reward": 1.0})
    sending.send(before=2)
    sending.close()
    assert [row["step"] for row in heard(own.parent)] == [0, 1] and not said
    assert heard(own.parent)[1] == {
        **heard(own.parent)[0],
        "step": 1,
        "reward/mean": 0.5,
        "eval/reward": 1.0,
    }
    # Another process goes on from step 2, and takes step 2 and 3 again.
    again, said = sender(own, "Lines", [{"step": 0, "a": 1}, {"step": 1, "samples": [], "a": 1}])
    for step in (2, 3):
        again.add(step, {"reward/mean": 7.0})
    again.send(math.inf)
    again.close()
    found = heard(own.parent)
    assert [row["step"] for row in found] == [0, 1, 2, 3] and found[2]["reward/mean"] == 7.0
    assert len({row["id"] for row in found}) == 1, "one run"


def test_a_sink_that_fails_is_named_once_and_hears_the_rest_in_the_next_run(own):
    sending, said = sender(own, "Breaks")
    for step in range(4):
        sending.add(step, {"x": step})
        sending.send(math.inf)
    sending.close()
    assert len(said) == 1 and "own.py:Breaks failed (OSError: the server is gone)" in said[0]
    assert [row["step"] for row in heard(own.parent, "Breaks")] == [0]
    own.write_text(OWN.replace("step == 1", "step == 99"))
    del SINKS[f"{own}:Breaks"]
    again, said = sender(own, "Breaks", [{"step": step, "x": step} for step in range(4)])
    again.send(math.inf)
    again.close()
    assert [row["step"] for row in heard(own.parent, "Breaks")] == [0, 1, 2, 3] and not said


def test_a_damaged_record_drops_the_sink_and_ends_nothing(own):
    (own.parent / "sinks").mkdir()
    (own.parent / "sinks" / "Lines.json").write_text('{"id": ')
    sending, said = sender(own, "Lines")
    sending.add(0, {"x": 1.0})
    sending.send(math.inf)
    sending.close()
    assert len(said) == 1 and "Lines failed (JSONDecodeError" in said[0]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "wand",
            "sinks is 'wand'; it must be one of wandb, mlflow, trackio, absent, or FILE.py:NAME",
        ),
        ("{own}:Nothing", "is no sink: it has no write"),
        ("{own}:Lines {own}:Lines", "The sinks are called Lines, Lines; rename one"),
        ("absent", "sinks names 'absent': pip install 'rlhf_jax[absent]'"),
    ],
)
def test_what_is_no_sink_is_one_sentence(own, name, sentence, monkeypatch, tmp_path):
    class Absent:
        write = close = None

    Absent.__module__ = "rlhf_jax.monitoring.sinks"
    monkeypatch.setitem(SINKS, "absent", Absent)
    config = default()
    config.workdir = str(tmp_path)
    config.sinks = tuple(one.format(own=own) for one in name.split())
    with pytest.raises(ValueError, match=re.escape(sentence)):
        validate(config, 1)


def surroundings(folder):
    """Environment variables under which all trackers write into a folder."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }


def of_run(words, folder, killed_at=None):
    start = ["launch/train.py"] if killed_at is None else ["tests/support/killed.py", *killed_at]
    environment = tiny_run.environment(**surroundings(folder))
    command = [sys.executable, *start, *words[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_run_that_was_killed_is_one_run_in_every_sink(own, tmp_path, monkeypatch):
    """It has the numbers of metrics.jsonl, as each tracker's own library reads them."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    names = [name for name in READERS if importlib.util.find_spec(name) is not None]
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    sinks = (f"{own}:Lines", f"{own}:Breaks", *names)
    changes = {"steps": 5, "checkpoint__every": 2, "evaluation__every": 2, "sinks": repr(sinks)}
    words = tiny_run.arguments(tmp_path, model, **changes)
    killed = of_run(words, tmp_path, killed_at=("sent", "2", "0"))
    assert killed.returncode == -9, killed.stderr
    run = tmp_path / "run"
    assert [row["step"] for row in heard(run)] == [0, 1], "its checkpoint was on disk"
    done = of_run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("Breaks failed (OSError")
        == 1
        == done.stdout.count("and gets no more of this run")
    )
    wanted = {row["step"]: row["reward/mean"] for row in metrics.read_rows(run, "metrics")}
    assert list(wanted) == [0, 1, 2, 3, 4]
    assert [row["step"] for row in heard(run)] == [0, 1, 2, 3, 4, 5], "5: the last evaluation"
    found = {row["step"]: row["reward/mean"] for row in heard(run) if "reward/mean" in row}
    assert found == wanted
    for name in names:
        assert dict(READERS[name](tmp_path)) == pytest.approx(wanted), name


# Names that a reward may give its numbers: what trackers refuse, keep for themselves or cut.
HARD = (
    *("pass@1", "accuracy (%)", "a", "a/b", "a/b/failed", "_x0040_", "_x004", "__x0041_", "%", "/"),
    *(
        "a//b",
        "../a",
        "a/../b",
        "./a",
        "a/",
        " a ",
        "a\nb",
        "\0",
        "日本",
        "é" * 300,
        "x" * 400,
        "😀",
    ),
    *("a.b", "a:b", "step", "_step", "A"),
)
LONG = ("é" * 300, "x" * 400)


def read_again(name):
    """The name that was escaped."""
    return re.sub("_x([0-9A-F]{8}|[0-9A-F]{4})_", lambda found: chr(int(found[1], 16)), name)


@pytest.fixture
def trackers(tmp_path, monkeypatch):
    """A folder in which all trackers write."""
    for name, value in surroundings(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run" / "sinks").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_every_name_reaches_every_tracker_and_can_be_read_again(name, trackers):
    pytest.importorskip(name)
    wanted = {f"reward/f/{one}": float(index) for index, one in enumerate(HARD)}
    wanted |= {"reward/mean": 0.5, "eval/reward": 0.25, "eval/reward/failed": 1.0}
    wanted |= {f"many/{index}": 0.0 for index in range(1000)}
    wanted |= dict.fromkeys(("_step", "_timestamp", "__y", "step", "time", "project"), 7.0)
    sink = SINKS[name](TrackedRun("names", trackers / "run", {"seed": 1}))
    sink.write(0, wanted)
    sink.close()
    own = {"wandb": ("_step", "_timestamp", "_runtime"), "trackio": ("step", "timestamp")}
    found = {key: value for key, value in NUMBERS[name](trackers) if key not in own.get(name, ())}
    whole = {read_again(key): value for key, value in found.items()}
    cut = dict.fromkeys(f"reward/f/{one}" for one in LONG if name == "mlflow")
    assert len(found) == len(wanted)
    assert {key: whole.get(key) for key in wanted if key not in cut} == {
        key: value for key, value in wanted.items() if key not in cut
    }
    assert all(len(key.encode()) == 250 for key in found if read_again(key) not in wanted)


def rows_of_wandb(folder):
    """Step and numbers of each row of all offline folders; the later ones hold."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore

    files = sorted((folder / "run" / "sinks" / "wandb").glob("offline-run-*/run-*.wandb"))
    # W&B writes behind: a process that is killed may leave no file, and the next writes all anew.
    assert 1 <= len(files) <= 2 and len({path.name for path in files}) == 1
    for path in files:
        for data in records(path.read_bytes()):
            history = wandb_internal_pb2.Record.FromString(data).history  # pyright: ignore
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in history.item}
            yield history.step.num, {key: json.loads(text) for key, text in items.items()}


def numbers_of_wandb(folder, patience=20.0):
    """The numbers of the only step; its process writes them after the run has finished."""
    deadline = time.monotonic() + patience
    found = {}
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
        found = max((row for _, row in rows_of_wandb(folder)), key=len, default={})
    return found


def of_wandb(folder):
    """Steps and rewards of the only run."""
    rows = rows_of_wandb(folder)
    return [(step, row["reward/mean"]) for step, row in rows if "reward/mean" in row]


def records(data):
    """The records of W&B's log: blocks of 32 KiB with whole, first, middle, last chunks."""
    block = 32768
    place = 7  # after the file's own mark
    parts = b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def run_of_mlflow(folder):
    """The client, and the only run."""
    import mlflow

    client = mlflow.MlflowClient(f"file:{folder / 'mlruns'}")
    experiment = client.get_experiment_by_name("rlhf_jax")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return client, run


def of_mlflow(folder):
    """Steps and rewards of the only run."""
    client, run = run_of_mlflow(folder)
    assert run.data.params["steps"] == "5"
    found = client.get_metric_history(run.info.run_id, "reward/mean")
    assert len(found) == 5
    return [(one.step, one.value) for one in found]


def rows_of_trackio():
    """Rows of the only run."""
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("rlhf_jax")
    return SQLiteStorage.get_logs("rlhf_jax", name)


def of_trackio(folder):
    """Steps and rewards of the only run."""
    rows = rows_of_trackio()
    found = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert len(found) == 5
    return found


# All numbers of the only step, by the names that the tracker has for them.
NUMBERS = {
    "wandb": lambda folder: numbers_of_wandb(folder).items(),
    "mlflow": lambda folder: run_of_mlflow(folder)[1].data.metrics.items(),
    "trackio": lambda folder: rows_of_trackio()[-1].items(),
}
READERS = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}
