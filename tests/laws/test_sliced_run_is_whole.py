"""A run over slices: the samples, rewards and numbers of a run over one, whatever moves and
wherever it is scored.
"""

import functools
import json
import runpy
from pathlib import Path

import jax
import pytest
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax.rewards import combination
from rlhf_jax.setup import run as run_of

PPO = {"algorithm__name": "ppo", "training__minibatches": 2}
STEPS = 2
launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs two small steps of PPO on so many slices of one device: its folder."""
    home = tmp_path_factory.mktemp("runs")
    model = tiny_run.make_model(home / "tiny")
    tiny_run.make_files(home)
    every_device = jax.devices()

    @functools.cache
    def run(slices: int, **changes) -> Path:
        folder = home / "-".join(
            [str(slices), *(Path(str(value)).name for value in changes.values())]
        )
        asked = {
            "workdir": folder,
            "steps": STEPS,
            "mesh__slices": slices,
            "generation__max_rows": 4,
            **PPO,
            **changes,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "devices", lambda *_: every_device[:slices])
            patch.setattr(jax, "device_count", lambda: slices)
            arguments = tiny_run.arguments(home, model, generation__max_new_tokens=24, **asked)
            assert launch["main"](arguments) == 0
        return folder

    return run


@pytest.fixture(scope="module")
def alone(run):
    return run(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "fused", "reallocate"),
    [
        (2, True, True),
        (2, False, True),
        (4, True, False),
        pytest.param(2, False, False, marks=pytest.mark.long),
        pytest.param(4, True, True, marks=pytest.mark.long),
    ],
)
def test_slices_leave_what_one_leaves(run, alone, slices, fused, reallocate):
    folder = run(slices, generation__fuse_inference=fused, generation__reallocate=reallocate)
    assert lines(folder / "samples.jsonl") == lines(alone / "samples.jsonl")
    evaluations = [
        [line["samples"] for line in lines(at / "evaluations.jsonl")] for at in (folder, alone)
    ]
    assert evaluations[0] == evaluations[1]
    for ours, theirs in zip(
        lines(folder / "metrics.jsonl"), lines(alone / "metrics.jsonl"), strict=True
    ):
        assert ours["mismatch/max"] < 1e-4
        for key in (
            "reward/mean",
            "kl/response",
            "kl/mean",
            "loss/policy",
            "loss/value",
            "gradient/norm",
        ):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key


@pytest.mark.slow
def test_a_reward_model_may_score_beside_generation(run, tmp_path, monkeypatch):
    judge = tiny_run.make_model(tmp_path / "judge", seed=3, tied=False, scalar_head=True)
    told = []
    weighted = combination.weighted
    asked = {"reward__models": judge, "reward__weights": "(0.25,2.0)"}
    apart = run(1, **asked)
    monkeypatch.setattr(run_of, "weighted", lambda *given: told.append(given) or weighted(*given))
    fused = run(2, generation__fuse_inference=True, **asked)
    assert sum(len(known.get("judge", {})) for _, _, known in told) > 0
    for ours, theirs in zip(
        lines(fused / "metrics.jsonl"), lines(apart / "metrics.jsonl"), strict=True
    ):
        for key in ("reward/mean", "reward/judge/mean", "reward/vowels/mean", "kl/mean"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-4), key


@pytest.mark.slow
def test_a_trace_says_what_slices_did(run):
    folder = run(2, generation__fuse_inference=True, generation__reallocate=True)
    trace = json.loads((folder / "timeline" / f"step-{STEPS - 1:06d}.json").read_text())
    kinds = {(event.get("cat"), event["name"]) for event in trace["traceEvents"]}
    # The one by a slice beside generation; what all do together has the name of its call.
    assert {("inference", "inference"), ("training", "policy_training")} <= kinds
    assert "generate" in {kind for kind, _ in kinds}
    metrics = lines(folder / "metrics.jsonl")
    assert all(0 < line["generation/idle_share"] < 1 for line in metrics)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generation__fuse_inference": True}, "mesh.slices is 1"),
        (
            {"generation__fuse_inference": True, "mesh__slices": 8, "deterministic": True},
            "deterministic",
        ),
        ({"mesh__slices": 3}, "does not fit 8 devices"),
    ],
)
def test_what_slices_cannot_do_is_said_in_one_sentence(changes, said, tmp_path, capsys):
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    fsdp = {"mesh__fsdp": 8 if "mesh__slices" not in changes else 1}
    assert launch["main"](tiny_run.arguments(tmp_path, model, **fsdp, **changes)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
