"""The examples of the documents run as they stand, and do what they say."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from places import ROOT

from rlhf_jax import command

EXAMPLES = ROOT / "docs" / "examples"
DRAFTER = EXAMPLES / "new_drafter.py"
ESTIMATOR = EXAMPLES / "new_estimator.py"
ALGORITHM = EXAMPLES / "new_algorithm.py"


def run(*words: str) -> str:
    """What a program prints, in a process of its own: what it registers stays there."""
    done = subprocess.run(
        [sys.executable, *words], env=tiny_run.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_drafter_writes_the_plain_text():
    said = run(str(DRAFTER))
    lines = re.findall(r"^(\S+): (\d+) rounds, (.+)$", said, re.MULTILINE)
    (_, plain_rounds, plain), (name, rounds, text) = lines
    assert name == "toy-chain-2" and text == plain
    assert int(rounds) < int(plain_rounds)


def test_the_estimator_says_what_it_computes():
    assert json.loads(run(str(ESTIMATOR))) == [-1.0, 0.0, 0.0, 4.0]
    assert len(ESTIMATOR.read_text().splitlines()) < 40


def test_the_estimator_is_the_loops():
    rewards = np.random.default_rng(0).normal(size=10).astype(np.float32)
    want = [
        reward - np.median(np.delete(group, index))
        for group in rewards.reshape(2, 5)
        for index, reward in enumerate(group)
    ]
    got = runpy.run_path(str(ESTIMATOR))["leave_one_out_median"](jnp.asarray(rewards), 5)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_run_may_name_the_estimator(tmp_path, one_device):
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = {"dry_run": True, "algorithm__estimator": f"{ESTIMATOR}:ESTIMATOR"}
    assert command.main(["train", *tiny_run.arguments(tmp_path, model, **changes)[1:]]) == 0


@pytest.mark.slow
def test_a_run_of_the_algorithm_trains(tmp_path):
    """The loss begins at log 2, as policy and reference are one; then the policy leaves it."""
    assert len(ALGORITHM.read_text().splitlines()) < 40
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = {"steps": 2, "evaluation__every": 0, "algorithm__name": f"{ALGORITHM}:ONLINE_DPO"}
    arguments = tiny_run.arguments(tmp_path, model, **changes)[1:]
    run(str(ROOT / "launch" / "train.py"), *arguments)
    assert "online DPO" in (tmp_path / "run" / "report.html").read_text()
    first, second = tiny_run.lines(tmp_path / "run" / "metrics.jsonl")
    assert abs(first["loss/policy"] - np.log(2)) < 1e-4 and abs(first["dpo/margin"]) < 1e-4
    assert first["gradient/norm"] > 0 and abs(second["dpo/margin"]) > 1e-4
