"""A run is extended from one file outside the package, named in its config; nothing is patched."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest
import tiny_run
from places import ROOT

from rlhf_jax.config import default
from rlhf_jax.generation import drafting
from rlhf_jax.generation.speculative import protocol
from rlhf_jax.models import weight_table
from rlhf_jax.runtime.extensions import Registry, is_of_file
from rlhf_jax.setup.run_spec import register_own

OWN = """
import dataclasses
import jax.numpy as jnp
import rlhf_jax
from rlhf_jax.generation.speculative.drafters.search import Found, SearchDrafter
from rlhf_jax.generation.strategy.acceptance import RANKS


def from_the_best(rewards, samples_per_prompt):
    groups = rewards.reshape(-1, samples_per_prompt)
    return (groups - groups.max(axis=1, keepdims=True)).reshape(-1)


ESTIMATOR = rlhf_jax.Estimator(
    "from_the_best", rlhf_jax.of_samples(from_the_best), compares_group=True
)


def loss(terms):
    return -terms.ratios * terms.advantages


class Repeats(SearchDrafter):
    name = "repeats"

    def search(self, state, siblings, depth):
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        tokens = jnp.full((len(last), depth, RANKS), -1).at[:, :, 0].set(last)
        return Found(tokens, confidence=jnp.ones(len(last), jnp.int8))


DOUBLED = dataclasses.replace(rlhf_jax.GRPO, title="my own algorithm")
"""
WRONG = """
import rlhf_jax


def mean(terms):
    return -(terms.ratios * terms.advantages).mean()


def misspelt(terms):
    return -terms.ratio * terms.advantages


OF_SAMPLES = rlhf_jax.Estimator("sums", lambda rewards, *_: (rewards.sum(axis=1), None))
"""
SCORES = """
import asyncio
import json


def one(prompt, response, row):
    return float("a" in response), {"letters": len(response)}


def group(prompt, responses, row):
    return [len(response) / 100 for response in responses]


def batch(completions, prompts, **columns):
    return [len(text) / 100 for text in completions]


async def later(prompt, response, row):
    await asyncio.sleep(0.001)
    return float("e" in response)


class Lines:
    def __init__(self, run):
        self.file = (run.workdir / "lines.jsonl").open("a")

    def write(self, step, numbers):
        self.file.write(json.dumps({"step": step, **numbers}) + "\\n")
        self.file.flush()

    def close(self):
        self.file.close()
"""
launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")
NAMES = {"algorithm.estimator": "ESTIMATOR", "algorithm.loss": "loss", "algorithm.name": "DOUBLED"}


def command(folder, **changes):
    """The command line of a run that takes all of its own file."""
    model = folder / "tiny"
    if not model.exists():
        tiny_run.make_files(folder)
        tiny_run.make_model(model)
        (folder / "own.py").write_text(OWN)
        (folder / "scores.py").write_text(SCORES)
    own = {key.replace(".", "__"): f"{folder}/own.py:{name}" for key, name in NAMES.items()}
    own["generation__drafters"] = f"('{folder}/own.py:Repeats',)"
    scores = tuple(f"{folder}/scores.py:{name}" for name in ("one", "group", "batch", "later"))
    own |= {"reward__functions": repr(scores), "sinks": f"('{folder}/scores.py:Lines',)"}
    words = tiny_run.arguments(folder, model, evaluation__every=0, **(own | changes))
    return [sys.executable, str(ROOT / "launch" / "train.py"), *words[1:]]


def run(words):
    return subprocess.run(words, capture_output=True, text=True, env=tiny_run.environment())


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A folder for commands, with a file of mistakes."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "wrong.py").write_text(WRONG)
    return folder


@pytest.fixture
def restored(monkeypatch):
    """A drafter that a test registers is unknown again after it."""
    monkeypatch.setattr(protocol, "DRAFTERS", dict(protocol.DRAFTERS))
    monkeypatch.setattr(drafting, "DRAFTERS", protocol.DRAFTERS)


@pytest.mark.slow
def test_all_come_from_one_short_file(tmp_path):
    for source in (OWN, SCORES):
        assert len(source.splitlines()) < 40 and "._" not in source
    done = run(command(tmp_path, generation__strategy="repeats-chain-2"))
    assert done.returncode == 0, done.stderr
    assert "my own algorithm" in (tmp_path / "run" / "report.html").read_text()
    heard = tiny_run.lines(tmp_path / "run" / "lines.jsonl")
    assert [row["step"] for row in heard] == [0, 1, 2]
    assert heard[0]["reward/one/letters"] > 0 == heard[0]["reward/later/failed"]
    assert heard[0]["reward/group/mean"] == pytest.approx(heard[0]["reward/batch/mean"])
    plain = run(command(tmp_path, workdir=tmp_path / "plain", generation__strategy="plain"))
    assert plain.returncode == 0, plain.stderr
    texts = [tiny_run.lines(tmp_path / name / "samples.jsonl") for name in ("run", "plain")]
    assert texts[0] == texts[1], "drafts change no text"


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_file_or_is_allowed_another(tmp_path):
    words = command(tmp_path, steps=40, checkpoint__every=1)
    environment = tiny_run.environment()
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as killed:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "run" / "metrics.jsonl"
        while time.monotonic() < deadline and (
            not metrics.exists() or len(metrics.read_text().splitlines()) < 3
        ):
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    shorter = command(tmp_path, steps=6, checkpoint__every=1)
    own = tmp_path / "own.py"
    own.write_text(OWN + "\n# changed\n")
    refused = run(shorter)
    assert refused.returncode == 2 and "own.py:ESTIMATOR" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    assert "checkpoint.allow_changes=True" in refused.stderr
    done = run([*shorter, "--config.checkpoint.allow_changes=True"])
    assert done.returncode == 0, done.stderr
    assert "Resuming from step" in done.stdout
    heard = tiny_run.lines(tmp_path / "run" / "lines.jsonl")
    assert [row["step"] for row in heard] == list(range(len(heard)))


@pytest.mark.long
def test_a_drafter_is_chosen_where_it_pays(tmp_path):
    """At a low temperature a small model repeats itself: this drafter foresees it, and so does
    look-up, once there is something to look up.
    """
    words = command(
        tmp_path,
        steps=4,
        generation__strategy="adaptive",
        generation__temperature=0.01,
        generation__max_new_tokens=40,
        deterministic=True,  # priced by what rounds compute, not by a clock that others share
    )
    done = run(words)
    assert done.returncode == 0, done.stderr
    rows = tiny_run.lines(tmp_path / "run" / "strategies.jsonl")
    rounds = {name: 0 for name in {row["drafter"] for row in rows}}
    for row in rows:
        rounds[row["drafter"]] += row["rounds"] * (row["step"] >= 2)
    assert rounds["repeats"] > 2 * rounds["none"], rounds


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("algorithm__estimator", "{own}:loss", "is no rlhf_jax.Estimator"),
        ("algorithm__estimator", "{own}:nothing", "defines no 'nothing'"),
        ("algorithm__estimator", "medain", "must be one of gae, grpo"),
        ("algorithm__loss", "{folder}/none.py:loss", "there is no file"),
        ("algorithm__loss", "pppo", "must be one of ppo"),
        ("algorithm__loss", "{wrong}:mean", "wrong.py:mean' gives float32[] for arrays of [4, 6]"),
        ("algorithm__loss", "{wrong}:misspelt", "fails: 'LossTerms' object has no attribute"),
        ("algorithm__estimator", "{wrong}:OF_SAMPLES", "gives float32[4] for arrays of [4, 6]"),
        ("algorithm__name", "{own}:loss", "is no rlhf_jax.Algorithm"),
        ("generation__drafters", "('{folder}/none.py:f',)", "there is no file"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_weights_are_read(
    wrong, key, value, sentence, restored, one_device, capsys, monkeypatch
):
    words = command(wrong)
    monkeypatch.setattr(weight_table, "assemble", lambda *_: pytest.fail("weights are read"))
    given = value.format(own=wrong / "own.py", wrong=wrong / "wrong.py", folder=wrong)
    words.append(f"--config.{key.replace('__', '.')}={given}")
    assert launch["main"](words[1:]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_drafter_of_a_file_is_registered_once_however_many_runs_name_it(tmp_path, restored):
    (tmp_path / "own.py").write_text(OWN)
    config = default()
    config.generation.drafters = (f"{tmp_path}/own.py:Repeats",)
    register_own(config)
    first = protocol.DRAFTERS["repeats"]
    register_own(config)
    again = protocol.DRAFTERS["repeats"]
    assert again == first and hash(again) == hash(first), "no program is compiled anew"
    (tmp_path / "own.py").write_text(OWN + "# another class of the same name\n")
    with pytest.raises(ValueError, match="a drafter called 'repeats' already"):
        register_own(config)


def test_a_table_reads_a_file_once_it_is_asked_for(tmp_path):
    (tmp_path / "a.py").write_text("one = 1\n")
    table: Registry[int] = Registry(
        "key", lambda found: "" if found == 1 else "is not one", {"two": 2}
    )
    assert table["two"] == 2 and is_of_file("a.py:one") and not is_of_file("a:one")
    assert table[f"{tmp_path}/a.py:one"] == 1 == float(jnp.ones(()))
    with pytest.raises(KeyError):
        table["three"]
    with pytest.raises(ValueError, match="key is 'three'; it must be one of two"):
        table.require("three")
