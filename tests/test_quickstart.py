"""The quickstart keeps its promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_quickstart_raises_the_reward(tmp_path):
    """The real command on the real model: held-out reward up by 0.25, and the measure never trained on up too."""
    run = tmp_path / "run"
    command = ["launch/train.py", "--config", "configs/quickstart.py", f"--config.workdir={run}"]
    alone = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # not the tests' eight devices
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    before, after = evaluations[0], evaluations[-1]
    assert after["eval/reward"] >= before["eval/reward"] + 0.25
    assert after["eval/textblob"] > before["eval/textblob"]
