"""The documented estimator of one's own: it runs as a program, and a run may name it."""

import json
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from places import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "new_estimator.py"
NAME = f"{EXAMPLE}:ESTIMATOR"


@pytest.fixture
def example():
    """What the example defines."""
    return runpy.run_path(str(EXAMPLE))


def test_the_example_says_what_it_computes():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [-1.0, 0.0, 0.0, 4.0]
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_the_example_is_the_loops(example):
    rewards = np.random.default_rng(0).normal(size=10).astype(np.float32)
    want = [
        reward - np.median(np.delete(group, index))
        for group in rewards.reshape(2, 5)
        for index, reward in enumerate(group)
    ]
    got = example["leave_one_out_median"](jnp.asarray(rewards), 5)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_run_may_name_it(tmp_path, monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = {"steps": 1, "evaluation__every": 0, "algorithm__estimator": NAME}
    assert launch["main"](tiny_run.arguments(tmp_path, model, **changes)) == 0
