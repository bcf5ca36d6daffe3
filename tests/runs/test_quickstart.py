"""The quickstarts keep their promises."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT
from slowness import slowness

from rlhf_jax.report.run import read_run
from rlhf_jax.report.warnings import warnings

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def run(name: str, folder: Path, *changes: str) -> tuple[dict, dict, list[dict], float]:
    """The first and last evaluation, the metrics and the minutes of the real command."""
    start = time.monotonic()
    command = ["launch/train.py", "--config", f"configs/{name}.py", f"--config.workdir={folder}"]
    # not the tests' eight devices
    alone = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *command, *changes], cwd=ROOT, env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    minutes = (time.monotonic() - start) / 60
    texts = [(folder / f"{each}.jsonl").read_text() for each in ("evaluations", "metrics")]
    evaluations, metrics = ([json.loads(line) for line in text.splitlines()] for text in texts)
    for key, before in evaluations[0].items():
        if key.startswith("eval/"):
            print(f"{key} {before:.3f} {evaluations[-1][key]:.3f}")
    return evaluations[0], evaluations[-1], metrics, minutes


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_makes_the_policy_better(seed, tmp_path, kernels_are_interpreted):
    """On names, cities and jobs that it never saw, and in forms of sentences that are new to it."""
    if kernels_are_interpreted:
        pytest.skip("a run that is held to minutes takes its own kernels: interpreted ones have no"
                    " such speed")  # fmt: skip
    before, after, metrics, minutes = run("quickstart", tmp_path, f"--config.seed={seed}")
    # 30 sentences and 15
    exact = [(2 * one["eval/exact/known_form"] + one["eval/exact/new_form"]) / 3
             for one in (before, after)]  # fmt: skip
    assert exact[1] >= exact[0] + 0.6 and after["eval/exact/new_form"] >= 10 / 15
    # What the reward does not ask for: other keys, and a value that the sentence lacks.
    for kind in ("other_keys", "missing_value"):
        assert after[f"eval/values/{kind}"] >= before[f"eval/values/{kind}"] - 0.05
    assert metrics[-1]["kl/response"] <= 6
    assert warnings(read_run(tmp_path)) == []
    assert minutes <= 6 * slowness()


@pytest.mark.long
def test_kind_sentences_get_better_and_their_template_is_told(tmp_path):
    """By the reward and by a measure that it is never trained on; most answers are of one form."""
    before, after, metrics, _ = run("kind_sentences", tmp_path)
    assert after["eval/reward"] >= before["eval/reward"] + 0.2
    assert after["eval/textblob"] >= before["eval/textblob"] + 0.05
    assert after["eval/named"] >= 0.95 and after["eval/ended"] >= 0.85
    assert metrics[-1]["kl/response"] <= 8
    (told,) = warnings(read_run(tmp_path))
    assert "of the answers have one form, “… is a”" in told


@pytest.mark.long
def test_the_hacked_reward_is_told_in_the_report(tmp_path):
    """KL, answers that are cut off and alike, and the measure that fell, while the reward rises."""
    before, after, _, _ = run("quickstart_hacked", tmp_path)
    assert after["eval/reward"] >= before["eval/reward"] + 0.25
    told = "\n".join(warnings(read_run(tmp_path)))
    print(told)
    for fault in ("nats from the reference", "named fell", "are cut off", "begin with"):
        assert fault in told


@pytest.mark.long
def test_the_quickstart_with_ppo_makes_the_policy_better(tmp_path):
    before, after, _, minutes = run("quickstart_ppo", tmp_path)
    assert after["eval/reward"] >= before["eval/reward"] + 0.25
    assert after["eval/exact/new_form"] >= before["eval/exact/new_form"] + 0.5
    assert minutes <= 10 * slowness()
