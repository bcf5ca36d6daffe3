"""The documented algorithm of one's own: a config names it, and it learns."""

import subprocess
import sys

import numpy as np
import pytest
import tiny_run
from places import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "new_algorithm.py"


@pytest.mark.slow
def test_a_run_of_the_example_trains(tmp_path):
    """The loss begins at log 2, as policy and reference are one; then the policy leaves it."""
    assert len(EXAMPLE.read_text().splitlines()) < 40
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = {"steps": 2, "evaluation__every": 0, "algorithm__name": f"{EXAMPLE}:ONLINE_DPO"}
    arguments = tiny_run.arguments(tmp_path, model, **changes)[1:]
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny_run.environment())
    assert done.returncode == 0, done.stderr
    assert "online DPO" in (tmp_path / "run" / "report.html").read_text()
    first, second = tiny_run.lines(tmp_path / "run" / "metrics.jsonl")
    assert abs(first["loss/policy"] - np.log(2)) < 1e-4 and abs(first["dpo/margin"]) < 1e-4
    assert first["gradient/norm"] > 0 and abs(second["dpo/margin"]) > 1e-4
