"""The whole program: a run on a tiny model, its files, its devices, its mistakes."""

import functools
import json
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from places import ROOT
from tiny_run import PPO, lines

from rlhf_jax import iteration
from rlhf_jax.command import main
from rlhf_jax.config import command_line
from rlhf_jax.generation.speculative import round as round_
from rlhf_jax.losses.advantages import ESTIMATORS
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import init
from rlhf_jax.monitoring.meanings import meaning_of
from rlhf_jax.monitoring.metrics import REQUIRED
from rlhf_jax.sources import rollouts

launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.fixture
def arguments(folder, tmp_path):
    """A command line that runs three small steps."""
    tiny_run.make_files(tmp_path)
    return functools.partial(tiny_run.arguments, tmp_path, folder)


def test_a_run_leaves_its_files(arguments, tmp_path, one_device, capsys, monkeypatch):
    """And a step's seconds are all of it, the weights' layout for generation included."""
    real = rollouts.decoding_models
    monkeypatch.setattr(rollouts, "decoding_models", lambda *asked: time.sleep(0.5) or real(*asked))
    assert launch["main"](arguments()) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    steps = lines(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2] and all(
        set(REQUIRED) <= set(line) for line in steps
    )
    stages = ("generation/seconds", "inference/seconds", "training/seconds")
    assert all(line["step/seconds"] >= 0.5 + sum(line[stage] for stage in stages) for line in steps)
    assert len(lines(run / "samples.jsonl")) == 3 * 16
    evaluations = lines(run / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    without = {key for line in (*steps, *evaluations) for key in line if not meaning_of(key)}
    assert without <= {"samples"}, "monitoring/meanings.py lacks them"
    assert all(
        line["mismatch/max"] < 1e-4 and line["ratio/max"] == pytest.approx(1, abs=1e-4)
        for line in steps
    )
    assert steps[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and steps[2]["kl/mean"] > 1e-6
    trained = open_source(run / "policy").load(jnp.float32)
    assert not np.allclose(trained.embed, init(jax.random.key(0), trained.config).embed)


@pytest.mark.slow
def test_a_run_without_kl_or_critic_scores_nothing(arguments, tmp_path, one_device):
    """The update's own forward pass gives the old log-probs."""
    once = {"steps": 2, "evaluation__every": 0, "kl__coefficient": 0.0}
    assert launch["main"](arguments(**once)) == 0
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert 0 < line["mismatch/max"] < 1e-4
        assert line["inference/padding"] == 0


def test_the_same_seed_gives_the_same_run(arguments, tmp_path, one_device):
    texts = []
    for name in ("a", "b"):
        assert launch["main"](arguments(workdir=tmp_path / name)) == 0
        texts.append(lines(tmp_path / name / "samples.jsonl"))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_strategy_changes_no_sample(arguments, folder, tmp_path, one_device):
    """The first step's samples are the same however they were drafted."""
    texts = []
    for name in ("plain", "lookup-tree-2x2", "model-chain-3"):
        changes = {
            "generation__strategy": name,
            "drafter__path": folder,
            "steps": 1,
            "evaluation__every": 0,
        }
        assert launch["main"](arguments(workdir=tmp_path / name, **changes)) == 0
        texts.append([row["response"] for row in lines(tmp_path / name / "samples.jsonl")])
    assert texts[0] == texts[1] == texts[2]


def test_an_earlier_run_is_kept(arguments, tmp_path, one_device):
    for _ in range(2):
        assert launch["main"](arguments(steps=1, evaluation__every=0)) == 0
    earlier = tmp_path / "run" / "earlier-1"
    assert (
        len(lines(earlier / "metrics.jsonl")) == 1
        and (earlier / "policy" / "model.safetensors").exists()
    )
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    "method",
    [
        pytest.param({}, id="grpo"),
        *(
            pytest.param(method, marks=pytest.mark.slow, id=name)
            for name, method in {
                "ppo": PPO,
                "lag": {"training__lag": 1, "plan": "disaggregated", "mesh__data": -1},
                "top k": {"generation__top_k": 20},
                "resample": {"generation__resample": 2, "training__drop_overlong": True},
            }.items()
        ),
    ],
)
def test_nothing_is_compiled_after_warm_up(method, arguments, monkeypatch, compilations):
    """Ten steps; what the first two compile is all, whatever the lengths of samples."""
    devices = jax.devices()[: 2 if "plan" in method else 1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    seen_after = []
    real = iteration.step
    with compilations() as seen:

        def counted(*inputs, **options):
            out = real(*inputs, **options)
            seen_after.append(len(seen))
            return out

        monkeypatch.setattr(iteration, "step", counted)
        once = {"steps": 10, "evaluation__every": 0}
        assert launch["main"](arguments(**once, **method)) == 0
    assert seen_after[1] == seen_after[-1], seen_after


def test_few_frames_stand_between_the_command_and_a_program(arguments, one_device, monkeypatch):
    """At most nine functions of ours, from `main` to the one that calls a jitted one."""
    stacks = []
    real = round_.run_round

    def counted(*inputs, **options):
        stacks.append(traceback.extract_stack()[:-1])
        return real(*inputs, **options)

    monkeypatch.setattr(round_, "run_round", counted)
    assert launch["main"](arguments(steps=1, evaluation__every=0)) == 0
    ours = [[one.name for one in stack if "/rlhf_jax/" in one.filename] for stack in stacks]
    stepping = [stack for stack in ours if "step" in stack]
    assert stepping and all(stack[0] == "main" and len(stack) <= 9 for stack in stepping), stepping


@pytest.mark.slow
def test_top_k_is_renormalised_in_training(arguments, tmp_path, one_device):
    """The sampled sets travel into training: its law is the sampled one, so the ratio starts at
    1.
    """
    assert (
        launch["main"](
            arguments(generation__top_k=5, generation__temperature=0.8, evaluation__top_k=5)
        )
        == 0
    )
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["mismatch/max"] < 1e-4 and line["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert 0 < line["entropy/estimate"] < np.log(5) + 0.3


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(name, marks=[] if name in ("gae", "rloo") else pytest.mark.long)
        for name in ESTIMATORS
    ],
)
def test_an_estimator_is_one_line(estimator, arguments, tmp_path, one_device):
    """An update from ratio 1, a policy that moves, and a critic only where one is wanted."""
    changes = {"algorithm__estimator": estimator, "evaluation__every": 0}
    if estimator == "gae":
        changes["algorithm__name"] = "ppo"
    assert launch["main"](arguments(steps=2, **changes)) == 0
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["ratio/max"] == pytest.approx(1, abs=1e-4) for line in steps)
    assert all(("loss/value" in line) == (estimator == "gae") for line in steps)
    assert steps[1]["kl/mean"] > 1e-6


@pytest.mark.slow
def test_a_reward_model_and_a_critic_from_it(arguments, tmp_path, one_device):
    """A classifier's folder scores, weighted against a function, and its copy becomes the
    critic.
    """
    judge = tiny_run.make_model(tmp_path / "judge", seed=3, tied=False, scalar_head=True)
    mixed = {
        "reward__models": judge,
        "reward__weights": "(0.25,2.0)",
        "critic__path": judge,
        "reward__missing_end": 0.5,
    }
    assert launch["main"](arguments(**(PPO | mixed), steps=2, evaluation__every=0)) == 0
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        terms = 0.25 * line["reward/vowels/mean"] + 2.0 * line["reward/judge/mean"]
        assert line["reward/mean"] == pytest.approx(terms, abs=1e-5)
        assert line["critic/mean"] != 0  # at the first step, too: its head is the classifier's


def test_prompts_without_signal_are_replaced(arguments, tmp_path, one_device):
    """Half of the prompts get one reward whatever is said: with resampling the trained ones are the
    others.
    """
    reward = tmp_path / "half.py"
    body = "    return len(response) if prompt[-1] in 'aceg' else 1.0\n"
    reward.write_text(f"def half(prompt, response, row):\n{body}")
    drawn = {
        "reward__functions": f"{reward}:half",
        "generation__resample": 4,
        "steps": 3,
        "evaluation__every": 0,
    }
    assert launch["main"](arguments(**drawn)) == 0
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {row["prompt"][-1] for row in samples} <= set("aceg") and len(samples) == 3 * 16
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert any(line["generation/attempts"] > 1 for line in steps)
    assert any(line["generation/groups_without_signal"] > 0 for line in steps)


def test_a_dry_run_says_what_is_needed_and_stops(arguments, tmp_path, one_device, capsys):
    assert launch["main"](arguments(dry_run=True)) == 0
    said = capsys.readouterr().out
    for words in (
        "3 steps",
        "16 samples, up to 192 tokens",
        "up to 576 tokens",
        "policy, float32",
        "peak",
    ):
        assert words in said, words
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_can_be_exported(arguments, tmp_path, one_device, capsys):
    """The policy of any checkpoint kept, as a folder: the last is the run's own."""
    words = arguments(steps=3, checkpoint__every=2, evaluation__every=3)
    assert launch["main"](words) == 0
    run = tmp_path / "run"
    assert main(["export", str(run)]) == 0 and main(["export", str(run), "--step", "2"]) == 0
    weights = [
        (run / name / "model.safetensors").read_bytes()
        for name in ("policy", "policy-3", "policy-2")
    ]
    assert weights[0] == weights[1] != weights[2]
    assert main(["export", str(run), "--step", "1"]) == 2
    assert "There is no checkpoint of step 1" in capsys.readouterr().err
    left = [(run / f"{name}.jsonl").read_bytes() for name in ("metrics", "evaluations")]
    assert launch["main"](words) == 0
    assert "All steps are done: raise steps to resume from 3" in capsys.readouterr().out
    assert [(run / f"{name}.jsonl").read_bytes() for name in ("metrics", "evaluations")] == left


def test_settings_may_change_only_where_asked_for(arguments, tmp_path, one_device, capsys):
    """A lower learning rate for the rest of a run: refused by name, unless the config says that it
    is meant.
    """
    start = {"steps": 2, "checkpoint__every": 1, "evaluation__every": 0}
    assert launch["main"](arguments(**start)) == 0
    changed = start | {"steps": 3, "training__learning_rate": 1e-4}
    assert launch["main"](arguments(**changed)) == 2
    assert "training.learning_rate = 0.001" in capsys.readouterr().err
    for steps in (3, 4):  # the second time the checkpoint is of the changed config
        allowed = {"checkpoint__allow_changes": True} if steps == 3 else {}
        assert launch["main"](arguments(**(changed | {"steps": steps} | allowed))) == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_an_error_loses_no_step(arguments, tmp_path, one_device, monkeypatch, capsys):
    """Whatever stops a step before its update: the steps before it are saved, and the run goes on
    as if nothing was.
    """
    changes = {"steps": 4, "checkpoint__every": 50, "evaluation__every": 0}
    assert launch["main"](arguments(workdir=tmp_path / "whole", **changes)) == 0
    score = iteration.score
    seen = []

    def failing(*inputs):
        seen.append(inputs)
        if len(seen) == 3:
            raise ValueError("the reward broke.")
        return score(*inputs)

    monkeypatch.setattr(iteration, "score", failing)
    assert (
        launch["main"](arguments(**changes)) == 2 and "the reward broke" in capsys.readouterr().err
    )
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert launch["main"](arguments(**changes)) == 0
    assert "Resuming from step 2" in capsys.readouterr().out
    assert lines(tmp_path / "run" / "samples.jsonl") == lines(tmp_path / "whole" / "samples.jsonl")


def test_a_run_knows_its_model_and_its_data(arguments, folder, tmp_path, one_device, capsys):
    """Other weights of the same shape, rows of the same prompts or ends are another run."""
    start = {"steps": 1, "checkpoint__every": 1, "evaluation__every": 0}
    assert launch["main"](arguments(**start)) == 0
    prompts = tmp_path / "prompts.jsonl"
    before = prompts.read_text()
    prompts.write_text(before.replace('"}', '", "answer": 1}'))
    assert launch["main"](arguments(**start)) == 2
    assert "the prompts of data.train" in capsys.readouterr().err
    prompts.write_text(before)
    ends = folder / "generation_config.json"
    before = ends.read_text()
    ends.write_text('{"eos_token_id": [99]}')
    try:
        assert launch["main"](arguments(**start)) == 2
        assert "the tokens that end a text" in capsys.readouterr().err
        assert launch["main"](arguments(**start, checkpoint__allow_changes=True)) == 0
    finally:
        ends.write_text(before)
    weights = folder / "model.safetensors"
    own = weights.read_bytes()
    other = tiny_run.make_model(tmp_path / "other", seed=1) / "model.safetensors"
    weights.write_bytes(other.read_bytes())
    try:
        assert launch["main"](arguments(**start)) == 2
        assert "the weights of the policy" in capsys.readouterr().err
    finally:
        weights.write_bytes(own)


@pytest.mark.slow
def test_a_changed_kl_coefficient_is_used(arguments, tmp_path, one_device):
    """Where the config's coefficient has changed since the checkpoint, the config is right; else
    the steered one is.
    """
    steered = PPO | {
        "checkpoint__every": 1,
        "evaluation__every": 0,
        "kl__horizon": 16,
        "kl__target": 1e-6,
    }
    assert launch["main"](arguments(steps=2, kl__coefficient=0.1, **steered)) == 0
    assert launch["main"](arguments(steps=3, kl__coefficient=0.1, **steered)) == 0
    allowed = {"checkpoint__allow_changes": True, "kl__coefficient": 0.5}
    assert launch["main"](arguments(steps=4, **(steered | allowed))) == 0
    found = [line["kl/coefficient"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert found[0] == 0.1 and found[2] > found[1] and found[3] == 0.5


def test_the_command_itself_fails_in_one_sentence():
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", "nowhere.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "There is no config file nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_own_loop_runs(folder, capsys):
    runpy.run_path(str(ROOT / "launch" / "own_loop.py"))["main"](str(folder), 2)
    printed = capsys.readouterr().out
    assert "step 0" in printed and "step 1" in printed
    assert len((ROOT / "launch" / "own_loop.py").read_text().splitlines()) <= 60


@pytest.mark.slow
def test_the_generation_benchmark_prints_a_json_line_a_case(folder, monkeypatch, capsys):
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "generation.py"), run_name="benchmark")
    sizes = ["--batch", "1,4", "--prompt-tokens", "8", "--new-tokens", "8", "--repeats", "2"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["generation.py", "--model", str(folder), "--strategy", "lookup-chain-2", *sizes],
    )
    benchmark["main"]()
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case["batch"] for case in cases] == [1, 4]
    for case in cases:
        assert 1 <= case["tokens_per_round"] <= 3 and 8 / 3 <= case["rounds"] <= 8
        assert (
            case["tokens_per_second"] > 0
            and case["peak_memory_bytes"] > 0
            and "compile_seconds" in case
        )


@pytest.mark.parametrize("name", ["quickstart", "quickstart_ppo", "kind_sentences"])
def test_the_quickstart_configs_are_valid(name):
    config = command_line.load(str(ROOT / "configs" / f"{name}.py"))
    assert config.reward.metrics and config.steps and config.workdir == f"runs/{name}"
