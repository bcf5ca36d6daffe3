"""The quickstarts keep their promises."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    "name, gain, minutes",
    [("quickstart", 0.25, 10), pytest.param("quickstart_ppo", 0.2, 10, marks=pytest.mark.long)],
)
def test_a_quickstart_raises_the_reward(name, gain, minutes, tmp_path, kernels_are_interpreted):
    """The real command on the real model: held-out reward up in time, and the measure never trained
    on up too.
    """
    if kernels_are_interpreted:
        pytest.skip(
            "a run that is held to minutes takes its own kernels: interpreted ones have no such"
            " speed"
        )
    run = tmp_path / "run"
    start = time.monotonic()
    command = ["launch/train.py", "--config", f"configs/{name}.py", f"--config.workdir={run}"]
    # not the tests' eight devices
    alone = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - start < 60 * minutes
    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    before = evaluations[0]
    after = evaluations[-1]
    assert after["eval/reward"] >= before["eval/reward"] + gain
    assert after["eval/textblob"] > before["eval/textblob"]
