"""Runs without generation, each an algorithm of one file: planned, trained, resumed, reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import toy_workflows
import toys
from learning import packed_of
from places import ROOT

from rlhf_jax import trainer
from rlhf_jax.config import command_line
from rlhf_jax.models.files.source import open_source
from rlhf_jax.planner.planned import hardware_of, plan_run
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.setup.run import _batches
from rlhf_jax.setup.run_spec import prepare
from rlhf_jax.training.kinds import GroupTerms
from rlhf_jax.training.settings import TrainingSettings

FILES = {"TWO_CRITICS": toys.__file__}
MEASURED = ("seconds", "per_second", "idle_share", "memory/host")


class Workflow(NamedTuple):
    """What an algorithm of one file needs, shows and leaves."""

    title: str
    loss: str
    left: str = "policy"
    changes: dict[str, Any] = {}  # noqa: RUF012


GENERATES = {"data__train": "prompts.jsonl", "reward__functions": "('reward.py:vowels',)"}
WORKFLOWS = {
    "sft": Workflow("supervised fine-tuning", "loss/policy"),
    "dpo": Workflow("DPO", "loss/policy"),
    "kto": Workflow("KTO", "loss/policy"),
    "reward_model": Workflow("a reward model", "loss/reward", "reward_model"),
    "preference_model": Workflow(
        "a preference model", "loss/policy", changes={"data__max_prompt_tokens": 96}
    ),
    "ANCHORED": Workflow(
        "GRPO with an anchor", "anchor/loss", changes=GENERATES | {"algorithm__anchor": 0.1}
    ),
    "TWO_CRITICS": Workflow("PPO", "judge/loss", changes=GENERATES),
}
LIKE_OTHERS = ("ANCHORED", "TWO_CRITICS", "dpo", "kto", "preference_model", "reward_model")


def named(algorithm: str) -> str:
    """The name of an algorithm, of the package or of a file of toys."""
    if algorithm in WORKFLOWS and algorithm.islower():
        return algorithm
    return f"{FILES.get(algorithm, toy_workflows.__file__)}:{algorithm}"


@pytest.fixture
def words(tmp_path):
    """Of an algorithm and changes: the command line of a run over eight rows, on one device."""
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    rows = [
        {
            "prompt": f"Say {word}",
            "completion": 5 * word,
            "chosen": word + "!",
            "rejected": "no, no",
            "label": word in "aeg",
        }
        for word in "abcdefgh"
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(algorithm: str, **changes) -> list[str]:
        common = {
            "steps": 4,
            "algorithm__name": named(algorithm),
            "data__train": tmp_path / "rows.jsonl",
            "data__rows_per_step": 4,
            "data__max_response_tokens": 24,
            "evaluation__every": 0,
            "reward__functions": "()",
            "critic__learning_rate": 1e-2,
            "training__learning_rate": 1e-2,
            "training__microbatch_rows": 4,
            "checkpoint__every": 1,
        }
        return tiny_run.arguments(tmp_path, model, **common | changes)

    return words


@pytest.mark.parametrize(
    ("algorithm", "loss", "trained", "frozen"),
    [
        ("sft", "", "policy", set()),
        ("dpo", "dpo", "policy", {"reference"}),
        ("dpo", "simpo", "policy", set()),
        ("dpo", "orpo", "policy", set()),
        ("reward_model", "", "reward_model", set()),
    ],
)
def test_only_the_models_of_a_workflow_are_planned(
    words, one_device, algorithm, loss, trained, frozen
):
    config = command_line.read(words(algorithm, **({"algorithm__loss": loss} if loss else {})))
    planned = plan_run(config, hardware_of(config))
    calls = {f"{trained}_training", *(f"{role}_inference" for role in frozen)}
    assert planned.plan.placements.keys() == calls
    held = {part.name for part in planned.parts if part.stage == "always" and part.bytes}
    assert held == {f"{trained}, float32", f"{trained}'s optimizer, two moments", *frozen}
    assert not any(part.stage == "generation" and part.bytes for part in planned.parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LIKE_OTHERS)) for name in WORKFLOWS],
)
def test_it_learns_is_killed_and_goes_on_bit_for_bit(words, tmp_path, name):
    workflow = WORKFLOWS[name]

    def start(folder: str) -> subprocess.Popen:
        common = {"workdir": tmp_path / folder, "deterministic": True, "steps": 6}
        given = words(name, **common | workflow.changes)
        command = [sys.executable, str(ROOT / "launch" / "train.py"), *given[1:]]
        return subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=tiny_run.environment()
        )

    def run(folder: str) -> list[dict]:
        process = start(folder)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        return tiny_run.lines(tmp_path / folder / "metrics.jsonl")

    whole = run("whole")
    assert all(np.isfinite(line[workflow.loss]) for line in whole)
    if not workflow.changes:
        assert whole[-1][workflow.loss] < whole[0][workflow.loss] - 0.05
        assert not any(key.startswith("generation/") for line in whole for key in line)
    if name == "kto":  # without a gain every answer costs 1 - sigmoid(0)
        assert whole[0][workflow.loss] == pytest.approx(0.5, abs=1e-4)
    if name == "dpo":  # policy and reference begin as one
        assert whole[0][workflow.loss] == pytest.approx(np.log(2), abs=1e-4)

    killed = start("parts")
    written = tmp_path / "parts" / "metrics.jsonl"
    while not written.exists() or written.read_text().count("\n") < 3:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    parts = run("parts")
    first, second = (
        [{key: line[key] for key in line if not key.endswith(MEASURED)} for line in lines]
        for lines in (whole, parts)
    )
    assert first == second
    report = (tmp_path / "whole" / "report.html").read_text()
    shown = {"loss/policy": ">Loss<"}.get(workflow.loss, workflow.loss)
    assert workflow.title in report and shown in report
    config = open_source(tmp_path / "whole" / workflow.left).config
    assert config.scalar_head == (workflow.left == "reward_model")


def test_the_state_behind_a_sequence_is_what_a_scalar_head_reads_at_its_end():
    tokens = np.array([[1, 2, 3, 4, 0], [1, 2, 5, 6, 7]], np.int32)
    mask = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
    batch = Sequences(tokens, mask, np.zeros(2, np.int32))
    values = np.ones(mask.shape, np.float32)
    wider = batch.with_columns(values=values).past_end()
    assert wider.mask.sum(axis=1).tolist() == [3, 4] and wider.mask[0, 4] and wider.mask[1, 5]
    assert wider.tokens.shape == wider.columns["values"].shape == (2, 6)
    assert wider.tokens[0, 4] == wider.tokens[1, 5] == 0

    packed = packed_of(np.array([[1, 1, 1, 1, 0]], bool), np.array([[0, 0, 1, 1, 0]], np.int32), 2)
    terms = GroupTerms(jnp.zeros((1, 5)), packed, TrainingSettings())
    at_end = terms.at_end(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    assert at_end.tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward__functions": "('reward.py:vowels',)"}, "has no use for reward.functions: clear"),
        (
            {"evaluation__every": 1, "data__eval": ""},
            "evaluation.every is 1 but data.eval is empty; give held-out prompts",
        ),
        ({"drafter__layers": 1}, "has no use for drafter.layers: clear"),
        (
            {"algorithm__name": "kto", "data__columns": "{'chosen': 'label'}"},
            "two columns would be 'label'",
        ),
        (
            {"algorithm__name": "kto", "data__columns": "{'label': 'other', 'chosen': 'label'}"},
            "must have true or false in its field 'label', and has 'a!'",
        ),
        (
            {"algorithm__name": "kto", "data__rows_per_step": 1},
            "data.rows_per_step is 1, and KTO compares with answers to other prompts",
        ),
        ({"algorithm__name": "reward_model", "data__raw": True}, "data.raw is set, but a reward"),
        (
            {"algorithm__name": "preference_model", "data__raw": True},
            "data.raw is set, but a preference model reads comparisons without it",
        ),
        (
            {"algorithm__name": "dpo", "algorithm__loss": "simpo", "kl__reference": "other"},
            "has no use for kl.reference: clear",
        ),
        ({"training__lag": 1}, "does not weigh samples of older weights"),
        ({"plan": "disaggregated"}, "this run generates nothing; choose 'colocated'"),
        ({"data__rows_per_step": 0}, "data.rows_per_step is 0; it must be above 0"),
        ({"data__max_response_tokens": 2}, "longer than 2 tokens; raise data.max_response_tokens"),
        ({"data__max_response_tokens": 500}, "is 524, but the model's context is 128"),
        (
            {"data__columns": "{'completion': 'answer'}"},
            "must have a text in its field 'completion', and has None",
        ),
    ],
)
def test_what_given_samples_cannot_be_is_one_sentence(words, one_device, changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        trainer.do_run(command_line.read(words("sft", **changes)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_labels_of_one_kind_are_refused(words, one_device, tmp_path, key):
    row = {"prompt": "a", "completion": "b", "label": True}
    (tmp_path / "same.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    places = {"data.eval": tmp_path / "rows.jsonl", key: tmp_path / "same.jsonl"}
    config = command_line.read(words("kto", evaluation__every=1, **places))
    with pytest.raises(ValueError, match=f"^{key} has the same 'label' in every row"):
        prepare(config)


def test_several_sources_are_one_data_set_and_shares_are_theirs(words, one_device, tmp_path):
    row = {"prompt": "Say z", "completion": "z"}
    (tmp_path / "more.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    changes = {"data__mixture": f"('{tmp_path}/more.jsonl',)", "data__shares": "(3, 1)"}
    spec = prepare(command_line.read(words("sft", **changes)))
    assert spec.sizes == (8, 3) and spec.prompts.texts[8:] == 3 * ["Say z"]
    assert len(spec.given) == len(spec.prompts) == 11
    batches = _batches(spec)
    rows, _ = batches.take(batches.start)
    assert sum(rows >= 8) == 1 and len(rows) == 4
